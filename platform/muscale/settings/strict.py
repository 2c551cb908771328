"""The base of every table of a file of settings, and what is said of one that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

MOST_TOLD = 20
"""Problems of one file that a message names."""
_SHOWN = 200  # characters of a value
PositiveOrInfinite: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""Where inf means: without bound."""


class StrictTable(BaseModel):
    """A table without unknown keys, conversions or changes; its numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )


def told(problems: Sequence[str]) -> str:
    """The first problems, a line each, and how many more there are."""
    more = [f"and {len(problems) - MOST_TOLD:,} more"] if len(problems) > MOST_TOLD else []
    return "\n".join([*problems[:MOST_TOLD], *more])


def explained(
    details: Sequence[dict[str, Any]], where: str, allowed: type[BaseModel] | Sequence[str], separator: str = ": "
) -> list[str]:
    """`explain` for several; of those that nobody will read only that they are there."""
    seen = [explain(detail, where, allowed, separator) for detail in details[: MOST_TOLD + 1]]
    return seen + [f"{where}{separator}{len(details)} problems"] * (len(details) - len(seen))


def shown(value: object) -> str:
    """A value as Python writes it, its beginning if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def explain(detail: dict[str, Any], where: str, allowed: type[BaseModel] | Sequence[str], separator: str = ": ") -> str:
    """One line for one of pydantic's errors: file, key, rule, value; `allowed` are the tables, or the keys, that there may be."""
    key = ".".join(str(part) for part in detail["loc"])
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        *tables, name = detail["loc"]
        keys = _keys_at(allowed, tables) if isinstance(allowed, type) else allowed
        return f"{where}{separator}{key}: unknown key (value {shown(value)}){_did_you_mean(str(name), keys)}"
    if detail["type"] == "missing":
        return f"{where}{separator}{key}: missing, a value is required"
    rule = "Input should be a list" if detail["type"] == "tuple_type" else detail["msg"].removeprefix("Value error, ")
    location = f"{where}{separator}{key}" if key else where
    return f"{location}: {rule}, got {shown(value)}" if not isinstance(value, dict) else f"{location}: {rule}"


def _keys_at(model: Any, tables: Sequence[str | int]) -> list[str]:
    """The keys that are allowed in a table of the file."""
    for table in tables:
        if get_origin(model) in (dict, tuple):
            model = get_args(model)[0 if isinstance(table, int) else 1]
        else:
            model = model.model_fields[table].annotation
    return list(model.model_fields)


def _did_you_mean(key: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    return f"; did you mean {near[0]}?" if near else f"; allowed are {', '.join(allowed)}"


def lists_to_tuples(value: Any) -> Any:
    """A deep copy of TOML's values with tuples for its lists, as the settings are immutable."""
    if isinstance(value, Mapping):
        return {key: lists_to_tuples(entry) for key, entry in value.items()}
    return tuple(lists_to_tuples(entry) for entry in value) if isinstance(value, list) else value


def require_parts(table: str, settings: BaseModel, names: Sequence[str]) -> None:
    """Refuse 1.5 of a resource: a task of Ray takes whole ones, or a part of one.

    Args:
        table: Name of the settings' table.
        settings: The table.
        names: Of its keys.

    Raises:
        ValueError: Naming the key, the rule and the value.
    """
    for name in names:
        if (part := getattr(settings, name)) > 1 and part != int(part):
            raise ValueError(f"{table}.{name} must be a whole number or a part of one, got {part}")
