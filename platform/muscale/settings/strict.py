"""Base class of all tables of settings, and messages about faulty tables."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muscale.errors import refusing

T = TypeVar("T")
_LONGEST = 200  # most characters of a value in a message
PositiveOrInfinite: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""inf means no limit."""


def _all_differ(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len({*values}) < len(values):
        raise ValueError("must all differ")
    return values


AllDiffer = pydantic.AfterValidator(_all_differ)
"""Rule of a list without repeated entries."""


class TableError(ValueError):
    """A table that breaks rules; `lines` has a message for each."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the messages of a faulty table to the problems, so that the errors of other tables are found too."""
    try:
        yield
    except TableError as error:
        problems += error.lines


class StrictTable(BaseModel):
    """A table without unknown keys, conversions or changes; numbers must be finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )


def short_repr(value: object) -> str:
    """A value as Python writes it, with lists as in the file, cut off if long."""
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def format_errors(
    error: ValidationError,
    where: str,
    allowed: type[BaseModel] | Sequence[str],
    separator: str = ": ",
    listed: Set[str] = frozenset(),
) -> list[str]:
    """One line for each of pydantic's errors.

    Args:
        where: The file, or the file and the table.
        allowed: The model of the tables that may occur, or the allowed keys.
        separator: Between `where` and the key.
        listed: Tables whose errors are listed already, and which are therefore missing.
    """
    details: list[dict[str, Any]] = [dict(detail) for detail in error.errors() if listed.isdisjoint(detail["loc"][:1])]
    inside = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    # pydantic also reports a list with a faulty entry as too short.
    details = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]
    return [_format_error(detail, where, allowed, separator) for detail in details]


def rule_of(detail: Mapping[str, Any]) -> str:
    """The rule that a pydantic error states, in this project's wording."""
    match detail["type"]:
        case "tuple_type":
            return "must be a list"
        case "too_short":
            least = detail["ctx"]["min_length"]
            return f"must have at least {least} {'entry' if least == 1 else 'entries'}"
    return str(detail["msg"]).removeprefix("Value error, ").replace("Input should be", "must be", 1)


def broken(key: str, rule: Callable[..., object], *values: object) -> list[str]:
    """One line for the rule that a call with these values breaks by ValueError or OverflowError; none if it breaks none."""
    try:
        rule(*values)
    except (ValueError, OverflowError) as error:
        return [f"{key}: {error}"]
    return []


def _format_error(detail: dict[str, Any], where: str, allowed: type[BaseModel] | Sequence[str], separator: str) -> str:
    """File, key, rule and value of one error."""
    key = ".".join(map(str, detail["loc"]))
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        *tables, name = detail["loc"]
        keys = _keys_at(allowed, tables) if isinstance(allowed, type) else allowed
        return f"{where}{separator}{key}: unknown key (value {short_repr(value)}){_did_you_mean(str(name), keys)}"
    if detail["type"] == "missing":
        return f"{where}{separator}{key}: missing, a value is required"
    rule = rule_of(detail)
    location = f"{where}{separator}{key}" if key else where
    return f"{location}: {rule}, got {short_repr(value)}" if not isinstance(value, dict) else f"{location}: {rule}"


def _keys_at(model: Any, tables: Sequence[str | int]) -> list[str]:
    """The allowed keys of a table of the file."""
    for table in tables:
        if get_origin(model) in (dict, tuple):
            model = get_args(model)[0 if isinstance(table, int) else 1]
        else:
            model = model.model_fields[table].annotation
        if get_origin(model) is UnionType:  # an optional table
            model = next(kind for kind in get_args(model) if kind is not NoneType)
    return list(model.model_fields)


def _did_you_mean(key: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    return f"; did you mean {near[0]}?" if near else f"; allowed are {', '.join(allowed)}"


def lists_to_tuples(value: Any) -> Any:
    """A deep copy of TOML's values with tuples for lists, since settings are immutable."""
    if isinstance(value, Mapping):
        return {key: lists_to_tuples(entry) for key, entry in value.items()}
    return tuple(lists_to_tuples(entry) for entry in value) if isinstance(value, list) else value


def require_whole_or_fraction(table: str, settings: BaseModel, names: Sequence[str]) -> None:
    """Refuse values such as 1.5: Ray gives a task whole units of a resource or a fraction of one unit.

    Raises:
        ValueError: Naming key, rule and value.
    """
    for name in names:
        if (amount := getattr(settings, name)) > 1 and amount != int(amount):
            raise ValueError(f"{table}.{name} must be a whole number or a fraction of one, got {amount}")


def build_strictly(build: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build settings, or as strictly a library's dataclass, from a table; raise TableError with a line for each error."""
    if issubclass(build, StrictTable):
        try:
            return build(**table)
        except ValidationError as error:
            raise TableError(*format_errors(error, where, [*build.model_fields], separator=".")) from error
    hints, table, problems = get_type_hints(build), dict(table), list[str]()
    for name, hint in hints.items():
        entry = next((kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)), None)
        if entry and isinstance(table.get(name), tuple):
            entries = list(table[name])
            for number, value in enumerate(entries):
                if isinstance(value, dict):
                    with collecting(problems):
                        entries[number] = build_strictly(cast(type[Any], entry), value, f"{where}.{name}.{number}")
            table[name] = tuple(entries)
    if problems:
        raise TableError(*problems)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(build)  # type: ignore[arg-type]
    }
    valid = build_strictly(pydantic.create_model(build.__name__, __base__=StrictTable, **fields), table, where)
    with refusing(where, raising=TableError):
        # 4 becomes 4.0 for a float, so that equal settings have equal keys.
        return build(**{name: getattr(valid, name) for name in fields})
