"""The transfer check: grids of hyperparameters at several widths, depths and sizes of a mixture, and the verdict on their runs.

Every grid varies one hyperparameter around the sweep's best. A run may belong to several grids but is trained once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from muscale.actors.jobs import Job
from muscale.errors import StageError, refusing
from muscale.proxies.ladder import branches
from muscale.search.rung_optima import for_horizon
from muscale.search.sweep_result import SweepResult
from muscale.settings.config import StudyConfig
from muscale.settings.strict import lists_to_tuples
from muscale.settings.transfer import OverSettings, TransferSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from muscale.store.statements import find
from proxy_models.architecture.member import Member
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, Verdict, fit_verdict

RATE_WITH_BATCH = 0.3
"""Exponent that shifts the rate grids of other batches so that each contains its optimum: the mean of the slopes measured on
the 17 cells of Step Law's public grids (.14 to .63; arXiv 2503.04715). 2205.10287 derives a square root for Adam."""


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """A run as part of one grid.

    Attributes:
        along: Scale of the grid: an axis of [transfer], or "batch".
        size: Position of the run on this scale; a batch is in tokens.
        over: Name of the varied hyperparameter; "rate" for the learning rate.
        value: Value of this hyperparameter at the base shape.
        n_tokens: The run's tokens before rounding to whole batches, equal over a grid.
    """

    along: str
    size: float
    over: str
    value: float
    n_tokens: float
    job: Job


def members(config: StudyConfig, numerics: Numerics, best: Hyperparameters) -> list[GridRun]:
    """Return the runs of every grid of [transfer] around the sweep's best; raise StageError if a value can't be taken."""
    settings, family = config.transfer, config.family
    axes = settings.sizes.items()
    sized = [(axis, size, family.along(axis, size)) for axis, sizes in axes for size in sizes]
    rates = around(best.learning_rate, settings.rates, settings.octaves)
    every = [settings.n_tokens * horizon for horizon in settings.shared_horizons]
    grids = _Grids(config=config, numerics=numerics, best=best)
    found = [m for along, size, model in sized for m in grids.over_rates(along, size, model, rates, every)]
    for name, grid in settings.over.items():
        for along, size, model in sized[: len(settings.widths)]:
            found += grids.over(name, grid, along, size, model, max(every))
    width = min(settings.widths)
    smallest = family.at(width=width)
    # A further horizon needs separate runs, since the decay of a branch is that of its stem's length.
    for horizon in settings.further_horizons:
        length = settings.n_tokens * horizon
        found += grids.over_rates("width", width, smallest, rates, [length], tuned_at=length)
    if wide := settings.wide_horizon:
        wider = family.at(width=wide.width)
        length = wide.tokens_per_param * wider.n_params
        found += grids.over_rates("width", wide.width, wider, rates, [length], tuned_at=length)
    for batch in settings.batches:
        shift = (batch / best.batch_tokens) ** RATE_WITH_BATCH
        shifted = rates if batch == best.batch_tokens else [_rounded(rate * shift) for rate in rates]
        found += grids.over_rates("batch", batch, smallest, shifted, every, batch_tokens=batch)
    return found


def jobs(members: Iterable[GridRun]) -> list[Job]:
    """Return the runs of the grids, each once."""
    return list({member.job.chain.key: member.job for member in members}.values())


def rows(runs: pd.DataFrame, members: Sequence[GridRun]) -> pd.DataFrame:
    """Return the grids as a table for `scaling.fit_verdict`; loss is NaN if the run diverged."""
    outcome = runs[runs["purpose"] == "transfer"].set_index("key")["loss"]
    return pd.DataFrame(
        [
            {
                **{name: getattr(member, name) for name in ("along", "size", "over", "value", "n_tokens")},
                "seed": member.job.chain.numerics.seed,
                "run": member.job.chain.key,
                "loss": outcome.get(member.job.chain.key, np.nan),
            }
            for member in members
        ]
    )


def conclude(
    members: Sequence[GridRun], sweep: SweepResult, config: StudyConfig, numerics: Numerics, ledger: Ledger
) -> Verdict:
    """Return the verdict on the finished grids and record it in the ledger."""
    found, optima = rows(ledger.runs(), members), for_horizon(sweep.fitted, config, numerics)
    verdict = fit_verdict(found, optima=optima, one_size=config.initial_weights is not None)
    inputs = [sorted(found["run"]), *([optima.to_dict("records")] if len(optima) else [])]
    ledger.record_result(ResultKind.TRANSFER, input_key(*inputs), verdict.to_dict())
    return verdict


