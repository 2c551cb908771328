"""Readers of databases that others made: storages of Optuna's, ledgers of other studies."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.store.tables import ResultKind
from tests.fuzz.planned_study import planned_study
from tests.fuzz.target import Target

if TYPE_CHECKING:
    from search_spaces import Space


class OptunaStorage(Target):
    """An SQLite file of Optuna's, its bytes made wrong."""

    suffix = ".db"
    few = 10

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder.with_name(f"{folder.name}-theirs.db")
        self.space = write_optuna_study(self.file)
        self.seeds = [small(self.file)]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.importers.import_space import import_space
        from muscale.importers.results import outside_results

        found = import_space(str(path))
        results = outside_results(path, self.space, n_params=1000, n_tokens=1000)
        return str(found).encode(), json.dumps(found.to_dict()), len(results)


class OptunaRows(OptunaStorage):
    """The same, its rows and tables made wrong, as SQLite keeps them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [script(self.file)]

    def place(self, data: bytes) -> Path:
        return rebuilt(self.folder / f"given{self.suffix}", data)


class ForeignLedger(Target):
    """The ledger of somebody else, its bytes made wrong; ours stays as it is when it is refused."""

    suffix = ".sqlite"
    few = 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file, self.empty = (folder.with_name(f"{folder.name}-{name}.sqlite") for name in ("theirs", "empty"))
        write_ledgers(self.file, self.empty)
        self.ours = folder.with_name(f"{folder.name}-ours")
        self.ours.mkdir()
        self.seeds = [small(self.file)]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StudyDirectoryError

        return (StudyDirectoryError,)

    def __call__(self, data: bytes) -> str:
        for name in ("", "-wal", "-shm"):
            (self.ours / f"ledger.sqlite{name}").unlink(missing_ok=True)
        shutil.copy(self.empty, self.ours / "ledger.sqlite")
        return super().__call__(data)

    def read(self, path: Path) -> object:
        from muscale.monitoring.calibration import calibrate
        from muscale.search.prior_runs import runs_of
        from muscale.store.ledger import Ledger

        ledger = Ledger(self.ours / "ledger.sqlite")
        try:
            return str(runs_of(path)).encode(), str(calibrate(ledger, [path])).encode()
        finally:
            ledger.close()

    def _standing(self) -> set[str]:
        with closing(sqlite3.connect(self.ours / "ledger.sqlite")) as connection:
            return super()._standing() | set(connection.iterdump())


class ForeignRows(ForeignLedger):
    """The same, its rows and tables made wrong, as SQLite keeps them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [script(self.file)]

    def place(self, data: bytes) -> Path:
        return rebuilt(self.folder / f"given{self.suffix}", data)


def write_optuna_study(path: Path) -> Space:
    """A study of Optuna's with three trials, one of which failed; returns what is searched."""
    import optuna

    from search_spaces import Choice, LogUniform, Space

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(storage=f"sqlite:///{path}", study_name="theirs", sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning_rate", 0.004, 0.03, log=True)
        trial.suggest_float("share", 0.0, 1.0, step=0.25)
        trial.suggest_int("batch", 256, 1024, step=256)
        trial.suggest_categorical("norm", ["pre", "post"])
        if trial.number == 2:
            raise ArithmeticError("diverged")
        return 2.0 + abs(rate - 0.01)

    study.optimize(objective, n_trials=3, catch=ArithmeticError)
    study._storage.remove_session()
    return Space({"learning_rate": LogUniform(low=0.004, high=0.03), "norm": Choice(values=("pre", "post"))})


def write_ledgers(theirs: Path, empty: Path) -> None:
    """Two ledgers of one study: of each kind of row one or two, and one that knows nothing yet."""
    from muscale.plans.planning import register
    from muscale.store.ledger import Ledger
    from tests.muscale.monitoring.test_calibration import RUN
    from tests.muscale.planted_ledger import IDENTITY, add_run, add_sweep

    _, _, study, plan = planned_study(theirs.with_suffix(""))
    study.close()
    for path in (theirs, empty):
        ledger = Ledger(path)
        ledger.claim(IDENTITY, {})
        if path == theirs:
            add_run(ledger, 0, 2.0)
            add_run(ledger, 1, None)
            add_sweep(ledger, "a sweep", 2.0)
            register(plan, ledger)
            ledger.record_result(ResultKind.PROMOTION, plan.key, replace(RUN, plan=plan.key).to_dict())
        ledger.close()


def small(path: Path) -> bytes:
    """A database in small pages, so that most of its bytes say something."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
            connection.execute(statement)
    return path.read_bytes()


def script(path: Path) -> bytes:
    """The statements that make a database, a line each."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        statements = [" ".join(statement.split("\n")) for statement in connection.iterdump()]
    return "\n".join([f"PRAGMA user_version = {version};", *statements]).encode()


def rebuilt(path: Path, data: bytes) -> Path:
    """A database of those statements that SQLite takes."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for statement in data.decode(errors="replace").splitlines():
            try:
                connection.execute(statement)
            except (sqlite3.Error, sqlite3.Warning, ValueError):  # what can't be run can't come from anybody
                continue
        if connection.in_transaction:
            connection.execute("COMMIT")
    return path
