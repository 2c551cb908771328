"""The ledger: one SQLite database of everything a study knows, written by the driver and by every worker on the machine.

Rows are facts: inserted once and never changed, but for the status of a trial and the path of a training state that was
pruned. A result is known by what determines it (`muscale.lineage` makes the keys), so asking the ledger before working
is what resuming means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import sqlalchemy as sa

from muscale.errors import StudyDirectoryError
from muscale.lineage import Chain
from muscale.tables import SCHEMA, decisions, forecasts, metadata, results, revisions, rounds, rungs, runs, segments, studies, trials

_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "glusterfs", "fuse.sshfs", "ceph"}
_BUSY_SECONDS = 60.0


def now() -> str:
    """The time as it stands in the ledger: UTC, ISO 8601, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a chain as the ledger has it: losses in nats per token, or why there are none."""

    key: str
    tokens: int
    loss: float | None
    averaged_loss: float | None
    diverged_because: str | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether the training ended without a loss."""
        return self.diverged_because is not None


class Ledger:
    """The ledger at a path; picklable, as another process opens its own connection to the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def __reduce__(self) -> tuple[type[Ledger], tuple[Path]]:
        return type(self), (self.path,)

    @cached_property
    def _engine(self) -> sa.Engine:
        if (kind := _file_system(self.path.parent)) in _NETWORK_FILE_SYSTEMS:
            raise StudyDirectoryError(
                f"{self.path}: SQLite can't keep a ledger on {kind}; put the study on a local disk"
            )
        engine = sa.create_engine(f"sqlite:///{self.path}", connect_args={"timeout": _BUSY_SECONDS})

        @sa.event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # transactions begin in `write`, with the lock taken
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")

        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                self._make_or_recognize(connection)
                connection.commit()
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _make_or_recognize(self, connection: sa.Connection) -> None:
        """Make the tables of a new ledger, or check that those of an old one are ours; SQLite keeps the schema's number."""
        if not sa.inspect(connection).get_table_names():
            metadata.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")
            return
        found = connection.exec_driver_sql("PRAGMA user_version").scalar() or 1  # the first schema had no number
        if found != SCHEMA:
            raise StudyDirectoryError(
                f"{self.path}: the ledger has schema {found}, this version of muscale needs {SCHEMA}: open it with the "
                f"{'older' if found < SCHEMA else 'newer'} version that wrote it, or begin the study in a new directory"
            )

    def close(self) -> None:
        """Close the connections; the next call opens a new one."""
        if engine := self.__dict__.pop("_engine", None):
            engine.dispose()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that holds the write lock from its start, so that what it read can't change before it writes."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        """All rows of a query."""
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def row(self, query: sa.Select[Any]) -> dict[str, Any] | None:
        """The first row of a query, or None."""
        return next(iter(self.rows(query.limit(1))), None)

    def insert(self, table: sa.Table, **values: Any) -> None:
        """Insert one row stamped with the time; a row that is there already stays as it is."""
        with self.write() as connection:
            connection.execute(insert_once(table, values))

    # The study

    def claim(self, identity: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Make this the ledger of the study with this identity, and note a configuration that is new.

        Raises:
            StudyDirectoryError: If it is another study's; the message lists what differs.
        """
        with self.write() as connection:
            found = connection.execute(sa.select(studies.c.identity)).scalar()
            if found is None:
                connection.execute(insert_once(studies, {"identity": dict(identity)}))
            elif found != identity:
                differences = "; ".join(
                    f"{name} is {identity.get(name)!r} here but {found.get(name)!r} there"
                    for name in sorted({*found, *identity})
                    if found.get(name) != identity.get(name)
                )
                raise StudyDirectoryError(f"{self.path.parent}: the directory belongs to another study: {differences}")
            latest = connection.execute(sa.select(revisions.c.config).order_by(revisions.c.revision.desc())).scalar()
            if latest != config:
                connection.execute(insert_once(revisions, {"config": dict(config)}))

    def result(self, stage: str, key: str) -> dict[str, Any] | None:
        """What the stage found for these inputs, or None."""
        found = self.row(sa.select(results).where(results.c.stage == stage, results.c.key == key))
        return found["payload"] if found else None

    def latest_result(self, stage: str) -> dict[str, Any] | None:
        """The row of what the stage found last, whatever the inputs, or None."""
        return self.row(sa.select(results).where(results.c.stage == stage).order_by(results.c.created_at.desc()))

    def record_result(self, stage: str, key: str, payload: Mapping[str, Any]) -> None:
        """Keep what the stage found for these inputs."""
        self.insert(results, stage=stage, key=key, payload=dict(payload))

    # Trainings

    def segment(self, key: str) -> dict[str, Any] | None:
        """The trained segment with this key, or None."""
        return self.row(sa.select(segments).where(segments.c.key == key))

    def line(self, line: str) -> list[dict[str, Any]]:
        """All trained segments of one line, the longest first."""
        return self.rows(sa.select(segments).where(segments.c.line == line).order_by(segments.c.tokens.desc()))

    def outcome(self, chain: Chain) -> Outcome | None:
        """How the chain ended, or None where that is not known; one that diverged on the way ended there."""
        row = self.segment(chain.key) or next(
            (r for r in self.line(chain.line) if r["diverged_because"] and r["tokens"] <= chain.last.end), None
        )
        if row:
            return Outcome(**{field.name: row[field.name] for field in fields(Outcome)})
        before = self.outcome(chain.parent) if chain.parent else None
        return before if before and before.diverged else None

    def forget_state(self, key: str) -> None:
        """Note that the segment's training state is no longer kept."""
        with self.write() as connection:
            connection.execute(sa.update(segments).where(segments.c.key == key).values(state=None))

    def runs(self) -> pd.DataFrame:
        """Every run with its result: a row each, oldest first.

        `loss` is the validation loss in nats per token at the annealed end, NaN where the run diverged; `source_losses` are
        those of a mixture's sources; `n_params` leaves the embedding table out; `compute_flops` is 6·N·D.
        """
        measured = ("loss", "source_losses", "diverged_at_step", "diverged_because", "seconds")
        outcome = (*measured, "numerics", "segment", "environment")
        query = (
            sa.select(runs, *(segments.c[name] for name in outcome))
            .join(segments, runs.c.key == segments.c.key)
            .order_by(runs.c.created_at, runs.c.key)
        )
        table = pd.DataFrame(self.rows(query), columns=[*runs.c.keys(), *outcome])
        table["loss"] = table["loss"].astype(float)
        table.insert(8, "compute_flops", 6.0 * table["n_params"].astype(float) * table["n_tokens"].astype(float))
        return table

    # Sweeps

    def rounds(self, sweep: str) -> list[dict[str, Any]]:
        """The rounds of the sweep: the space of the first, and of each narrowing."""
        return self.rows(sa.select(rounds).where(rounds.c.sweep == sweep).order_by(rounds.c.round))

    def add_round(self, **values: Any) -> None:
        """Insert a round."""
        self.insert(rounds, **values)

    def trials(self, sweep: str) -> list[dict[str, Any]]:
        """Every suggestion ever made for the sweep, by number."""
        return self.rows(sa.select(trials).where(trials.c.sweep == sweep).order_by(trials.c.number))

    def rungs(self, sweep: str) -> list[dict[str, Any]]:
        """Every rung result of the sweep in order of arrival."""
        return self.rows(sa.select(rungs).where(rungs.c.sweep == sweep).order_by(rungs.c.sequence))

    def decisions(self, sweep: str) -> list[dict[str, Any]]:
        """Every decision of the sweep that a trial goes on, in order."""
        return self.rows(sa.select(decisions).where(decisions.c.sweep == sweep).order_by(decisions.c.sequence))

    def add_trial(self, **values: Any) -> None:
        """Insert a suggestion."""
        self.insert(trials, **values)

    def add_rung(self, **values: Any) -> None:
        """Insert a result at a rung, with the sweep's next sequence number."""
        self._add_event(rungs, values)

    def add_decision(self, **values: Any) -> None:
        """Insert the decision that a trial goes on, with the sweep's next sequence number."""
        self._add_event(decisions, values)

    def _add_event(self, table: sa.Table, values: Mapping[str, Any]) -> None:
        with self.write() as connection:
            lasts = [
                connection.execute(sa.select(sa.func.max(t.c.sequence)).where(t.c.sweep == values["sweep"])).scalar() or 0
                for t in (rungs, decisions)
            ]
            connection.execute(insert_once(table, {**values, "sequence": max(lasts) + 1}))

    def losses(self, keys: Sequence[str]) -> dict[str, float]:
        """The annealed losses of the runs among these segments that have ended, NaN where one diverged."""
        rows = self.rows(sa.select(segments.c.key, segments.c.loss).join(runs, runs.c.key == segments.c.key))
        wanted = set(keys)
        return {row["key"]: math.nan if row["loss"] is None else row["loss"] for row in rows if row["key"] in wanted}

    # Forecasts

    def latest_forecast(self) -> dict[str, Any] | None:
        """The forecast registered last, or None."""
        return self.row(sa.select(forecasts).order_by(forecasts.c.registered_at.desc()))

    def forecast(self, plan: str) -> dict[str, Any] | None:
        """The forecast registered for a plan, or None; the database refuses to change or delete one."""
        return self.row(sa.select(forecasts).where(forecasts.c.plan == plan))


def insert_once(table: sa.Table, values: Mapping[str, Any]) -> sa.Insert:
    """Insert a row stamped with the time, unless its key is there already."""
    stamp = "registered_at" if table is forecasts else "created_at"
    return sa.insert(table).prefix_with("OR IGNORE").values(**{**values, stamp: now()})


def _file_system(path: Path) -> str:
    """Type of the file system that holds `path`."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
