"""One look at the runs: the posterior of every variant, and its multipliers, verdicts and next runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.comparisons.noise import seed_noise
from scaling.errors import ScalingError
from scaling.variants.next_measurement import cheapest_next
from scaling.variants.posterior import Baseline, Gains, NormalMixture, normal_quantile
from scaling.variants.verdicts import Outcome, verdicts

ENDS = ("multiplier", "low", "high")
CHANGE = ("change", "change_low", "change_high")
_N_NOISES = 25  # grid points of the sum over noises
_NOISE_SPAN = math.log(8.0)  # half width of this grid, in log noise
_N_COMPUTES = 17  # points of a band

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """Posterior of every variant from the runs that this look sees.

    Attributes:
        rows: runs of the baseline and the variants: variant, size, flops, loss (NaN: diverged), and seed if the table has it.
        target: compute of the run that the verdicts are about, FLOPs.
        level: probability of the intervals.
        gains: gains of each variant with a finished run and losses above the floor of the baseline's law.
        unmeasured: reason why a variant has finished runs but no gains.
        beyond: finished runs of each variant that are far from all of the baseline, and so are not compared.
        scales, chances: the grid of the noise and its posterior, [n_noises] each.
        noise_dof: degrees of freedom of the measured noise; 0 if no runs were repeated, so that the noise is assumed.
        seed_noise: standard deviation of log loss from seed to seed that variants have in common; 0 if it is not known.
    """

    rows: pd.DataFrame
    target: float
    level: float
    law: Baseline
    gains: dict[str, Gains]
    unmeasured: dict[str, str]
    beyond: dict[str, int]
    scales: Array
    chances: Array
    noise_dof: float
    seed_noise: float

    @classmethod
    def at(
        cls,
        rows: pd.DataFrame,
        baseline: str,
        names: Sequence[str],
        *,
        target: float,
        level: float,
        noise: tuple[float, float],
    ) -> Look:
        """Fit the baseline's law, and weigh each noise by the evidence of all variants."""
        cells, own = _cells(rows)
        sd, dof = own.with_prior(*noise)
        law = Baseline.fitted(cells[cells["variant"] == baseline], sd, own.seed_variance)
        finished, gains, unmeasured, beyond = set(cells["variant"]), {}, {}, {}
        for name in (name for name in names if name in finished):
            of_variant = cells[cells["variant"] == name]
            compared = law.compares(of_variant)
            beyond[name] = int(of_variant["runs"][~compared].sum())
            try:
                gains[name] = Gains.measured(law, of_variant[compared], name, own.seed_variance)
            except ScalingError as reason:  # the other variants still get a verdict
                unmeasured[name] = str(reason)
        scales = sd * np.exp(np.linspace(-_NOISE_SPAN, _NOISE_SPAN, _N_NOISES))
        posterior = -dof * (np.log(scales) + sd**2 / (2 * scales**2))
        for gain in gains.values():
            posterior = posterior + np.logaddexp.reduce(gain.evidence(scales), axis=1)
        chances = np.exp(posterior - posterior.max())
        return cls(
            rows=rows,
            target=target,
            level=level,
            law=law,
            gains=gains,
            unmeasured=unmeasured,
            beyond=beyond,
            scales=scales,
            chances=chances / chances.sum(),
            noise_dof=own.dof,
            seed_noise=math.sqrt(own.seed_variance),
        )

    @property
    def noise(self) -> float:
        """Standard deviation of one run's log loss, the posterior's median."""
        return float(self.scales[np.searchsorted(self.chances.cumsum(), 0.5)])

    def decide(self, names: Sequence[str], worth: float, *, promote: float, reject: float) -> dict[str, Outcome]:
        """Verdict of each variant within the errors left: no promotion after a diverged run, a rejection without a finished run."""
        better = {name: own.above(0.0) for name, own in self._at_target.items()}
        worthwhile = {name: own.above(math.log1p(worth)) for name, own in self._at_target.items()}
        found = verdicts(better, worthwhile, promote=promote, reject=reject)
        found |= {
            name: "undecided" if name in self.unmeasured else "reject" for name in names if name not in self.gains
        }
        return {
            name: "undecided" if outcome == "promote" and self._diverged(name) else outcome
            for name, outcome in found.items()
        }

    def row(self, name: str, worth: float) -> Record:
        """The row of a variant in the comparison's table, without the verdict."""
        runs = self.rows[self.rows["variant"] == name]
        row: Record = {
            "variant": name,
            "runs": len(runs),
            "diverged": self._diverged(name),
            "beyond": self.beyond.get(name, 0),
            "sizes": 0,
            "flops": float(runs["flops"].max()),
            "reason": self.unmeasured.get(name, ""),
        }
        if name not in self.gains:
            unknown = (*CHANGE, *ENDS, "p_better", "p_worth")
            return row | dict.fromkeys(unknown, math.nan)
        gains, at_target = self.gains[name], self._at_target[name]
        each = np.sqrt(self.scales**2 * gains.unit_change[-1] + gains.change_of_seeds[-1])
        change = NormalMixture(np.full(len(each), gains.change[-1]), each, self.chances)
        return row | {
            "sizes": len(gains.x),
            "flops": float(np.exp(gains.x[-1] + gains.x0)),
            **dict(zip(CHANGE, self._ends(change), strict=True)),
            **dict(zip(ENDS, np.exp(self._ends(at_target)), strict=True)),
            "p_better": at_target.above(0.0),
            "p_worth": at_target.above(math.log1p(worth)),
        }

    def measured(self, name: str) -> list[Record]:
        """The multiplier of each size of a variant, and the change of its loss."""
        if name not in self.gains:
            return []
        gains = self.gains[name]
        variance = np.diag(self.noise**2 * gains.unit_noise + gains.other_noise)
        reach = normal_quantile((1 + self.level) / 2) * np.sqrt(variance)
        ends = np.exp(np.stack([gains.log_m, gains.log_m - reach, gains.log_m + reach], axis=1))
        return [
            {"variant": name, "compute_flops": flops, "change": change} | dict(zip(ENDS, each, strict=True))
            for flops, change, each in zip(np.exp(gains.x + gains.x0), gains.change, ends, strict=True)
        ]

    def band(self, name: str) -> list[Record]:
        """The multiplier along the compute, up to the target."""
        if name not in self.gains:
            return []
        flops = self.rows["flops"]
        computes = np.geomspace(flops.min(), max(self.target, flops.max()), _N_COMPUTES)
        along = self.gains[name].mixtures(np.log(computes), self.scales, self.chances)
        return [
            {"variant": name, "compute_flops": c} | dict(zip(ENDS, np.exp(self._ends(there)), strict=True))
            for c, there in zip(computes, along, strict=True)
        ]

    def advise(self, name: str, worth: float, error: float) -> list[Record]:
        """The cheapest runs that would decide a variant, if any are cheaper than the target."""
        if name not in self.gains:
            return []
        best = cheapest_next(
            self.gains[name],
            self.law,
            self._at_target[name],
            noise=self.noise,
            target=self.target,
            worth=worth,
            error=error,
            promotable=not self._diverged(name),
        )
        return [{"variant": name} | best] if best else []

    @cached_property
    def _at_target(self) -> dict[str, NormalMixture]:
        """Posterior of log m at the target, by variant."""
        place = np.log([self.target])
        return {name: own.mixtures(place, self.scales, self.chances)[0] for name, own in self.gains.items()}

    def _diverged(self, name: str) -> int:
        return int(self.rows.loc[self.rows["variant"] == name, "loss"].isna().sum())

    def _ends(self, mixture: NormalMixture) -> Array:
        """Median and bounds of the interval."""
        tail = (1 - self.level) / 2
        return mixture.quantiles(0.5, tail, 1 - tail)


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """Noise of log loss between repeated runs.

    Attributes:
        sd, dof: standard deviation about variant and seed, or about the variant where no seeds are shared; its degrees of freedom.
        seed_variance: variance from seed to seed that variants of one size have in common.
    """

    sd: float = 0.0
    dof: float = 0
    seed_variance: float = 0.0

    def with_prior(self, sd: float, dof: float) -> tuple[float, float]:
        """The noise and its degrees of freedom, pooled with those of a prior."""
        both = dof + self.dof
        return math.sqrt((dof * sd**2 + self.dof * self.sd**2) / both), both


