"""The best mixture within bounds, and its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Unpack

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.drawing import Figure
from scaling.mixtures.mixture_bounds import STEPS, MixtureLimits, minimise, nearest, weight_limits
from scaling.mixtures.mixture_figures import draw_best
from scaling.mixtures.mixture_law import MixtureLaw, tested
from scaling.mixtures.mixture_law import Objective as Wanted
from scaling.mixtures.objective import Objective
from scaling.presentation import lines
from scaling.serialization import JsonResult, TableLayout
from scaling.threads import single_threaded

DRAWS = 400
CANDIDATES = 400
"""Number of functions drawn from the posterior, and of mixtures among which each function's best is found."""
_FAR = 3.0  # standard deviations above the best, beyond which a mixture is seldom a drawn function's best
_TRIED, _EXCHANGES = 3000, 6
_WIDEST = 300.0  # largest half width of a log interval: its exponential is still finite
_SHOWN = 0.0005  # least weight that is not printed as 0


@dataclass(frozen=True, kw_only=True, eq=False)
class BestMixture(JsonResult):
    """The mixture with the least objective.

    Attributes:
        objective: coefficient of each target that has one.
        scale: n_params and n_tokens of the prediction, if the law has them.
        level: probability of the intervals.
        table: by domain: weight; low and high, over the best mixtures of functions drawn from the posterior; least and most, the
            limits; tried and tried_least, the largest and the least weight in the runs (tables that earlier versions saved lack the
            least).
        losses: by target with a coefficient: the loss of a run of the mixture, low, high.
        value: expected objective of the mixture.
        low, high: interval of the objective of one run of the mixture.
        best_run: the table's name of the row of the run whose mixture, moved into the limits, has the least expected objective.
        best_run_value: expected objective of that mixture.
        unsupported: reasons why intervals at this scale were not validated; empty if they were.
        p_better: probability that the mixture's objective is below that of the best run's mixture, by the draws.
    """

    objective: dict[str, float]
    scale: dict[str, float]
    level: float
    table: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    losses: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    value: float
    low: float
    high: float
    best_run: str
    best_run_value: float
    p_better: float
    unsupported: tuple[str, ...] = ()

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each domain."""
        return dict(zip(self.table["domain"], self.table["weight"].astype(float), strict=True))

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences about weights above or (by more than `BEYOND`) below all weights of the runs, where no run supports the law."""
        found = []
        for row in self.table.to_dict("records"):
            weight, most, least = row["weight"], row["tried"], row.get("tried_least", 0.0)
            if weight > most + 1e-6:
                found.append(f"{row['domain']} at {weight:.3f} is beyond the runs' {most:.3f}")
            elif weight < tested(least, most)[0]:
                found.append(f"{row['domain']} at {weight:.3f} is below the runs' {least:.3f}")
        return tuple(found)

    @property
    def status(self) -> str:
        """`ok`; `look` if there are `caveats`; `not supported` at a scale where intervals were not validated."""
        return "not supported" if self.unsupported else "look" if self.caveats else "ok"

    def plot(self) -> Figure:
        """Draw the weight of each domain with its interval and its limits."""
        return draw_best(self.table, self.level)

    @property
    def about(self) -> str:
        """Lines about the objective and its comparison with the best run."""
        about = {
            "objective": f"{self.value:.4f}, of a run {self.low:.4f} to {self.high:.4f}",
            "best run": f"row {self.best_run}, expected {self.best_run_value:.4f} within the limits",
            "better than it": f"with probability {self.p_better:.2f}",
            **({"at": ", ".join(f"{name} {value:.3g}" for name, value in self.scale.items())} if self.scale else {}),
            "status": "; ".join((self.status, *self.unsupported, *self.caveats)),
        }
        return lines(about)

    def __str__(self) -> str:
        """The mixture, its losses, and the lines of `about`."""
        rows = self.table[(self.table["weight"] >= _SHOWN) | (self.table["high"] >= _SHOWN)]
        rows = rows.sort_values("weight", ascending=False, kind="stable")
        interval = f"{self.level:.0%} interval"
        mixture = pd.DataFrame(
            {
                "domain": rows["domain"],
                "weight": [f"{weight:.3f}" for weight in rows["weight"]],
                interval: [f"{low:.3f} to {high:.3f}" for low, high in rows[["low", "high"]].to_numpy()],
            }
        )
        losses = pd.DataFrame(
            {
                "loss on": self.losses["domain"],
                "": [f"{loss:.4f}" for loss in self.losses["loss"]],
                interval: [f"{low:.4f} to {high:.4f}" for low, high in self.losses[["low", "high"]].to_numpy()],
            }
        )
        return f"{mixture.to_string(index=False)}\n\n{losses.to_string(index=False)}\n{self.about}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """An objective within limits, and its minimum.

    Attributes:
        objective: the objective to be minimised.
        low, high: limits of each weight, [m].
        runs: mixtures of the law's runs moved into the limits, [n, m].
        point: the mixture of least objective, [m].
    """

    objective: Objective
    low: Array
    high: Array
    runs: Array
    point: Array

    @classmethod
    def of(cls, fit: MixtureLaw, wanted: Wanted, given: MixtureLimits) -> Search:
        """Minimise the objective within the limits, as `best_mixture` describes."""
        coefficients = fit.coefficients(wanted)
        low, high = weight_limits(fit.domains, given)
        n_tokens = given.get("n_tokens")
        if given.get("available_tokens") and "n_tokens" not in fit.varying:
            n_tokens = None  # used for the caps only
        objective = Objective.of(fit, coefficients, fit.scale(given.get("n_params"), n_tokens))
        runs = nearest(fit.weights, low, high)
        corners = nearest(np.eye(len(low)), low, high)
        point = minimise(objective.mean, np.concatenate([runs, corners]), low, high)
        return cls(objective=objective, low=low, high=high, runs=runs, point=point)

    def candidates(self, generator: np.random.Generator, n: int = CANDIDATES) -> Array:
        """Return `point`, then mixtures within the limits that may be better, [p, m]: a few exchanges away, or from the runs."""
        others = np.tile(self.point, (_TRIED, 1))
        exchanged = 1 + generator.integers(_EXCHANGES, size=_TRIED)
        for i in range(_EXCHANGES):
            giver, taker = generator.integers(len(self.point), size=(2, _TRIED))
            step = np.exp(generator.uniform(np.log(STEPS[-1]), np.log(STEPS[0]), size=_TRIED)) * (i < exchanged)
            rows = np.arange(_TRIED)
            step = np.minimum(
                step, np.minimum(others[rows, giver] - self.low[giver], self.high[taker] - others[rows, taker])
            )
            others[rows, giver] -= step
            others[rows, taker] += step
        others = np.clip(np.concatenate([others, self.runs]), 0, 1)
        worse = self.objective.mean(others) - self.objective.mean(self.point[None])
        near = np.flatnonzero(worse < _FAR * self.objective.deviation(others, of_run=False))
        return np.concatenate([self.point[None], others[generator.permutation(near)[: n - 1]]])


@single_threaded
def best_mixture(
    fit: MixtureLaw, objective: Wanted, *, level: float, seed: int, **limits: Unpack[MixtureLimits]
) -> BestMixture:
    """Find the mixture within the limits with the least expected objective.

    The intervals of its weights are over the best mixtures, among `CANDIDATES`, of functions drawn from the posterior.

    Raises:
        ValueError: a name is unknown, or a value breaks its rule.
        ScalingError: no mixture is within the limits.
    """
    search = Search.of(fit, objective, limits)
    wanted, point = search.objective, search.point
    widening = wanted.widening(level)
    values = wanted.mean(search.runs)
    best_run = int(np.argmin(values))
    generator = np.random.default_rng(seed)
    mixtures = np.concatenate([search.candidates(generator), search.runs[best_run][None]])
    drawn = wanted.draws(mixtures, DRAWS, generator)
    found = mixtures[drawn.argmin(axis=1)]
    ends = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], axis=0)
    value = float(wanted.mean(point[None])[0])
    half = widening * float(wanted.deviation(point[None])[0]) / value
    half = min(half, _WIDEST)  # half width in the logarithm
    table = pd.DataFrame(
        {
            "domain": fit.domains,
            "weight": point,
            "low": np.minimum(ends[0], point),
            "high": np.maximum(ends[1], point),
            "least": search.low,
            "most": search.high,
            "tried": fit.weights.max(axis=0),
            "tried_least": fit.weights.min(axis=0),
        }
    )
    chosen = {n: float(c) for n, c in zip(fit.targets, wanted.coefficients, strict=True) if c > 0}
    predicted = fit.predict(point[None], **wanted.scale, level=level).drop(columns=["mixture", "unsupported"])
    return BestMixture(
        objective=chosen,
        scale=dict(wanted.scale),
        level=level,
        table=table,
        losses=predicted[predicted["domain"].isin(chosen)].reset_index(drop=True),
        value=value,
        low=value * math.exp(-half),
        high=value * math.exp(half),
        best_run=fit.rows[best_run] if fit.rows else str(best_run),
        best_run_value=float(values[best_run]),
        p_better=float((drawn[:, 0] < drawn[:, -1]).mean()),
        unsupported=fit.unsupported(wanted.scale),
    )
