"""The rows of a ledger that somebody else wrote, held against the tables: SQLite keeps any value in any column."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from muscale.settings.strict import shown
from muscale.store.tables import metadata

MOST_DEPTH = 50
"""Of JSON; what a study writes has ten (assumed). Python's stack ends at a few hundred."""
_AT_ONCE = 500  # rows in memory
_LISTS = ("path",)
_TIMES = ("created_at", "registered_at")
_LAST_YEAR = 2999  # a ledger adds to its latest time
_KINDS: dict[type, tuple[Any, str]] = {
    sa.String: (str, "text"),
    sa.Integer: (int, "a whole number"),
    sa.Float: ((int, float), "a number"),
}


def fault(connection: sa.Connection, tables: Collection[str]) -> str:
    """The first value of these tables that no ledger has: its place, the rule and the value; "" if there is none.

    Raises:
        ValueError: If what should be JSON is none; a RecursionError if it is too deep to be read.
    """
    for name in tables:
        table = metadata.tables[name]
        result = connection.execute(sa.select(table).execution_options(yield_per=_AT_ONCE))
        for number, row in enumerate(result.mappings(), 1):
            for column in table.c:
                if rule := _broken(column, row[column.name]):
                    return f"{name}, row {number}, {column.name}: must be {rule}, got {shown(row[column.name])}"
    return ""


def _broken(column: sa.Column[Any], value: Any) -> str:
    """The rule that a value breaks, "" if it breaks none."""
    if value is None:
        return "" if column.nullable else "there"
    if isinstance(column.type, sa.JSON):
        if not isinstance(value, list if column.name in _LISTS else dict):
            return "a list of JSON" if column.name in _LISTS else "a table of JSON"
        return _unfit(value)
    kind, rule = next(found for of, found in _KINDS.items() if isinstance(column.type, of))
    if not isinstance(value, kind) or isinstance(value, bool):
        return rule
    if column.name in _TIMES and not _is_time(value):
        return "a time as ISO 8601 has it, UTC"
    return "" if not isinstance(value, float) or math.isfinite(value) else "finite"


def _unfit(value: Any) -> str:
    """What is wrong with JSON, whatever it says; walked level by level, as a deep one would end Python's stack."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                inner += [*node.keys(), *node.values()]
            elif isinstance(node, list):
                inner += node
            elif isinstance(node, str) and not _is_text(node):
                return "JSON of whole characters"
            elif isinstance(node, int) and not -(2**63) <= node < 2**63:
                return "JSON whose whole numbers fit into 64 bits"
        if not inner:
            return ""
        level = inner
    return f"JSON of at most {MOST_DEPTH} tables and lists in one another"


def _is_time(text: str) -> bool:
    """Whether it is one that sorts among those of the ledger, which are compared as text."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return False
    plain = {found.isoformat(timespec=part) for part in ("auto", "microseconds")}
    return found.utcoffset() == timedelta() and text in plain and found.year <= _LAST_YEAR


def _is_text(value: str) -> bool:
    """Half a character, which JSON can say, can't be written down again."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
