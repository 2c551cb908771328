"""What is asked of a ledger costs as much for each row when there are a hundred times as many, and no more statements.

Times are CPU seconds of this process and of the database server, and only ratios of two of them are asserted.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import sqlalchemy as sa

from muscale.cli.running import show
from muscale.pages.live_page import LivePage
from muscale.search.sweep import Sweep
from muscale.store import retention
from muscale.store.lease import expired_leases
from muscale.store.ledger import NESTED
from muscale.store.ledger_tables import rungs
from muscale.store.run_selection import Selection
from muscale.store.statements import KEYS_AT_ONCE
from muscale.study import Study
from tests.load import big_ledger
from tests.muscale.conftest import PostgresServer
from tests.quick import quick_and_soak

STORAGES = ("sqlite", "postgresql")
MOST = 2.0  # times the CPU time for each row of the smaller ledger
EVENTS = 20


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one operation: CPU seconds for each run in the ledger, and statements."""

    seconds: float
    statements: int


def resume(study: Study) -> None:
    """Work of a resumed sweep before its first segment."""
    record = Sweep.of(study.config, study.ledger, study.corpus).record()
    engine = Sweep.of(study.config, study.ledger, study.corpus).engine(
        record, lambda result: None, lambda done, wanted, kind: None
    )
    assert engine.next() is not None


def best(study: Study) -> None:
    table = study.ledger.runs(without=set(NESTED) - {"hyperparameters"})
    assert len(Selection(sort="loss", limit=1).of(table)) == 1


def filtered(study: Study) -> None:
    chosen = Selection(where=("loss<2.5 and init_scale>1",), sort="-learning_rate", limit=20)
    assert len(chosen.of(study.ledger.runs(without=set(NESTED) - {"hyperparameters"}))) == 20


def as_json(study: Study) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show(Selection().of(study.ledger.runs(without=set(NESTED) - {"hyperparameters"})), as_json=True)
    assert out.tell() > 100 * len(study.ledger.runs(without=NESTED))


def arrive(study: Study) -> None:
    """Results at rungs of the largest of sweeps."""
    for trial in range(EVENTS):
        study.ledger.insert(
            rungs,
            sweep=Sweep.of(study.config, study.ledger, study.corpus).key,
            trial=10**7 + trial,
            rung=0,
            tokens=1,
            segment="",
            loss=9.0,
            seconds=1.0,
        )


def prune(study: Study) -> None:
    """Of a trial in a hundred there are states, few of them of the best."""
    assert (
        retention.prune(study.ledger, top_k=study.config.sweep.top_k, dry_run=True).files["state that no rule keeps"]
        > 0
    )


OPERATIONS: dict[str, Callable[[Study], Any]] = {
    "open": lambda study: study.ledger.identity(),
    "overview": str,
    "best": best,
    "filtered": filtered,
    "table": lambda study: study.runs(),
    "runs --json": as_json,
    "report": lambda study: study.report(),
    "record": lambda study: Sweep.of(study.config, study.ledger, study.corpus).record(),
    "resume": resume,
    "gc --dry-run": prune,
    "leases": lambda study: expired_leases(study.ledger),
    "look of the live page": lambda study: LivePage(study=study.contents)._read_state(),
    "results at rungs": arrive,
}
NOT_BY_ROW = ("results at rungs",)


@pytest.fixture(params=quick_and_soak(STORAGES, "sqlite"))
def server(request: pytest.FixtureRequest) -> PostgresServer | None:
    return request.getfixturevalue("postgres") if request.param == "postgresql" else None


@pytest.fixture
def measured(make_study: Callable[[str], Path], server: PostgresServer | None) -> Callable[[int], dict[str, Cost]]:
    """Plants a ledger of so many runs, and measures every operation on it."""

    def measure(n_runs: int) -> dict[str, Cost]:
        path = make_study(f"study-{n_runs}")
        settings = () if server is None else ("storage.ledger=postgresql",)
        study = big_ledger.open_study(path, *settings)
        big_ledger.plant(study, n_runs)
        study.ledger.close()
        if server is not None:
            vacuum(server)
        opened = big_ledger.open_study(path, *settings)
        # a file's pages that are read for the first time cost six times as much: runs and segments are read once
        str(opened)
        opened.ledger.close()
        costs = {}
        for name, operation in OPERATIONS.items():
            with counted() as statements:
                before = cpu_seconds(server)
                opened = big_ledger.open_study(path, *settings)
                if name != "open":
                    before = cpu_seconds(server)
                operation(opened)
                seconds = cpu_seconds(server) - before
            costs[name] = Cost(seconds=seconds / (1 if name in NOT_BY_ROW else n_runs), statements=len(statements))
            opened.ledger.close()
        return costs

    return measure


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The statements that are executed in the block."""
    statements: list[str] = []

    def note(*arguments: Any) -> None:
        statements.append(arguments[2])

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


def cpu_seconds(server: PostgresServer | None) -> float:
    """Of this process, and of the server with all that it started and that ended."""
    while server is not None:
        master = psutil.Process(server.pid)
        try:
            children = sum(sum(child.cpu_times()[:2]) for child in master.children())
        except psutil.NoSuchProcess:  # it ended meanwhile, so its time is the server's own now
            continue
        return time.process_time() + float(sum(master.cpu_times()[:4]) + children)
    return time.process_time()


def vacuum(server: PostgresServer) -> None:
    """Do the server's own maintenance after such a load, so that it does not run during the measurement."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


def table(small: dict[str, Cost], large: dict[str, Cost]) -> str:
    rows = [
        f"{name}: {1e6 * small[name].seconds:.1f} -> {1e6 * cost.seconds:.1f} µs, "
        f"{small[name].statements} -> {cost.statements} statements"
        for name, cost in large.items()
    ]
    return "\n".join(rows)


def test_ten_times_as_many_rows_take_no_more_statements(measured: Callable[[int], dict[str, Cost]]) -> None:
    small, large = measured(100), measured(1000)
    batches = 20 * 1000 // KEYS_AT_ONCE  # of keys: ten branches of each trial, by key and by line, twice
    assert all(large[name].statements <= small[name].statements + batches for name in OPERATIONS), table(small, large)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_row_among_a_hundred_thousand_runs_and_a_million_rungs_costs_as_much_as_among_ten_thousand(
    measured: Callable[[int], dict[str, Cost]],
) -> None:
    small, large = measured(10_000), measured(100_000)
    print(table(small, large))
    slower = {name: cost.seconds / small[name].seconds for name, cost in large.items()}
    assert max(slower.values()) <= MOST, table(small, large)
