"""Rates of variants: each variant's grid has the same first rates, and widens if its best rate lies at an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from muscale.actors.jobs import Job
from muscale.proxies.variants import Variant, widths_of
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.outcome import Outcome
from scaling import ScalingError, fit_optimum

MAX_STEPS = 2
"""Limit on the rates added on either side of a grid whose best rate lies at an end (assumed: a factor of 2 to 4)."""
Train = Callable[[str, Sequence[Job]], None]
"""Function that trains the runs that the ledger does not have yet; the first argument is a name to show."""


@dataclass(kw_only=True)
class RateGrid:
    """The runs of a variant at several rates and widths.

    Attributes:
        jobs: Runs at all widths, by the rate's step from the grid's centre.
        losses: Losses of these runs; NaN if a run diverged.
    """

    variant: Variant
    config: StudyConfig
    jobs: dict[float, list[Job]] = field(default_factory=dict)
    losses: dict[float, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step in first_steps(self.config):
            self._add(step)

    def _add(self, step: float) -> None:
        self.jobs[step] = [self.variant.grid_job(self.config, width, step) for width in widths_of(self.config)]

    @property
    def steps(self) -> list[float]:
        """Rates, ascending, as steps from the centre."""
        return sorted(self.jobs)

    @property
    def runs(self) -> list[Job]:
        """Runs of all rates, ascending."""
        return [job for step in self.steps for job in self.jobs[step]]

    def widen(self, outcomes: Mapping[str, Outcome]) -> bool:
        """Record the runs' outcomes and add the next rate; return False if no rate is needed."""
        for step, jobs in self.jobs.items():
            ends = [outcomes[job.chain.key].loss for job in jobs]
            self.losses[step] = [math.nan if loss is None else loss for loss in ends]
        wanted = next_step(self.steps, [self.losses[step] for step in self.steps], first_steps(self.config))
        if wanted is not None:
            self._add(wanted)
        return wanted is not None

    def tuned(self) -> Variant:
        """Return the variant with the minimum of one parabola through its grid; each width has its own level.

        The variant is unchanged if fewer than three rates trained at every width.
        """
        rates = [job.hyperparameters.learning_rate for job in self.runs]
        losses = [loss for step in self.steps for loss in self.losses[step]]
        try:
            found = fit_optimum(rates, losses, seeds=[*widths_of(self.config)] * len(self.steps))
        except ScalingError:
            return self.variant
        return replace(self.variant, log2_rate=found.log2_rate, at_end=found.log2_rate in found.tested)


def tune_rates(
    config: StudyConfig, found: Sequence[Variant], ledger: Ledger, train: Train
) -> tuple[list[Variant], dict[str, int]]:
    """Train the grids; return the variants with their best rates, and the number of rates tried for each."""
    grids = [RateGrid(variant=variant, config=config) for variant in found]
    growing = grids
    while growing:
        jobs = [job for grid in growing for job in grid.runs]
        train("compare, rates", jobs)
        outcomes = ledger.outcomes(job.chain for job in jobs)
        growing = [grid for grid in growing if grid.widen(outcomes)]
    return [grid.tuned() for grid in grids], {grid.variant.name: len(grid.jobs) for grid in grids}


def first_steps(config: StudyConfig) -> list[float]:
    """Return the first rates of every grid, in spacings of [transfer]'s grid from its centre; the study has their runs already."""
    points = config.compare.rates + (config.transfer.rates - config.compare.rates) % 2
    return [float(step) for step in np.arange(points) - (points - 1) / 2]


def next_step(steps: Sequence[float], losses: Sequence[Sequence[float]], first: Sequence[float]) -> float | None:
    """Return the next rate of a grid; None if its best rate lies inside or the grid is at its limit.

    Args:
        steps: Rates tried so far, ascending.
        losses: Losses of each rate at each width, NaN if a run diverged.
        first: Rates at the beginning.
    """
    try:
        rates = np.repeat(2.0 ** np.asarray(steps), [len(row) for row in losses])
        found = fit_optimum(rates, np.concatenate(losses), seeds=[i for row in losses for i in range(len(row))])
    except ScalingError:  # too few rates train: lower ones may
        wanted = steps[0] - 1
    else:
        if found.log2_rate not in found.tested:
            return None
        lowest = math.isclose(found.log2_rate, found.tested[0])
        wanted = steps[0] - 1 if lowest else steps[-1] + 1
        if not lowest and not math.isclose(found.log2_rate, steps[-1]):
            return None  # the next higher rate was tried and diverged
    return wanted if first[0] - MAX_STEPS <= wanted <= first[-1] + MAX_STEPS else None
