"""Merges another ledger of the same study into ours: a colleague's, or one that was begun on another machine.

Everything is inserted once, so a merge can be repeated. Where both know a key, ours stays, and what differs is told. Of a
sweep that is known here nothing is taken but its trainings: two orders of arrival don't mix. The source is only read, in one
snapshot, its training states are copied as files, and nothing in it is unpickled. Every row of it is looked at before the first
is added, so that a source that is refused leaves ours as it was.
"""

from __future__ import annotations

import math
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import sqlalchemy as sa

from muscale.errors import StudyDirectoryError, first_line
from muscale.layout import CURVES, LEDGER, STATES
from muscale.store import foreign_rows, foreign_sqlite
from muscale.store.cancels import STUDY, TRIAL
from muscale.store.differing import Conflict, first_difference, same, shown
from muscale.store.ledger import Ledger, differences, find, insert_once
from muscale.store.lineage import segment_from_dict
from muscale.store.migrations import is_older, migrate
from muscale.store.open_ledger import read_place
from muscale.store.postgresql import PostgresStorage
from muscale.store.storage import copy_sqlite, read_only, sqlite_schema, sqlite_url
from muscale.store.tables import REFUSALS, segments, trials
from proxy_models.atomic_write import atomic_write
from proxy_models.hashing import content_key
from proxy_models.training.numerics import Numerics
from scaling.presentation import Result

_AT_ONCE = 500  # rows in one transaction
_PLAIN = ("runs", "results", "forecasts")
_KNOWN_BY = {"results": ("stage", "key"), "forecasts": ("plan",)}  # whose other values are compared
_OF_A_SWEEP = ("rounds", "trials", "rungs", "decisions")

Read = Callable[..., Any]  # a storage's `read`
Readers: TypeAlias = Mapping[str, Callable[[dict[str, Any]], object]]


@dataclass(frozen=True, kw_only=True)
class MergeResult(Result):
    """What a merge added.

    Attributes:
        source: Where from.
        added: New rows by table, and copied files as "states" and "curves".
        known_sweeps: Sweeps of the source that were known here, whose trials and rungs were left out.
        conflicts: What both know differently: (name, ours, theirs). Of a segment the name is its key, the values are its
            losses, None after a divergence; of a stage's result or a forecast the name tells the first value that differs.
        refused: Keys of the source's segments that don't fit what they describe; they were left out, and of sweeps whatever
            follows from them.
    """

    source: str
    added: dict[str, int]
    known_sweeps: tuple[str, ...]
    conflicts: tuple[Conflict, ...]
    refused: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self.__dict__)

    def __str__(self) -> str:
        lines = [f"merge: from {self.source}: " + ", ".join(f"{count} {name}" for name, count in self.added.items())]
        if self.known_sweeps:
            lines.append(
                f"  trials of {len(self.known_sweeps)} sweeps that are known here were left out, not their trainings"
            )
        for name, *values in self.conflicts:
            ours, theirs = (shown(value, none="nothing" if ": " in name else "diverged") for value in values)
            lines.append(f"  conflict: {name}: {ours} here stays, {theirs} there")
        lines += [
            f"  refused: {shown(key, none='')}: does not fit what it describes, or is of a later version"
            for key in self.refused
        ]
        return "\n".join(lines)


def merge(ledger: Ledger, source: Path, readers: Readers = MappingProxyType({})) -> MergeResult:
    """Add what another ledger of the same study knows.

    Args:
        ledger: Ours.
        source: Another study's directory, or its SQLite file.
        readers: What reads the payload of a stage's results, and of "forecasts"; a source that has one which can't be read so
            is refused.

    Raises:
        StudyDirectoryError: If the source is no ledger, has another schema, holds what no ledger does, or is another study's:
            the message lists what differs.
    """
    source = source.absolute()
    directory = source if source.is_dir() else source.parent
    with opened(source, ("studies", "segments", *_PLAIN, *_OF_A_SWEEP)) as (name, read):
        theirs = next((row["identity"] for row in read(find, "studies")), None)
        ours = ledger.identity() or {}
        if theirs is None:
            raise StudyDirectoryError(f"{name}: the ledger is no study's yet")
        if theirs != ours:
            raise StudyDirectoryError(f"{name}: the ledger is another study's: {differences(ours, theirs)}")
        here, there = ledger.read(_corpora), read(_corpora)
        if here and there and not here & there:
            raise StudyDirectoryError(
                f"{name}: the ledger is another study's: its corpus has the same name, but other text: key "
                f"{', '.join(sorted(here))} here but {', '.join(sorted(there))} there"
            )
        plain = {table: read(find, table) for table in _PLAIN}
        for table in _KNOWN_BY:
            _require_readable(name, table, plain[table], readers)
        known, sweeps = ledger.read(_sweeps), read(_sweeps)
        plain["results"] = [row for row in plain["results"] if _is_knowledge(row, known)]
        added = dict.fromkeys(("segments", *_PLAIN, "sweeps", *_OF_A_SWEEP, "states", "curves"), 0)
        conflicts, refused = _merge_segments(ledger, read, directory, added)
        for table, found in plain.items():
            rows = [row for row in found if row.get("key") not in refused]
            conflicts += _conflicts(table, ledger.read(find, table), rows)
            for batch in _batches(rows):
                added[table] += ledger.write(insert_once, table, batch)
        for sweep in sorted(sweeps - known):
            its = _without(set(refused), {table: read(find, table, {"sweep": sweep}) for table in _OF_A_SWEEP})
            for table, count in ledger.write(_add_sweep, sweep, its).items():
                added[table] += count
        return MergeResult(
            source=name,
            added=added,
            known_sweeps=tuple(sorted(sweeps & known)),
            conflicts=tuple(conflicts),
            refused=tuple(refused),
        )


