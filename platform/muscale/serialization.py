"""Conversion of recorded results to plain values and back, by one cattrs converter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy_models.serialization import Serializable
from proxy_models.serialization import converter as models
from scaling.presentation import Result

converter = models.copy(forbid_extra_keys=False, unstruct_collection_overrides={tuple: list})


class Recorded(Serializable, Result):
    """Base class of results in the ledger, which later versions may extend by fields."""

    CONVERTER = converter


def dotted(tree: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the leaves of nested plain values under names such as "model.d_model"."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= dotted(value, f"{place}{name}.") if isinstance(value, Mapping) else {f"{place}{name}": value}
    return found


def _has_own(kind: Any) -> bool:
    """Whether a class of another package converts itself."""
    return isinstance(kind, type) and hasattr(kind, "from_dict") and not issubclass(kind, Recorded)


converter.register_unstructure_hook_func(_has_own, lambda value: value.to_dict())
converter.register_structure_hook_func(_has_own, lambda values, kind: kind.from_dict(values))
