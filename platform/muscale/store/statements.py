"""The ledger's SQL: functions of a connection with plain arguments, so that a storage can run them in another process.

Each function may run twice if its answer was lost, with the effect of once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import pandas as pd
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from muscale.errors import LeaseLostError
from muscale.store.ledger_tables import (
    ResultKind,
    forecasts,
    leases,
    metadata,
    results,
    revisions,
    runs,
    segments,
    studies,
)
from muscale.store.outcome import Outcome
from muscale.store.storage import T

EVENTS = ("trials", "rungs", "decisions")  # tables that share the sequence numbers of a sweep
KEYS_AT_ONCE = 500  # most keys in one statement
_CHECKS = (ResultKind.CHECK.value, ResultKind.LEAKS.value, ResultKind.NEAR_DUPLICATES.value)
_OUTCOME = (
    "loss",
    "source_losses",
    "diverged_at_step",
    "diverged_because",
    "seconds",
    "numerics",
    "segment",
    "environment",
)


def find(
    connection: sa.Connection,
    table: str,
    where: Mapping[str, Any] | None = None,
    order: Sequence[str] = (),
    *,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Rows of a table in which columns have these values, ordered by columns; `-name` orders from the largest."""
    columns = metadata.tables[table].c
    query = sa.select(metadata.tables[table])
    for name, value in (where or {}).items():
        query = query.where(columns[name] == value)
    for name in order:
        query = query.order_by(columns[name[1:]].desc() if name.startswith("-") else columns[name])
    return [dict(row) for row in connection.execute(query.limit(limit)).mappings()]


def result_keys(connection: sa.Connection, kind: str) -> set[str]:
    """The keys of all results of a kind."""
    return set(connection.execute(sa.select(results.c.key).where(results.c.kind == kind)).scalars())


