"""Runs whose ratio of loss along the way to the final loss is known, as values and as a ledger with its curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from muscale import Promotion, StudyConfig
from muscale.layout import CURVES, FULL_RUNS, LEDGER
from muscale.plans.band import Band, register_band
from muscale.plans.plan import Plan, register
from muscale.plans.planning import Planner
from muscale.proxies.ladder_curves import Floats, RunCurve
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind, segments
from muscale.store.lineage import Chain
from muscale.store.spike_handling import Incident
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from scaling import Forecast
from tests.muscale.planted import planted_fit, planted_horizon

OFFSET = 0.02
"""Log of held-out over training loss."""
COOLDOWN = 0.15
WARMUP = 0.05

PROMOTION = Promotion(
    plan="0123456789abcdef",
    loss=2.0,
    source_losses={},
    forecast=2.0,
    low=1.9,
    high=2.1,
    level=0.9,
    registered_at="2026-01-01T00:00:00+00:00",
    started_at="2026-01-01T00:00:01+00:00",
    finished_at="2026-01-01T00:00:02+00:00",
    verdict="pass",
    forced=False,
    world_size=2,
    seconds=1.0,
)
FORECAST = Forecast(
    n_params=1e4, n_tokens=1e5, loss=1.0, low=0.9, high=1.1, level=0.8, log_scale=0.1, extrapolation=99.0,
    reasons=("99 times the largest run",), law_loss=1.0,
)  # fmt: skip
PLAN = Plan(
    key="0123456789abcdef",
    model=ModelConfig(d_model=64, n_layers=2, queries_per_kv=2, tied=True, qk_norm=True),
    n_tokens=100_000,
    seed=5,
    precision="bf16",
    hyperparameters=Hyperparameters(learning_rate=0.0123456, batch_tokens=1024),
    rules={"learning_rate": "muP across width"},
    wanted_n_params=1e4,
    forecast=FORECAST,
    spike_handling={"on_spike": "stop"},
    decision={},
    provenance=(),
    data={},
    registered_at="2026-01-01T00:00:00+00:00",
)


def log_ratio(share: Floats) -> Floats:
    """Falls slowly to the cooldown, then faster, to 0 at the end."""
    return 0.2 * (1 - share) + 0.3 * np.minimum(1 - share, COOLDOWN)


def planted_curve(
    generator: np.random.Generator, *, stem: str, steps: int = 200, spread: float = 0.01, noise: float = 0.01
) -> RunCurve:
    """A run of batches of 256 tokens; its log ratio differs from the planted one by `spread` times a normal draw, up to the end."""
    share = np.arange(steps) / steps
    final, differs = 2.0, spread * generator.standard_normal()
    cooldown = round(steps * (1 - COOLDOWN))
    train = np.log(final) + log_ratio(share) + differs - OFFSET + noise * generator.standard_normal(steps)
    at_cooldown = final * np.exp(log_ratio(np.array(cooldown / steps)) + differs)
    return RunCurve(
        stem=stem,
        warmup_tokens=round(WARMUP * steps) * 256,
        ends=((cooldown * 256, float(at_cooldown)), (steps * 256, final)),
        positions=share * steps * 256,
        train_loss=np.exp(train),
        rates=np.where(share < 1 - COOLDOWN, 0.01, 0.01 * (1 - share) / COOLDOWN),
    )


def write_ladder(
    ledger: Ledger, numerics: Numerics, config: StudyConfig, *, stems: int = 4, noise: float = 0.01
) -> pd.DataFrame:
    """So many annealed runs of 128 steps with curves on disk, as the ladder leaves them; returns their `law_rows`.

    The stem of the first has two rows: another run was annealed from its middle.
    """
    generator = np.random.default_rng(0)
    h, rows = config.hyperparameters, []
    n_tokens = 128 * h.batch_tokens
    for number in range(stems):
        whole = Chain(numerics=replace(numerics, seed=number), segments=chain(h, n_tokens))
        curve = planted_curve(generator, stem="", steps=128, noise=noise)
        assert whole.parent is not None
        middle = replace(whole.segments[0], end=64 * h.batch_tokens)
        parts = [(whole.parent, 0, whole.parent.last.end), (whole, whole.parent.last.end, n_tokens)]
        if number == 0:
            cut = Chain(numerics=whole.numerics, segments=(middle,))
            parts = [(cut, 0, cut.last.end), (whole.parent, cut.last.end, whole.parent.last.end), parts[1]]
        for part, start, end in parts:
            _write_segment(ledger, part, curve, start, end)
        rows.append(
            {"key": whole.key, "purpose": "ladder", "left_out": "", "regret": 0.0, "n_params": numerics.model.n_params}
        )
    return pd.DataFrame(rows)


def _write_segment(ledger: Ledger, part: Chain, curve: RunCurve, start: int, end: int) -> None:
    tokens = curve.positions + 256
    here = (tokens > start) & (tokens <= end)
    table = pd.DataFrame({"tokens": tokens[here].astype(int), "train_loss": curve.train_loss[here]})
    path = ledger.directory / CURVES / f"{part.key}.parquet"
    path.parent.mkdir(exist_ok=True)
    table.to_parquet(path, index=False)
    held_out = dict(curve.ends).get(end, 3.0)
    ledger.insert(
        segments, **part.row(), trained_from=start, loss=held_out, source_losses={}, seconds=1.0, environment={}
    )


def numerics_of(config: StudyConfig) -> Numerics:
    """Of the study's base shape, on a corpus that nobody reads."""
    return Numerics(
        model=config.model, base=config.model, corpus_key="planted", seed=0, evaluation_tokens=2048, scheme="mup"
    )


def registered_plan(path: Path, ledger: Ledger, *overrides: str) -> Plan:
    """A plan of the study file with its forecast in the ledger."""
    config = StudyConfig.read(path, overrides)
    return register(Planner(config, config.hyperparameters, planted_horizon(), planted_fit()).plan(), ledger)


def planted_promotion(plan: str, band: Band, loss: float, incidents: tuple[Incident, ...] = ()) -> Promotion:
    """The promotion of a run on two workers that ended with this loss."""
    registered = replace(PROMOTION, forecast=band.loss, low=band.low, high=band.high, level=band.level)
    return replace(registered, plan=plan, loss=loss, incidents=incidents)


class PlantedPlan:
    """A study whose planted ladder has led to a registered plan and its band; `directory` is its full run's."""

    def __init__(self, path: Path, *, stems: int = 4) -> None:
        self.study, self.config = path, StudyConfig.read(path)
        self.ledger = Ledger(path.parent / LEDGER)
        rows = write_ladder(self.ledger, numerics_of(self.config), self.config, stems=stems)
        self.plan = registered_plan(path, self.ledger)
        self.band = register_band(self.plan, self.ledger, rows, max_regret=0.01)
        self.directory = self.ledger.directory / FULL_RUNS / self.plan.key

    def end(self, loss: float, incidents: tuple[Incident, ...] = ()) -> None:
        """Record the promotion of its run."""
        promotion = planted_promotion(self.plan.key, self.band, loss, incidents)
        self.ledger.record_result(ResultKind.PROMOTION, self.plan.key, promotion.to_dict())
