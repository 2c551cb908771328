"""A sweep without training: losses from a formula, legs flown one at a time or a few at once."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from muscale.ledger import Ledger
from muscale.search.budget import Budget
from muscale.search.engine import Engine
from muscale.search.leg import Leg
from muscale.search.methods import make_rule, make_sampler, resolve_searcher
from muscale.search.record import Arrival, Record
from muscale.sweep_settings import SweepSettings

LossAt = Callable[[Leg, int], float | None]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


@pytest.fixture
def make_engine(ledger: Ledger) -> Callable[..., Engine]:
    """Makes the engine of a sweep of settings, where its record in the ledger was left."""
    return lambda settings, name="s": _engine(ledger, settings, name)


@pytest.fixture
def fly() -> Callable[..., list[Leg]]:
    """Flies an engine's legs."""
    return _fly


def _engine(ledger: Ledger, settings: SweepSettings, name: str) -> Engine:
    rungs = tuple(1000 * 2**k for k in range(settings.rungs))
    budget = Budget(
        trials=settings.trials,
        rung_tokens=rungs,
        branch_tokens=tuple(tokens // 10 for tokens in rungs),
        top_k=settings.top_k,
        reserved_tokens=0,
        n_params=10,
        devices=1,
        max_tokens=settings.max_tokens,
        max_flops=settings.max_flops,
        max_device_hours=settings.max_device_hours,
    )
    record = Record(ledger, name)
    if not record.rounds:
        record.begin_round(resolve_searcher(settings, pd.DataFrame()), settings.space)
    sampler = make_sampler(record.rounds[-1], settings, n_params=10, n_tokens=8000, taught=_nothing)
    rule = make_rule(settings, settings.space)
    return Engine(record, rule, sampler, budget, top=settings.rungs - 1, on_arrival=lambda arrival: None, endings=list)


def _nothing() -> pd.DataFrame:
    return pd.DataFrame(columns=["n_params", "n_tokens", "loss"])


def _fly(engine: Engine, loss_at: LossAt, *, workers: int = 2, seed: int = 0, legs: int | None = None) -> list[Leg]:
    """Fly legs as workers of uneven speed would, until nothing is left or `legs` are begun; returns them in order."""
    generator = random.Random(seed)
    flown: list[Leg] = []
    working: list[tuple[float, int, Leg, int]] = []
    clock = 0.0
    while True:
        while len(working) < workers and (legs is None or len(flown) < legs) and (leg := engine.next()):
            assert isinstance(leg, Leg)
            flown.append(leg)
            heapq.heappush(working, (clock + generator.random(), len(flown), leg, leg.first))
        if not working or (legs is not None and len(flown) >= legs):
            return flown
        clock, order, leg, rung = heapq.heappop(working)
        loss = loss_at(leg, rung)
        tokens = 1000 * 2**rung - (1000 * 2 ** (rung - 1) if rung else 0)
        engine.arrived(Arrival(trial=leg.trial, rung=rung, loss=loss, segment="s", tokens=tokens, seconds=36.0))
        if loss is None or rung == leg.until:
            engine.landed(leg, failed=False)
        else:
            heapq.heappush(working, (clock + generator.random(), order, leg, rung + 1))