def _merge_segments(
    ledger: Ledger, read: Read, directory: Path, added: dict[str, int]
) -> tuple[list[Conflict], list[str]]:
    ours: dict[str, float | None] = ledger.read(_losses)
    theirs: dict[str, float | None] = read(_losses)
    conflicts: list[Conflict] = [
        (key, ours[key], loss) for key, loss in theirs.items() if key in ours and not same(ours[key], loss)
    ]
    refused = []
    for keys in _batches([key for key in theirs if key not in ours]):
        new = []
        for row in read(_segments, keys):
            if not _fits(row):
                refused.append(row["key"])
                continue
            state = f"{STATES}/{row['key']}.pt"
            row["state"] = (
                state if row["state"] and _copied(directory, ledger.directory, state, added, "states") else None
            )
            _copied(directory, ledger.directory, f"{CURVES}/{row['key']}.parquet", added, "curves")
            new.append(row)
        added["segments"] += ledger.write(insert_once, "segments", new)
    return conflicts, refused


def _require_readable(name: str, table: str, rows: Sequence[Mapping[str, Any]], readers: Readers) -> None:
    """Refuse a source whose payloads are not what their stage writes; what nothing reads again may say anything."""
    for row in rows:
        kind = row.get("stage", table)
        try:
            readers.get(kind, bool)(row["payload"])
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            key = shown(row["key" if table == "results" else "plan"], none="")
            raise StudyDirectoryError(
                f"{name}: is no ledger of muscale's: {table}, {kind} {key}: must be as this version writes it, got "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error


def _is_knowledge(row: Mapping[str, Any], known: Collection[str]) -> bool:
    """Whether a result tells something here.

    A request to end what a process has at work is meant for that process alone, but of a sweep that is taken over whole, those for
    its trials go on standing.
    """
    return bool(row["stage"] != STUDY and not (row["stage"] == TRIAL and row["payload"].get("sweep") in known))


def _conflicts(table: str, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Iterator[Conflict]:
    """Results or forecasts that both know, by the first value that differs."""
    keys = _KNOWN_BY.get(table, ())
    known = {tuple(row[key] for key in keys): row for row in ours}
    for row in theirs if keys else ():
        name = tuple(row[key] for key in keys)
        if name in known and (found := first_difference(_values(known[name]), _values(row), same)):
            place, here, there = found
            yield f"{' '.join((table.removesuffix('s'), *name))}: {place}", here, there


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says: its payload in one with the other columns, but for the time."""
    return {**row, **row["payload"], "payload": None, "created_at": None, "registered_at": None}


def _fits(row: Mapping[str, Any]) -> bool:
    """Whether a segment's key is the hash of what the row says, as `muscale.store.lineage` makes it, and that can be trained."""
    segment = row["segment"]
    try:
        Numerics.from_dict(row["numerics"])
        segment_from_dict(segment)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    before = row["parent"] or content_key(row["numerics"])
    line = content_key([before, {**segment, "end": None}])
    return bool(
        row["line"] == line and row["key"] == content_key([line, row["tokens"]]) and segment.get("end") == row["tokens"]
    )


def _copied(source: Path, target: Path, file: str, added: dict[str, int], kind: str) -> bool:
    """Copy a file that lies beside the other ledger, whole or not at all; returns whether it is here then."""
    if (target / file).exists():
        return True
    if not (source / file).is_file() or (source / file).is_symlink():
        return False
    (target / file).parent.mkdir(exist_ok=True)
    try:
        with atomic_write(target / file) as unfinished:
            shutil.copyfile(source / file, unfinished)
    except FileNotFoundError:  # pruned there meanwhile
        return False
    added[kind] += 1
    return True


@contextmanager
def opened(source: Path, tables: Sequence[str]) -> Iterator[tuple[str, Read]]:
    """Read access to the ledger of a directory, or to an SQLite file.

    Args:
        source: The directory or the file.
        tables: That are going to be read; every row of them is looked at first.

    Raises:
        StudyDirectoryError: If it is no ledger, or a value in these tables is one that no ledger has.
    """
    with _snapshot(source) as (name, read):
        if fault := read(foreign_rows.fault, tables):
            raise StudyDirectoryError(f"{name}: is no ledger of muscale's: {fault}")
        yield name, read


@contextmanager
def _snapshot(source: Path) -> Iterator[tuple[str, Read]]:
    source = source.absolute()  # SQLite's URIs know no other
    place = read_place(source) if source.is_dir() else None
    if place and place["ledger"] == "postgresql":
        storage = PostgresStorage(None, place["schema"], read_only=True)
        try:
            with storage.snapshot() as read:
                yield (
                    storage.name,
                    lambda function, *args, **kwargs: _told(storage.name, read, function, *args, **kwargs),
                )
        finally:
            storage.close()
        return
    path = Path(place["path"]) if place else source / LEDGER if source.is_dir() else source
    if place and place["host"] != socket.gethostname():
        raise StudyDirectoryError(f"{path}: lies on {place['host']}; merge there, or copy it from there")
    if not path.is_file():
        raise StudyDirectoryError(f"{path}: no such ledger")
    with _of_this_schema(path) as current, _connected(path, current) as connection:
        _told(path, connection.exec_driver_sql, "BEGIN")  # one snapshot for all that is read
        yield str(path), lambda function, *args, **kwargs: _told(path, function, connection, *args, **kwargs)


@contextmanager
def _of_this_schema(path: Path) -> Iterator[Path]:
    """The file, or a migrated copy of one of an older version, which stays as it is."""
    with _connected(path, path) as connection:
        if fault := _told(path, lambda: foreign_sqlite.fault(_driver_of(connection), REFUSALS["sqlite"])):
            raise StudyDirectoryError(f"{path}: can't be read as a ledger: {fault}")
        found = _told(path, sqlite_schema, connection)
    if not is_older(str(path), found):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="muscale-") as folder:
        copy = Path(folder) / path.name
        copy_sqlite(path, copy)
        engine = sa.create_engine(sqlite_url(copy), poolclass=sa.pool.NullPool)
        with engine.begin() as connection:
            migrate(connection, str(path), found)
        yield copy


@contextmanager
def _connected(path: Path, file: Path) -> Iterator[sa.Connection]:
    """A connection that only reads a file; `path` is what messages call it."""
    uri = read_only(file)
    engine = sa.create_engine("sqlite://", creator=lambda: foreign_sqlite.connect(uri), poolclass=sa.pool.StaticPool)
    try:
        with _told(path, engine.connect) as connection:
            yield connection
    finally:
        engine.dispose()


def _driver_of(connection: sa.Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def _corpora(connection: sa.Connection) -> set[str]:
    """Keys of the corpora that were trained on."""
    found = connection.execute(sa.select(segments.c.numerics).distinct()).scalars()
    return {str(numerics["corpus_key"]) for numerics in found}


def _told(name: str | Path, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call finds in the source; what fails in our own ledger meanwhile is not the source's fault."""
    try:
        return call(*args, **kwargs)
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        raise StudyDirectoryError(f"{name}: can't be read as a ledger: {first_line(error)}") from None
    except (
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
    ) as error:  # of JSON that is none, or says something else
        raise StudyDirectoryError(f"{name}: can't be read as a ledger: {type(error).__name__}: {error}") from None


def _losses(connection: sa.Connection) -> dict[str, float | None]:
    return {row.key: row.loss for row in connection.execute(sa.select(segments.c.key, segments.c.loss))}


def _segments(connection: sa.Connection, keys: Sequence[str]) -> list[dict[str, Any]]:
    query = sa.select(segments).where(segments.c.key.in_(keys)).order_by(segments.c.created_at)
    return [dict(row) for row in connection.execute(query).mappings()]


def _sweeps(connection: sa.Connection) -> set[str]:
    return set(connection.execute(sa.select(trials.c.sweep).distinct()).scalars())


def _add_sweep(
    connection: sa.Connection, sweep: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, int]:
    """All of a sweep, unless somebody began it here meanwhile."""
    if connection.execute(sa.select(trials.c.sweep).where(trials.c.sweep == sweep).limit(1)).first():
        return {}
    return {"sweeps": 1} | {table: insert_once(connection, table, rows[table]) for table in _OF_A_SWEEP}


def _without(refused: set[str], rows: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """A sweep without the rungs of refused segments and what follows from them.

    That is the trial's later rungs, and decisions to go on from there: its own, or those of others from its state. A sweep
    that is run again goes on from what is left.
    """
    gone: dict[int, int] = {}  # by trial, the first rung that is left out
    kept: dict[str, list[dict[str, Any]]] = {table: list(rows[table]) for table in ("rounds", "trials")}
    kept |= {"rungs": [], "decisions": []}
    events = [(row["sequence"], table, row) for table in ("rungs", "decisions") for row in rows[table]]
    for _, table, row in sorted(events, key=lambda event: event[0]):
        trial, rung = row["trial"], row["rung"]
        if table == "rungs" and row["segment"] in refused:
            gone[trial] = min(rung, gone.get(trial, rung))
        elif table == "decisions" and row["donor"] is not None and rung >= gone.get(row["donor"], math.inf):
            gone[trial] = min(rung + 1, gone.get(trial, rung + 1))
            continue
        if rung < gone.get(trial, math.inf):
            kept[table].append(row)
    return kept


def _batches(rows: Sequence[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(rows), _AT_ONCE):
        yield list(rows[start : start + _AT_ONCE])