def sweep_rows(connection: sa.Connection, sweep: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a sweep by table, in order, on one snapshot; otherwise a decision could refer to a trial that was not read."""
    order = {"rounds": "round", "trials": "sequence", "rungs": "sequence", "decisions": "sequence"}
    return {table: find(connection, table, {"sweep": sweep}, [column]) for table, column in order.items()}


def insert_once(connection: sa.Connection, table: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert the rows whose keys do not exist yet; return the number of new rows."""
    statement = _insert_once(connection.dialect.name, table)
    return sum(connection.execute(statement, dict(row)).rowcount for row in rows)


@cache
def _insert_once(dialect: str, table: str) -> sa.Insert:
    insert: Any = (postgresql if dialect == "postgresql" else sqlite).insert
    statement: sa.Insert = insert(metadata.tables[table]).on_conflict_do_nothing()
    return statement.execution_options(preserve_rowcount=True)


def insert_latest(connection: sa.Connection, table: str, row: Mapping[str, Any]) -> None:
    """Insert a row at its time, or right after the latest row if its clock is behind (set back, or another machine's)."""
    stamp = "registered_at" if table == forecasts.name else "created_at"
    last = connection.execute(sa.select(sa.func.max(metadata.tables[table].c[stamp]))).scalar()
    if last and last >= row[stamp]:
        after = datetime.fromisoformat(last) + timedelta(microseconds=1)
        row = {**row, stamp: after.isoformat(timespec="microseconds")}
    insert_once(connection, table, [row])


def check_token(connection: sa.Connection, name: str, token: int) -> None:
    """Refuse an outdated token of a lease in a writing transaction: raise LeaseLostError if another owner has taken it."""
    current = connection.execute(sa.select(leases.c.token).where(leases.c.name == name)).scalar()
    if current != token:
        raise LeaseLostError(f"lease {name}: held with token {token}, but the current one is {current}")


def fenced(
    connection: sa.Connection, lease: str, token: int, function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Run the function under the current token of a lease, and return its result."""
    check_token(connection, lease, token)
    return function(connection, *args, **kwargs)


def claim(
    connection: sa.Connection, identity: dict[str, Any], config: dict[str, Any], created_at: str
) -> dict[str, Any]:
    """Claim the ledger, as `Ledger.claim` describes; return the ledger's identity afterwards."""
    found: dict[str, Any] | None = connection.execute(sa.select(studies.c.identity)).scalar()
    if found is None:
        insert_once(connection, "studies", [{"identity": identity, "created_at": created_at}])
    elif found != identity and not is_begun(connection):
        connection.execute(sa.update(studies).values(identity=identity))
    elif found != identity:
        return found
    latest = connection.execute(sa.select(revisions.c.config).order_by(revisions.c.revision.desc()).limit(1)).scalar()
    if latest != config:
        insert_once(connection, "revisions", [{"config": config, "created_at": created_at}])
    return identity


def is_begun(connection: sa.Connection) -> bool:
    """Whether anything but a check of the family or of the corpus was recorded or is running."""
    rows = [
        *(sa.select(sa.literal(1)).select_from(table) for table in (segments, forecasts)),
        sa.select(sa.literal(1)).where(results.c.kind.not_in(_CHECKS)),
        sa.select(sa.literal(1)).where(leases.c.owner.is_not(None)),
    ]
    return any(connection.execute(query.limit(1)).first() for query in rows)


def forget_states(connection: sa.Connection, keys: Sequence[str]) -> None:
    """Record that the states of these segments were removed."""
    for key in keys:
        connection.execute(sa.update(segments).where(segments.c.key == key).values(state=None))


def find_runs(
    connection: sa.Connection, without: Sequence[str] = (), but_of: Sequence[str] = ()
) -> list[tuple[Any, ...]]:
    """All runs with their results, oldest first: the columns of `runs_table`."""
    query = (
        sa.select(*_run_columns(without))
        .join_from(runs, segments, runs.c.key == segments.c.key)
        .where(runs.c.purpose.not_in(but_of))
        .order_by(runs.c.created_at, runs.c.key)
    )
    rows = [tuple(row) for row in connection.execute(query)]
    return rows if "seconds" in without else _with_whole_seconds(connection, rows, _run_columns(without))


def _with_whole_seconds(
    connection: sa.Connection, rows: list[tuple[Any, ...]], columns: Sequence[sa.Column[Any]]
) -> list[tuple[Any, ...]]:
    """Rows with the seconds of all segments of their run in place of the last segment's."""
    found = connection.execute(sa.select(segments.c.key, segments.c.parent, segments.c.seconds))
    parts = {key: (parent, seconds) for key, parent, seconds in found}

    def whole(key: str) -> float:
        parent, seconds = parts[key]
        return float(seconds) + (whole(parent) if parent in parts else 0.0)

    names = [column.name for column in columns]
    key, at = names.index("key"), names.index("seconds")
    return [(*row[:at], whole(row[key]), *row[at + 1 :]) for row in rows]


def runs_table(rows: Sequence[Sequence[Any]], without: Collection[str] = ()) -> pd.DataFrame:
    """The table of `Ledger.runs` from the rows of `find_runs`."""
    table = pd.DataFrame(rows, columns=[column.name for column in _run_columns(without)])
    table["loss"] = table["loss"].astype(float)
    table.insert(8, "compute_flops", 6.0 * table["n_params"].astype(float) * table["n_tokens"].astype(float))
    return table


def least_losses(connection: sa.Connection) -> list[tuple[str, int, float | None]]:
    """Purpose, number of runs and smallest loss."""
    query = sa.select(runs.c.purpose, sa.func.count(), sa.func.min(segments.c.loss)).group_by(runs.c.purpose)
    return [tuple(row) for row in connection.execute(query.join(segments, runs.c.key == segments.c.key))]


def _run_columns(without: Collection[str]) -> list[sa.Column[Any]]:
    return [column for column in (*runs.c, *(segments.c[name] for name in _OUTCOME)) if column.name not in without]


def by_key(connection: sa.Connection, query: sa.Select[Any], column: sa.Column[Any], keys: Sequence[str]) -> list[Any]:
    """The rows of a query whose column has one of these keys, for any number of keys."""
    found: list[Any] = []
    for start in range(0, len(keys), KEYS_AT_ONCE):
        found += connection.execute(query.where(column.in_(keys[start : start + KEYS_AT_ONCE])))
    return found


def outcomes(
    connection: sa.Connection, keys: Sequence[str], lines: Sequence[str]
) -> tuple[dict[str, Outcome], dict[str, list[Outcome]]]:
    """Segments by key, and the diverged segments by line, longest first."""
    names = [field.name for field in fields(Outcome)]
    query = sa.select(*(segments.c[name] for name in names), segments.c.line)
    diverged = query.where(segments.c.diverged_because.is_not(None)).order_by(segments.c.tokens.desc())
    by_line: dict[str, list[Outcome]] = {}
    for *values, line in by_key(connection, diverged, segments.c.line, lines):
        by_line.setdefault(line, []).append(Outcome(**dict(zip(names, values, strict=True))))
    ended = by_key(connection, query, segments.c.key, keys)
    return {row.key: Outcome(**dict(zip(names, row[:-1], strict=True))) for row in ended}, by_line


def run_losses(connection: sa.Connection, keys: Sequence[str]) -> list[tuple[str, float | None]]:
    """Key and loss of those segments that are recorded as runs."""
    query = sa.select(segments.c.key, segments.c.loss).join(runs, runs.c.key == segments.c.key)
    return [(key, loss) for key, loss in by_key(connection, query, segments.c.key, keys)]


def insert_event(connection: sa.Connection, table: str, values: Mapping[str, Any]) -> None:
    """Insert a trial, a rung's result or a decision with the sweep's next sequence number."""
    tables = [metadata.tables[name].c for name in EVENTS]
    lasts = [sa.select(sa.func.max(of.sequence)).where(of.sweep == values["sweep"]) for of in tables]
    sequence = max(connection.execute(last).scalar() or 0 for last in lasts) + 1
    insert_once(connection, table, [{**values, "sequence": sequence}])
