"""The ledger: one database of everything a study knows, written by the driver and by every worker.

Rows are facts: inserted once and never changed, except for the status of a trial and the path of a pruned training state. The
key of a result hashes all that determines it (`muscale.store.lineage`), so resuming means asking the ledger before working.
Every method is one transaction, and may run again if its answer was lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, cast

import pandas as pd
import sqlalchemy as sa

from muscale.errors import StudyDirectoryError
from muscale.store import statements
from muscale.store.ledger_tables import ResultKind, forecasts, results
from muscale.store.lineage import Chain
from muscale.store.outcome import Outcome
from muscale.store.storage import P, SqliteStorage, Storage, T

_ARGUMENTS = "model.arguments"  # key of an identity; JSON
_LATEST = ("results", "forecasts", "rounds")  # tables whose latest row is queried
NESTED = ("hyperparameters", "source_losses", "numerics", "segment", "environment")
"""Columns of the table of runs that hold JSON."""


def now() -> str:
    """The current time in the ledger's format: UTC, ISO 8601, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Ledger:
    """The ledger of one study; picklable, since each process opens its own connection.

    Args:
        where: The storage, or the path of an SQLite file.
        directory: The study's folder for states and curves; default: the folder of the SQLite file.
    """

    def __init__(self, where: Storage | Path, directory: Path | None = None) -> None:
        if isinstance(where, Path):
            directory, where = directory or where.absolute().parent, SqliteStorage(where)
        if directory is None:
            raise ValueError(f"a ledger in {where.name} needs the study's directory, got None")
        self.storage = where
        self.directory = directory.absolute()
        self._held: tuple[str, int] | None = None

    def __reduce__(self) -> tuple[type[Ledger], tuple[Storage, Path]]:
        return type(self), (self.storage, self.directory)

    def __repr__(self) -> str:
        return f"Ledger({self.storage.name})"

    @property
    def study(self) -> tuple[str, Path]:
        """Location of the study: the name of the storage, and the directory."""
        return self.storage.name, self.directory

    def under(self, lease: str, token: int) -> Ledger:
        """A view of this ledger whose writes raise a LeaseLostError once the lease has another token."""
        fenced = copy(self)
        fenced._held = (lease, token)
        return fenced

    def for_worker(self) -> Ledger:
        """This ledger as an argument of a worker's call; it may hold a password and must not be written to a file."""
        return Ledger(self.storage.for_worker(), self.directory)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self.storage.close()

    def read(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a module-level function of a connection on one snapshot, and return its result."""
        return self.storage.read(function, *args, **kwargs)

    def write(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a module-level function in an exclusive transaction; running it twice must have the effect of once."""
        if self._held:
            write: Any = self.storage.write
            return cast(T, write(statements.fenced, *self._held, function, *args, **kwargs))
        return self.storage.write(function, *args, **kwargs)

    def insert(self, table: sa.Table, **values: Any) -> None:
        """Insert one row stamped with the time; an existing row stays unchanged.

        The latest row of a table is the last one inserted, even if a clock was set back. A trial, a rung's result and a decision get
        the sweep's next sequence number.
        """
        if table.name in _LATEST:
            self.write(statements.insert_latest, table.name, stamped(table, values))
        elif table.name in statements.EVENTS:
            self.write(statements.insert_event, table.name, stamped(table, values))
        else:
            self.write(statements.insert_once, table.name, [stamped(table, values)])

    # The study

    def claim(self, identity: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Make this the ledger of the study with this identity, and record a new configuration.

        The identity may change until something is trained; coordinate checks of another model remain under their keys.

        Raises:
            StudyDirectoryError: If the ledger belongs to another study; the message lists the differences.
        """
        found = self.write(statements.claim, dict(identity), dict(config), now())
        if found != identity:
            raise StudyDirectoryError(
                f"{self.directory}: the directory belongs to another study ({differences(identity, found)}); use "
                "another directory for this one"
            )

    def identity(self) -> dict[str, Any] | None:
        """The study's identity; None before the first claim."""
        return next((row["identity"] for row in self.read(statements.find, "studies")), None)

    @property
    def is_begun(self) -> bool:
        """Whether anything but a check of the family or of the corpus was recorded or is running."""
        return self.read(statements.is_begun)

    def result(self, kind: ResultKind, key: str) -> dict[str, Any] | None:
        """The result of a kind for these inputs; None if there is none."""
        rows = self.read(statements.find, "results", {"kind": kind.value, "key": key})
        return next((row["payload"] for row in rows), None)

    def results(self, kind: ResultKind) -> list[dict[str, Any]]:
        """The rows of all results of a kind, oldest first."""
        return self.read(statements.find, "results", {"kind": kind.value}, ["created_at", "key"])

    def latest_result(self, kind: ResultKind) -> dict[str, Any] | None:
        """The row of the latest result of a kind, for any inputs; None if there is none."""
        return next(iter(self.read(statements.find, "results", {"kind": kind.value}, ["-created_at"], limit=1)), None)

    def record_result(self, kind: ResultKind, key: str, payload: Mapping[str, Any]) -> None:
        """Record the result of a kind for these inputs."""
        self.insert(results, kind=kind.value, key=key, payload=dict(payload))

    # Trainings

    def segment(self, key: str) -> dict[str, Any] | None:
        """The trained segment with this key; None if there is none."""
        return next(iter(self.read(statements.find, "segments", {"key": key})), None)

    def line(self, line: str) -> list[dict[str, Any]]:
        """All trained segments of one line, longest first."""
        return self.read(statements.find, "segments", {"line": line}, ["-tokens"])

    def outcome(self, chain: Chain) -> Outcome | None:
        """The outcome of a chain; None if unknown; a divergence in an earlier segment also ends the chain."""
        return self.outcomes([chain]).get(chain.key)

    def outcomes(self, chains: Iterable[Chain]) -> dict[str, Outcome]:
        """The outcomes of the finished chains, by key."""
        beginnings = {chain.key: [*_beginnings(chain)] for chain in chains}
        prefixes = [prefix for some in beginnings.values() for prefix in some]
        keys, lines = (dict.fromkeys(names) for names in ((p.key for p in prefixes), (p.line for p in prefixes)))
        ended, diverged = self.read(statements.outcomes, [*keys], [*lines])
        found = {}
        for key, (chain, *before) in beginnings.items():
            for prefix in (chain, *before):
                on_line = (row for row in diverged.get(prefix.line, ()) if row.tokens <= prefix.last.end)
                outcome = ended.get(prefix.key) or next(on_line, None)
                if outcome and (prefix is chain or outcome.diverged):
                    found[key] = outcome
                if outcome:
                    break
        return found

    def forget_states(self, keys: Sequence[str]) -> None:
        """Record that the training states of these segments were removed."""
        self.write(statements.forget_states, list(keys))

    def retrained(self) -> list[dict[str, Any]]:
        """All trainings that were repeated to restore a pruned state, in order of time."""
        return self.read(statements.find, "retrained", {}, ["created_at"])

    def runs(self, *, without: Collection[str] = (), but_of: Collection[str] = ()) -> pd.DataFrame:
        """All runs with their results: one row each, oldest first.

        `loss` is the validation loss in nats per token at the annealed end, NaN if the run diverged; `source_losses` are the losses of
        a mixture's sources; `n_params` leaves the embedding table out; `compute_flops` is 6·N·D; `seconds` is the training time of
        all its segments, also of those that other runs share.

        Args:
            without: Columns to leave out; with many runs, nested columns (`NESTED`) take most of the time.
        """
        return statements.runs_table(self.read(statements.find_runs, sorted(without), sorted(but_of)), without)

    def least_losses(self) -> dict[str, tuple[int, float]]:
        """Number of runs of each purpose, and their smallest loss, NaN if all diverged."""
        found = self.read(statements.least_losses)
        return {purpose: (n, math.nan if loss is None else loss) for purpose, n, loss in found}

    # Sweeps

    def sweep_rows(self, sweep: str) -> dict[str, list[dict[str, Any]]]:
        """Rounds, trials, rungs and decisions of the sweep, on one snapshot while its driver writes."""
        return self.read(statements.sweep_rows, sweep)

    def rounds(self, sweep: str) -> list[dict[str, Any]]:
        """The rounds of the sweep: the space of the first round, and of each narrowing."""
        return self.read(statements.find, "rounds", {"sweep": sweep}, ["round"])

    def trials(self, sweep: str) -> list[dict[str, Any]]:
        """All suggestions made for the sweep, by number."""
        return self.read(statements.find, "trials", {"sweep": sweep}, ["number"])

    def rungs(self, sweep: str) -> list[dict[str, Any]]:
        """All results at rungs of the sweep, in order of arrival."""
        return self.read(statements.find, "rungs", {"sweep": sweep}, ["sequence"])

    def run_losses(self, keys: Sequence[str]) -> dict[str, float]:
        """The losses of those segments that are recorded as runs, NaN for a diverged run."""
        found = dict(self.read(statements.run_losses, list(keys)))
        return {key: math.nan if loss is None else loss for key, loss in found.items()}

    # Forecasts

    def latest_forecast(self) -> dict[str, Any] | None:
        """The forecast registered last; None if there is none."""
        return next(iter(self.read(statements.find, "forecasts", {}, ["-registered_at"], limit=1)), None)

    def forecast(self, plan: str) -> dict[str, Any] | None:
        """The forecast registered for a plan; None if there is none. The database refuses to change or delete a forecast."""
        return next(iter(self.read(statements.find, "forecasts", {"plan": plan})), None)


def _beginnings(chain: Chain) -> Iterator[Chain]:
    """The chain, the chain before its last segment, and so on down to the first segment."""
    prefix: Chain | None = chain
    while prefix:
        yield prefix
        prefix = prefix.parent


def stamped(table: sa.Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """The row with a timestamp."""
    return {**values, "registered_at" if table is forecasts else "created_at": now()}


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Describe the differences of two identities, for a message."""
    here, there = _spread(here), _spread(there)
    return "; ".join(
        f"{name} is {here.get(name)!r} here but {there.get(name)!r} there"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )


def _spread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the arguments of a custom model, which are JSON, into one value per key."""
    arguments = json.loads(values.get(_ARGUMENTS) or "{}")
    return {name: value for name, value in values.items() if name != _ARGUMENTS} | {
        f"{_ARGUMENTS}.{name}": value for name, value in arguments.items()
    }
