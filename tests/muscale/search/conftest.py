"""A sweep without training: losses from a formula, segments run one at a time or a few at once."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from muscale.search.budget import SweepBudget
from muscale.search.engine import Engine
from muscale.search.methods import make_scheduler, make_searcher, resolve_searcher
from muscale.search.protocols import Scheduler, Searcher
from muscale.search.record import Record, RungResult
from muscale.search.sweep_conclusion import make_result
from muscale.search.sweep_jobs import AnnealJob, TrialSegment
from muscale.search.sweep_result import SweepResult
from muscale.search.trial import TrialPlan
from muscale.settings.config import StudyConfig
from muscale.settings.sweep import SweepSettings
from muscale.store.ledger import Ledger
from proxy_models.training.numerics import Numerics
from search_spaces import Config, LogUniform, Space, Uniform

LossAt = Callable[[TrialSegment, int], float | None]
SPACE = Space({"learning_rate": LogUniform(low=1e-3, high=1e-1), "beta2": Uniform(low=0.9, high=0.999)})


def settings(**values: Any) -> SweepSettings:
    return SweepSettings(**{"trials": 9, "n_tokens": 8000, "rungs": 4, "space": SPACE, "searcher": "random", **values})


def loss_at(segment: TrialSegment, rung: int) -> float | None:
    """A parabola in log rate that falls with the tokens; the largest rates diverge."""
    octaves = math.log2(cast(float, segment.path[-1][1]["learning_rate"]) / 0.01)
    return None if octaves > 3 else 3 - 0.3 * rung + 0.05 * octaves**2


@pytest.fixture
def make_engine(ledger: Ledger) -> Callable[..., Engine]:
    """Makes the engine of a sweep of settings, where its record in the ledger was left."""
    return partial(_engine, ledger)


@pytest.fixture
def drive() -> Callable[..., list[TrialSegment]]:
    """Runs an engine's segments."""
    return _drive