def _cells(rows: pd.DataFrame) -> tuple[pd.DataFrame, _Noise]:
    """Mean log loss by variant, size and compute (variant, size, flops, y, runs, seeds), and the noise."""
    finished = rows[rows["loss"].notna()]
    noise, seeds = _Noise(), pd.Series([()] * len(finished), index=finished.index)
    if "seed" in rows:
        blocks = finished["size"].where(finished["size"] != "", finished["flops"].astype(str))
        seeds = pd.Series([*zip(blocks, finished["seed"].astype(str), strict=True)], index=finished.index)
        with suppress(ScalingError):  # no variant has two seeds at one size
            found = seed_noise(finished.assign(size=blocks), ("variant",), blocks=("size",))
            sd, dof = found.prior
            noise = _Noise(sd=sd, dof=dof, seed_variance=max(0.0, found.total**2 - sd**2))
    else:  # rows of one variant, size and compute are repeats with unpaired seeds
        y = np.log(finished["loss"])
        cell = finished.groupby(["variant", "size", "flops"]).ngroup()
        dof = len(y) - cell.nunique()
        squares = float(((y - y.groupby(cell).transform("mean")) ** 2).sum())
        noise = _Noise(sd=math.sqrt(squares / max(dof, 1)), dof=dof)
    cells = (
        finished.assign(y=np.log(finished["loss"]), seed=seeds)
        .groupby(["variant", "size", "flops"], sort=False)
        .agg(y=("y", "mean"), runs=("y", "size"), seeds=("seed", lambda own: tuple(filter(None, own))))
        .reset_index()
    )
    return cells.sort_values("flops", ignore_index=True, kind="stable"), noise
