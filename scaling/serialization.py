"""Results as JSON and back, by one cattrs converter: a field's annotation states what its type alone does not.

JSON has no NaN and infinity: both become null. `OrNan` and `OrInfinite` annotate the numbers that null is read back as; so does
`TableLayout` for columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from scaling.presentation import Result


@dataclass(frozen=True)
class Null:
    """The number that null is read back as."""

    stands_for: float


OrNan = Annotated[float, Null(math.nan)]
OrInfinite = Annotated[float, Null(math.inf)]
OrMinusInfinite = Annotated[float, Null(-math.inf)]


@dataclass(frozen=True, eq=False)
class TableLayout:
    """Layout of a DataFrame in JSON.

    Attributes:
        orient: as in `DataFrame.to_dict`; `tight` keeps the index.
        index: name of the column that becomes the index again.
        nulls: numbers that null is read back as, by column; NaN in all other columns.
    """

    orient: Literal["index", "list", "records", "tight"]
    index: str | None = None
    nulls: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, table: pd.DataFrame) -> Any:
        """Convert the table to JSON's types."""
        flat = table.reset_index() if self.index else table
        known = flat.notna() & flat.map(lambda value: value not in (math.inf, -math.inf)).astype(bool)
        return flat.astype(object).where(known, None).to_dict(self.orient)

    def from_json(self, data: Any) -> pd.DataFrame:
        """Invert `to_json`; columns without any value, which have lost their type, become numbers."""
        table = pd.DataFrame.from_dict(data, orient="tight") if self.orient == "tight" else pd.DataFrame(data)
        unknown = [name for name in table if table[name].dtype == object and table[name].isna().all()]
        table = table.astype(dict.fromkeys(unknown, np.float64)).fillna(dict(self.nulls))
        return table.set_index(self.index) if self.index else table


class JsonResult(Result):
    """Base of results that are saved; `DERIVED` names the properties that `to_dict` adds for readers."""

    DERIVED: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict, with null for numbers that are not finite; `from_dict` restores the result."""
        fields: dict[str, Any] = converter.unstructure(self)
        return {name: converter.unstructure(getattr(self, name)) for name in self.DERIVED} | fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return converter.structure(data, cls)


class FittedResult(JsonResult):
    """Base of fits that may be doubtful: `warnings` are the reasons, empty if there are none."""

    warnings: tuple[str, ...]

    @property
    def status(self) -> str:
        """`ok`, or `doubtful` for the reasons in `warnings`."""
        return "doubtful" if self.warnings else "ok"

    @property
    def status_line(self) -> str:
        """The status, and the warnings behind it."""
        return "; ".join((self.status, *self.warnings))


def _annotated_with(kind: type) -> Callable[[Any], bool]:
    return lambda hint: get_origin(hint) is Annotated and isinstance(get_args(hint)[1], kind)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_array(hint: Any) -> bool:
    return getattr(hint, "__origin__", hint) is np.ndarray


def _is_saved(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, JsonResult)


def _resolved(kind: Any) -> Any:
    """Return the class with its fields' annotations evaluated: cattrs drops `Annotated` when it evaluates them."""
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        each.type = hints[each.name]
    return kind


def _keyed_by_numbers(hint: Any) -> bool:
    return get_origin(hint) is dict and get_args(hint)[0] is float


converter = Converter(detailed_validation=False, unstruct_collection_overrides={tuple: list})
converter.register_unstructure_hook_factory(
    _is_saved, lambda kind: make_dict_unstructure_fn(_resolved(kind), converter)
)
converter.register_structure_hook_factory(_is_saved, lambda kind: make_dict_structure_fn(_resolved(kind), converter))
for _plain in (bool, int, float, str):  # unchanged: a float field's 5 stays 5
    converter.register_structure_hook(_plain, lambda value, _: value)
converter.register_unstructure_hook(float, _finite_or_none)
converter.register_structure_hook_func(
    _annotated_with(Null), lambda value, hint: get_args(hint)[1].stands_for if value is None else value
)
converter.register_unstructure_hook_func(_is_array, lambda array: array.tolist())
converter.register_structure_hook_func(_is_array, lambda value, _: np.asarray(value, np.float64))
converter.register_unstructure_hook(pd.DataFrame, TableLayout("records").to_json)
converter.register_unstructure_hook(pd.Series, lambda series: series.to_dict())
converter.register_unstructure_hook_factory(_annotated_with(TableLayout), lambda hint: get_args(hint)[1].to_json)
converter.register_structure_hook_func(
    _annotated_with(TableLayout), lambda data, hint: get_args(hint)[1].from_json(data)
)
converter.register_unstructure_hook_factory(  # keys in JSON are strings
    _keyed_by_numbers, lambda hint: lambda by_number: [[key, converter.unstructure(v)] for key, v in by_number.items()]
)
converter.register_structure_hook_func(
    _keyed_by_numbers, lambda pairs, hint: {key: converter.structure(v, get_args(hint)[1]) for key, v in pairs}
)