def widest_verdict(sweep: SweepResult, config: StudyConfig, numerics: Numerics, ledger: Ledger) -> Verdict | None:
    """Return the verdict of the largest finished grids that contain those of [transfer], under any settings of this study.

    Runs that settle a verdict thus count for the settings that requested them. None: no larger grids are finished.
    """
    own = {job.chain.key for job in jobs(members(config, numerics, sweep.best))}
    found: list[list[GridRun]] = []
    for tables in {json.dumps(row["config"]["transfer"]): None for row in ledger.read(find, "revisions")}:
        try:
            settings = TransferSettings(**lists_to_tuples(json.loads(tables)))
            wider = members(config.model_copy(update={"transfer": settings}), numerics, sweep.best)
        except (ValueError, StageError):  # from an earlier version, or invalid for this winner
            continue
        chains = {job.chain.key: job.chain for job in jobs(wider)}
        if own < chains.keys() and len(ledger.outcomes(chains.values())) == len(chains):
            found.append(wider)
    largest = max(found, key=lambda grids: len(jobs(grids)), default=None)
    return conclude(largest, sweep, config, numerics, ledger) if largest else None


def horizon_of(verdict: Verdict) -> HorizonLaw:
    """Return the law by which the best rate falls with the tokens; raise StageError naming the runs that would determine it."""
    if verdict.horizon is None:
        raise StageError(
            f"transfer: no horizon law: {verdict.missing['horizon law']}; if all optima have one length, add a longer one to "
            "transfer.horizons; if an optimum is at an edge, widen transfer.octaves; if noise hides the minimum of a flat grid, add "
            "transfer.rates or transfer.seeds"
        )
    return verdict.horizon


def around(centre: float, points: int, octaves: float) -> list[float]:
    """Return values evenly spaced in octaves around the centre, which is kept exactly if the number of points is odd.

    The other values are rounded, so that a wider grid with the same spacing has the same values and reuses their runs.
    """
    steps = np.arange(points) - (points - 1) / 2
    spacing = octaves / (points - 1)
    return [centre if step == 0 else _rounded(centre * 2 ** (spacing * step)) for step in steps]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class _Grids:
    """Maker of a grid's runs at one size."""

    config: StudyConfig
    numerics: Numerics
    best: Hyperparameters

    def over_rates(
        self,
        along: str,
        size: float,
        model: Member,
        rates: list[float],
        lengths: list[float],
        *,
        tuned_at: float | None = None,
        **changed: Any,
    ) -> list[GridRun]:
        """Return a grid of rates, each annealed at every length; warmup and decay are those of a run of `tuned_at` tokens."""
        name = {"along": along, "size": size, "over": "rate"}
        return [
            member
            for rate in rates
            for member in self._runs(name, rate, model, lengths, tuned_at, learning_rate=rate, **changed)
        ]

    def over(
        self, name: str, grid: OverSettings, along: str, size: float, model: Member, length: float
    ) -> list[GridRun]:
        """Return a grid of another hyperparameter at the sweep's best rate."""
        if name in self.best.set_by_stages:
            stages = "; ".join(map(str, self.best.stages))
            raise StageError(
                f"transfer.over.{name}: the winner's schedule changes it during the run ({stages}): leave it out"
            )
        values = grid.at or around(getattr(self.best, name), grid.points, grid.octaves)
        label = {"along": along, "size": size, "over": name}
        return [m for value in values for m in self._runs(label, value, model, [length], None, **{name: value})]

    def _runs(
        self,
        grid: dict[str, Any],
        value: float,
        model: Member,
        lengths: list[float],
        tuned_at: float | None,
        **changed: Any,
    ) -> list[GridRun]:
        label = f"{grid['along']} {grid['size']}, {grid['over']} {value:.4g}"
        longest = tuned_at or self.config.transfer.n_tokens
        found = []
        for seed in self.config.transfer.seeds:
            member = replace(self.numerics, model=model, seed=seed)
            with refusing(f"transfer: {label}"):
                tuned = replace(self.best, **changed)
                runs = branches(member, tuned, lengths, tuned_at=longest, purpose="transfer", label=label)
            found += [
                GridRun(**grid, value=value, n_tokens=length, job=job)
                for length, job in zip(sorted(lengths), runs, strict=True)
            ]
        return found
