"""The converter of this package: dataclasses to plain values for JSON and for hashes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

import cattrs
from cattrs.v import format_exception

converter = cattrs.Converter(forbid_extra_keys=True)
_ACCEPTED: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


def _unchanged(value: Any, kind: type) -> Any:
    """Return a value of the type unchanged: 3 must not become 3.0, since hashes distinguish them."""
    if not isinstance(value, _ACCEPTED[kind]) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"must be of type {kind.__name__}, got {value!r}")
    return value


for _kind in _ACCEPTED:
    converter.register_structure_hook(_kind, _unchanged)
# A StrEnum member is a string, so cattrs would keep it, and `torch.load` would refuse a checkpoint that names its class.
converter.register_unstructure_hook(StrEnum, lambda member: member.value)
converter.register_structure_hook(StrEnum, lambda value, kind: kind(value))


class Serializable:
    """A dataclass that a converter writes and reads field by field; `DERIVED` names properties that are written for readers."""

    CONVERTER: ClassVar[cattrs.Converter] = converter
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which `from_dict` makes an equal object."""
        fields: dict[str, Any] = self.CONVERTER.unstructure(self)
        return fields | {name: self.CONVERTER.unstructure(getattr(self, name)) for name in self.DERIVED}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; raise ValueError naming each path, its rule and its value."""
        if not isinstance(values, Mapping):
            raise ValueError(f"must be a table, got {values!r}")
        try:
            return cls.CONVERTER.structure(values, cls)
        except cattrs.BaseValidationError as error:
            raise ValueError("; ".join(cattrs.transform_error(error, format_exception=_describe))) from error


def _describe(error: BaseException, kind: type | None) -> str:
    has_words = not isinstance(error, KeyError | cattrs.ForbiddenExtraKeysError)
    return str(error) if has_words else format_exception(error, kind)