def _engine(
    ledger: Ledger,
    settings: SweepSettings,
    name: str = "s",
    anneal_jobs: Callable[[], Sequence[AnnealJob]] = list,
    searcher: Searcher | None = None,
    scheduler: Scheduler | None = None,
    record: Record | None = None,
) -> Engine:
    rungs = tuple(1000 * 2**k for k in range(settings.rungs))
    budget = SweepBudget(
        trials=settings.trials,
        rung_tokens=rungs,
        branch_tokens=tuple(tokens // 10 for tokens in rungs),
        top_k=settings.top_k,
        n_finalists=0,
        repeat_tokens=0,
        n_params=10,
        devices=1,
        max_tokens=settings.max_tokens,
        max_flops=settings.max_flops,
        max_device_hours=settings.max_device_hours,
    )
    if settings.is_population:
        budget = budget.for_population()
    record = record or Record(ledger, name)
    if not record.rounds:
        record.begin_round(resolve_searcher(settings, pd.DataFrame()), settings.space)
    return Engine(
        record,
        scheduler or make_scheduler(settings, settings.space),
        searcher or make_searcher(record.rounds[-1], settings, n_params=10, n_tokens=8000, prior_runs=_nothing),
        budget,
        top=settings.rungs - 1,
        on_result=lambda result: None,
        anneal_jobs=anneal_jobs,
        copies=settings.is_population,
    )


def _nothing() -> pd.DataFrame:
    return pd.DataFrame(columns=["n_params", "n_tokens", "loss"])


def _drive(
    engine: Engine, loss_at: LossAt, *, workers: int = 2, seed: int = 0, n_segments: int | None = None
) -> list[TrialSegment]:
    """Run segments as workers of uneven speed would, until none is left or `n_segments` were started; returns them in order."""
    generator = random.Random(seed)
    started: list[TrialSegment] = []
    working: list[tuple[float, int, TrialSegment, int]] = []
    clock = 0.0
    while True:
        while (
            len(working) < workers and (n_segments is None or len(started) < n_segments) and (segment := engine.next())
        ):
            assert isinstance(segment, TrialSegment)
            started.append(segment)
            heapq.heappush(working, (clock + generator.random(), len(started), segment, segment.first))
        if not working or (n_segments is not None and len(started) >= n_segments):
            return started
        clock, order, segment, rung = heapq.heappop(working)
        loss = loss_at(segment, rung)
        tokens = 1000 * 2**rung - (1000 * 2 ** (rung - 1) if rung else 0)
        engine.add_result(
            RungResult(trial=segment.trial, rung=rung, loss=loss, segment="s", tokens=tokens, seconds=36.0)
        )
        if loss is None or rung == segment.until or engine.ends(segment):
            engine.finished(segment)
        else:
            heapq.heappush(working, (clock + generator.random(), order, segment, rung + 1))


PLANTED = [
    "sweep.trials=32",
    "sweep.scheduler=asha",
    "sweep.rungs=4",
    'sweep.space.learning_rate={distribution="log_uniform", low=0.001, high=0.1}',
    'sweep.space.init_scale={distribution="log_uniform", low=0.25, high=4.0}',
    'sweep.space.zero_readout={distribution="choice", values=[true, false]}',
]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Losses of a search with a known optimum, which falls with the length: rate · 2^(−exponent) a rung."""

    rate: float = 0.01  # at the last of four rungs
    exponent: float = 0.3
    noise: float = 0.002
    diverges_above: float = 0.08

    def annealed(self, config: Config, rung: int, seed: int) -> float:
        rate, scale = float(config["learning_rate"]), float(config["init_scale"])  # type: ignore[arg-type]
        octaves = math.log2(rate / self.rate) + self.exponent * (rung - 3)
        excess = 0.02 * octaves**2 + 0.03 * math.log2(scale) ** 2 + 0.004 * bool(config["zero_readout"])
        luck = np.random.default_rng([int(rate * 1e9), rung, seed]).standard_normal()
        return 3 * math.exp(-0.05 * rung + excess + self.noise * luck)

    def stable(self, segment: TrialSegment, rung: int) -> float | None:
        config = next(config for first, config in reversed(segment.path) if first <= rung)
        diverged = float(config["learning_rate"]) > self.diverges_above  # type: ignore[arg-type]
        return None if diverged else self.annealed(config, rung, 0) + 0.1


class MicroPlanted(Planted):
    """As planted, in the space of the micro-study."""

    def annealed(self, config: Config, rung: int, seed: int) -> float:
        return super().annealed({"zero_readout": False, **config}, rung, seed)


@pytest.fixture
def planted() -> Callable[..., Planted]:
    """Makes losses with a known optimum."""
    return lambda **values: Planted(**values)


def planted_result(
    ledger: Ledger,
    config: StudyConfig,
    name: str,
    *,
    losses: Planted | None = None,
    repeats: int = 3,
    runs: pd.DataFrame | None = None,
) -> SweepResult:
    """What a sweep of planted losses comes to."""
    losses = losses or Planted()
    settings, model = config.sweep, config.model
    engine = _engine(ledger, settings, name)
    _drive(engine, losses.stable)
    record, tokens = engine.record, engine.budget.rung_tokens
    plan = TrialPlan(
        numerics=Numerics(model=model, base=model, corpus_key="c", seed=0, evaluation_tokens=1),
        defaults=replace(config.hyperparameters, schedule=settings.schedule or config.hyperparameters.schedule),
        n_tokens=tokens[-1],
        rung_tokens=tokens,
    )
    rows = []
    for rung, at in enumerate(tokens):
        finite = [trial for loss, trial in record.ranking(rung) if math.isfinite(loss)]
        chosen = [t for t in finite if t in finite[: settings.top_k] or (t, rung) in record.advanced]
        rows += [(t, rung, at, losses.annealed(record.config_at(t, rung), rung, 0)) for t in sorted(chosen)]
    annealed = pd.DataFrame(rows, columns=["trial", "rung", "n_tokens", "loss"]).astype({"loss": float})
    longest = int(annealed["rung"].max()) if len(annealed) else plan.top
    leading = annealed[annealed["rung"] == longest].nsmallest(settings.n_finalists, "loss")["trial"].tolist()
    again = [
        (t, seed, losses.annealed(record.config_at(t, longest), longest, seed))
        for t in leading
        for seed in range(1, repeats + 1)
    ]
    repeated = pd.DataFrame(again, columns=["trial", "seed", "loss"])
    return make_result(config, plan, record, annealed, repeated, runs)


@pytest.fixture
def search(ledger: Ledger, make_study: Callable[..., Path]) -> Callable[..., SweepResult]:
    """Searches planted losses, annealed and repeated ones too, and makes the result that a sweep would."""

    numbers = itertools.count()

    def searched(
        *overrides: str, losses: Planted | None = None, repeats: int = 3, runs: pd.DataFrame | None = None
    ) -> SweepResult:
        name = f"s{next(numbers)}"
        config = StudyConfig.read(make_study(name), [*PLANTED, *overrides])
        return planted_result(ledger, config, name, losses=losses, repeats=repeats, runs=runs)

    return searched
