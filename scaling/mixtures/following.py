"""The mixtures to train next: the runs that improve the best mixture most, in expectation and per FLOP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Unpack

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.forms.law import compute_flops
from scaling.mixtures.best import Search
from scaling.mixtures.mixture_bounds import MixtureLimits
from scaling.mixtures.mixture_law import MixtureLaw
from scaling.mixtures.mixture_law import Objective as Wanted
from scaling.mixtures.table import WEIGHT
from scaling.presentation import lines
from scaling.serialization import JsonResult, OrNan, TableLayout
from scaling.threads import single_threaded

CANDIDATES = 200
OUTCOMES = 128
"""Number of candidate mixtures, and of outcomes of each run over which the best mixture is averaged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NextMixtures(JsonResult):
    """Next runs, the most useful first; each is chosen as if earlier ones had finished with their expected losses.

    Attributes:
        objective: coefficient of each target that has one.
        scale: n_params and n_tokens of the objective, if the law has them.
        value: objective of the present best mixture.
        spread: standard deviation of this objective by the law, without a run's noise.
        weight_prefix: prefix of the columns of weights, as in the fitted table.
        runs: in order: a weight for each domain; n_params, n_tokens and flops as far as the runs have them; gain, the expected fall of
            the best mixture's objective by this run; spread after the run.
    """

    objective: dict[str, float]
    scale: dict[str, float]
    value: float
    spread: OrNan
    runs: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    weight_prefix: str = WEIGHT

    @property
    def weights(self) -> pd.DataFrame:
        """The columns of weights."""
        return self.runs[[name for name in self.runs if name.startswith(self.weight_prefix)]]

    def _domain(self, column: str) -> str:
        return column.removeprefix(self.weight_prefix)

    @property
    def about(self) -> str:
        """Lines about the present best objective and the meaning of a gain."""
        about = {"best today": f"{self.value:.4f}, uncertain by {self.spread:.2g}"}
        about["gain"] = "expected fall of the best mixture's objective by the run" + (
            "; chosen by gain for each FLOP" if "flops" in self.runs else ""
        )
        return lines(about)

    def __str__(self) -> str:
        """Table of the runs with their largest weights and gains, and the lines of `about`."""
        weights = self.weights
        shown = self.runs.drop(columns=list(weights)).copy()
        for name in shown:
            digits = "{:.2g}" if name in ("flops", "gain", "spread") else "{:.3g}"
            shown[name] = shown[name].map(digits.format)
        shown["mixture"] = [_largest(row) for _, row in weights.rename(columns=self._domain).iterrows()]
        return f"{shown.to_string(index=False)}\n{self.about}"


@single_threaded
def following_mixtures(
    fit: MixtureLaw, n: int, objective: Wanted, *, seed: int, **limits: Unpack[MixtureLimits]
) -> NextMixtures:
    """Choose the n runs that should improve the best mixture most, by the knowledge gradient for correlated beliefs.

    A run of a mixture and size moves the objective's mean at every mixture p. Its gain is min E[f(p)] − E[min E[f(p) | run]]
    (Frazier, Powell & Dayanik 2009), over outcomes of its losses; if the runs differ in compute, the gain is divided by the run's
    6·N·D. Sizes and lengths are those of the law's runs.

    Raises:
        ValueError, ScalingError: for the reasons of `best_mixture`, or n is below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    generator = np.random.default_rng(seed)
    search = Search.of(fit, objective, limits)
    wanted, points = search.objective, search.candidates(generator)
    mixtures = points[:CANDIDATES]
    sizes = fit.scales[list(fit.varying)].drop_duplicates(ignore_index=True) if fit.varying else pd.DataFrame(index=[0])
    shared = {str(name): float(fit.scales[name].iloc[0]) for name in fit.scales if name not in fit.varying}
    number, size = (index.ravel() for index in np.meshgrid(range(len(mixtures)), range(len(sizes)), indexing="ij"))
    possible = fit.inputs(mixtures[number], sizes.iloc[size].reset_index(drop=True))
    flops = _flops(fit, sizes, size)
    outcomes = wanted.normal((OUTCOMES // 2,), generator)
    outcomes = np.concatenate([outcomes, -outcomes])
    value, spread = float(wanted.mean(points[:1])[0]), float(wanted.deviation(points[:1], of_run=False)[0])
    chosen = []
    for _ in range(n):
        mean, moves = wanted.mean(points), wanted.moves(points, possible)
        gains = np.array([mean.min() - (mean + outcomes @ move).min(axis=1).mean() for move in moves])
        pick = int(np.argmax(gains / flops))
        run = replace(possible, x=possible.x[[pick]], s=possible.s[[pick]])
        wanted = wanted.and_run(run)
        row = {f"{fit.weight_prefix}{name}": w for name, w in zip(fit.domains, mixtures[number[pick]], strict=True)}
        row |= shared | {str(name): float(x) for name, x in sizes.iloc[size[pick]].items()}
        row |= {"flops": float(flops[pick])} if _has_compute(fit) else {}
        row |= {"gain": max(float(gains[pick]), 0.0), "spread": float(wanted.deviation(points[:1], of_run=False)[0])}
        chosen.append(row)
    return NextMixtures(
        objective={n: float(c) for n, c in zip(fit.targets, wanted.coefficients, strict=True) if c > 0},
        scale=dict(wanted.scale),
        value=value,
        spread=spread,
        runs=pd.DataFrame(chosen),
        weight_prefix=fit.weight_prefix,
    )


def _has_compute(fit: MixtureLaw) -> bool:
    return {"n_params", "n_tokens"} <= set(fit.scales)


def _flops(fit: MixtureLaw, sizes: pd.DataFrame, size: Array) -> Array:
    """Compute of each possible run; 1 if the table lacks N or D."""
    if not _has_compute(fit):
        return np.ones(len(size))
    columns = [sizes[name] if name in sizes else fit.scales[name].iloc[0] for name in ("n_params", "n_tokens")]
    return np.asarray(np.broadcast_to(compute_flops(*columns), len(sizes))[size])


def _largest(weights: pd.Series[float]) -> str:
    most = weights[weights >= 0.005].nlargest(4)
    return ", ".join(f"{name} {weight:.2f}" for name, weight in most.items())
