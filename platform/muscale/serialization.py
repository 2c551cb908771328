"""Conversion of recorded results to plain values and back, by one cattrs converter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import cattrs

from proxy_models.serialization import converter as models
from scaling.presentation import Result

converter = models.copy(forbid_extra_keys=False, unstruct_collection_overrides={tuple: list})


class Recorded(Result):
    """Base class of results in the ledger; `DERIVED` names the properties that `to_dict` adds for readers."""

    DERIVED: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including the derived ones."""
        fields: dict[str, Any] = converter.unstructure(self)
        return fields | {name: converter.unstructure(getattr(self, name)) for name in self.DERIVED}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the values of `to_dict`.

        Raises:
            ValueError: If values are invalid; the message names each location, its rule and its value.
        """
        try:
            return converter.structure(values, cls)
        except cattrs.BaseValidationError as error:
            raise ValueError("; ".join(cattrs.transform_error(error))) from error


def dotted(tree: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the leaves of nested plain values under names such as "model.d_model"."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= dotted(value, f"{place}{name}.") if isinstance(value, Mapping) else {f"{place}{name}": value}
    return found


def _has_own(kind: Any) -> bool:
    """Whether a class of another package converts itself."""
    return (
        isinstance(kind, type)
        and not issubclass(kind, Recorded)
        and hasattr(kind, "to_dict")
        and hasattr(kind, "from_dict")
    )


converter.register_unstructure_hook_func(_has_own, lambda value: value.to_dict())
converter.register_structure_hook_func(_has_own, lambda values, kind: kind.from_dict(values))
