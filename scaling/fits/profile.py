"""Profile likelihood: how far a parameter, or the loss at a target, can move before the fit gets clearly worse.

For a quantity g of the law the profile is Q(v), the least objective of all theta with g(theta) = v. The profile is traced outwards
from the estimate, each fit starting from its neighbour, by fits with one more observation, log g = log v, of a large weight. The
minimum of Q + h(g) also minimises Q among all theta of the same g, so every fit is an exact point of the profile, if a little off v.

The interval holds the v with  2·(Q(v) − Q(best)) ≤ scale · t²,  t Student's quantile for runs less parameters (Bates and Watts,
Nonlinear Regression Analysis, 1988, ch. 6, where the scale is the variance of the residuals). Huber's objective is no
likelihood, and its ratio is distributed as a multiple of chi-squared that isn't known beforehand (Heritier and Ronchetti,
JASA 89 (1994) 897); rows of one run are also correlated. So the scale is found by resampling runs: under the weights of each
draw, 2·(Q*(best) − Q*(refit)) is on average the scale times the number of parameters. With few runs this gain is too small, as a
fit's residuals are smaller than the errors; least squares on the same runs give the share (about .6 for 20 runs and 5 parameters).

Measured on 60 planted ladders of 20 runs each (alpha, the optimum's exponent, E, the loss at a decade more compute), nominal
90 % covered: .93 .92 .92 .90 at Huber's delta of a third of the noise; .88 .87 .88 .87 for squares; .93 .88 .92 .87 with four rows
a run that share most of their noise; .90 .85 .92 .92 under Student's t of 3. The percentiles of `ScalingFit.intervals` covered
.85 to .97 on the same ladders (tests/benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.drawing import Figure
from scaling.errors import ScalingError
from scaling.fits.profile_figures import draw_profile, profile_data
from scaling.fits.profile_trace import Quantity, Trace
from scaling.forms.law import Form, Law, params_exponent
from scaling.forms.problem import Problem
from scaling.minimizers.bootstrap import free_columns, noise_weights, refit, share_seen, stem_weights
from scaling.minimizers.newton import objective
from scaling.minimizers.starts import minima, thresholds
from scaling.presentation import counted, lines
from scaling.quantiles import two_sided
from scaling.serialization import JsonResult, OrInfinite, TableLayout

N_CALIBRATION = 200
"""Number of refits that give scale and step; the error of the scale is then about 5 %."""
STEPS_PER_DEVIATION = 2
_BEYOND = 1.3  # root at which the tracing ends, over the threshold's root: margin for figures


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile(JsonResult):
    """The profile of one quantity.

    Attributes:
        name: a parameter, `params_exponent`, `tokens_exponent`, or `loss`.
        at: for a loss, the columns of the run.
        estimate: value at the fit.
        low, high: bounds of the interval; 0 or infinite if the profile stays below the threshold as far as it was traced.
        scale: divisor that turns the objective into a log-likelihood.
        n_params_convention, loss_unit: what N counts, and the unit of the loss, as in the fit.
        table: points of the profile: value, objective, root (signed, in standard deviations), and the law's parameters there.
    """

    name: str
    at: Mapping[str, float]
    estimate: float
    level: float
    low: float
    high: OrInfinite
    scale: float
    dof: int
    n_params_convention: str
    loss_unit: str
    table: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)

    @property
    def is_open(self) -> bool:
        """True if a bound was not found: the runs do not bound the quantity on that side."""
        return self.low == 0 or not math.isfinite(self.high)

    @property
    def threshold(self) -> float:
        """Threshold of the squared root, t²; values with a smaller squared root are in the interval."""
        return two_sided(self.level, self.dof) ** 2

    def plot(self) -> Figure:
        """The rise of the objective over the quantity, the threshold, and the interval between its crossings."""
        return draw_profile(self.curve(), self.loss_unit)

    def curve(self) -> pd.DataFrame:
        """Table that `plot` draws, see `profile_figures.profile_data`."""
        return profile_data(
            self.table,
            name=self.name,
            estimate=self.estimate,
            interval=(self.low, self.high),
            threshold=self.threshold,
            level=self.level,
            at=self.at,
        )

    def __str__(self) -> str:
        where = f" at {', '.join(f'{k} {v:.4g}' for k, v in self.at.items())}" if self.at else ""
        ends = f"{self.low:.5g} to {self.high:.5g}" + (", open: the runs do not bound it" if self.is_open else "")
        unit = f" {self.loss_unit}" if self.name == "loss" else ""
        return lines(
            {
                self.name: f"{self.estimate:.5g}{unit}{where}",
                f"{self.level:.0%}": ends,
                "threshold": f"scale {self.scale:.4g} from {N_CALIBRATION} resamplings of the runs, t with {self.dof} degrees",
                "N": counted(self.n_params_convention),
            }
        )


def profile(
    law: Law,
    rows: pd.DataFrame,
    name: str,
    *,
    delta: float,
    seed: int,
    level: float = 0.9,
    at: Mapping[str, float] | None = None,
) -> Profile:
    """Trace one quantity's profile and read its interval off it.

    Args:
        rows: the fitted rows: the form's columns, loss, stem.
        name: a parameter of the form, `params_exponent` or `tokens_exponent` if the form has them, or `loss`.
        at: for `loss`: the columns of the run, e.g. `{"n_params": 7e9, "n_tokens": 1.4e11}`. The interval is for the law's loss;
            for a run's loss, with the form's error, use `ScalingFit.forecast`.

    Raises:
        ValueError: `name` is none of these, `level` not between 0 and 1, or `at` has not exactly the form's columns.
        ScalingError: the runs are not more than the parameters.
    """
    form, stems = law.form, pd.factorize(rows["stem"])[0]
    log_loss, weights = np.log(rows["loss"].to_numpy()), noise_weights(rows)
    problem = form.problem({column: rows[column].to_numpy() for column in form.columns}, log_loss)
    quantity = _quantity(form, problem, name, at or {})
    if (dof := len(np.unique(stems)) - len(problem.lower)) < 1:
        raise ScalingError(
            f"need more runs than parameters, got {len(np.unique(stems))} runs for {len(problem.lower)} parameters"
        )
    reach = two_sided(level, dof)
    minimised, values, _ = minima(problem, log_loss, weights, delta)
    best = np.asarray(minimised[np.argmin(values)])
    resampled = weights * stem_weights(stems, N_CALIBRATION, seed)
    gain, deviation = _calibrated(problem, log_loss, resampled, best, quantity, delta)
    scale = gain / share_seen(free_columns(problem, best), weights, stems)

    trace = Trace(problem, quantity, log_loss, weights, delta, best, scale)
    below, above = (trace.outwards(side * deviation / STEPS_PER_DEVIATION, _BEYOND * reach) for side in (-1, 1))
    thetas = np.array([*below[::-1], best, *above])
    values, objectives, roots = trace.read(thetas)
    table = pd.DataFrame({"value": values, "objective": objectives, "root": roots})
    table[list(form.parameters)] = problem.natural(thetas)
    return Profile(
        name=name,
        at=dict(at or {}),
        estimate=float(np.exp(quantity(best[None])[0])),
        level=level,
        low=_crossing(values, roots, -reach, 0.0),
        high=_crossing(values, roots, reach, math.inf),
        scale=scale,
        dof=dof,
        n_params_convention=law.n_params_convention,
        loss_unit=law.loss_unit,
        table=table,
    )


def _quantity(form: Form, problem: Problem, name: str, at: Mapping[str, float]) -> Quantity:
    exponents = {"params_exponent", "tokens_exponent"}
    named = dict(zip(form.parameters, range(len(form.parameters)), strict=True))
    if name != "loss" and at:
        raise ValueError(f"at is only for the loss, got it with {name!r}")
    if name in named:
        return lambda theta: np.asarray(np.log(problem.natural(theta)[:, named[name]]))
    if name == "loss":
        if set(at) != set(form.columns):
            raise ValueError(f"at must give {', '.join(form.columns)}, got {', '.join(at) or 'nothing'}")
        run = form.columns_of(dict(at))
        return lambda theta: np.asarray(
            np.log(form.loss(dict(zip(form.parameters, problem.natural(theta).T, strict=True)), run))
        )
    if name in exponents:
        middle = dict.fromkeys(form.parameters, 1.0)
        if form.powers(middle) is not None:

            def exponent(theta: Array) -> Array:
                share = params_exponent(form, dict(zip(form.parameters, problem.natural(theta).T, strict=True)))
                return np.asarray(np.log(share if name == "params_exponent" else 1 - share))

            return exponent
    also = ", ".join(sorted(exponents)) if form.powers(dict.fromkeys(form.parameters, 1.0)) is not None else ""
    raise ValueError(f"name must be one of {', '.join(filter(None, [*form.parameters, also, 'loss']))}, got {name!r}")


def _calibrated(
    problem: Problem, log_loss: Array, resampled: Array, best: Array, quantity: Quantity, delta: float
) -> tuple[float, float]:
    """Twice the gain of refits to resampled runs per parameter, and the standard deviation of log g over the refits."""
    thetas, _ = refit(problem, log_loss, resampled, best, thresholds(delta)[-2:])
    there = objective(problem, log_loss, resampled, np.tile(best, (len(thetas), 1)), delta)
    gained = there - objective(problem, log_loss, resampled, thetas, delta)
    spread = quantity(thetas)
    low, high = np.quantile(spread, [0.16, 0.84])
    return 2 * float(gained.mean()) / len(best), max(float(high - low) / 2, 1e-6)


def _crossing(values: Array, roots: Array, at: float, otherwise: float) -> float:
    """First value, going outwards from the estimate, at which the root passes `at`."""
    side = np.sign(at)
    outwards = np.argsort(side * values)
    values, roots = values[outwards], (side * roots)[outwards]
    start = int(np.argmin(np.abs(roots)))
    for i in range(start, len(values) - 1):
        if roots[i + 1] >= abs(at):
            share = (abs(at) - roots[i]) / (roots[i + 1] - roots[i])
            return float(np.exp(np.log(values[i]) + share * (np.log(values[i + 1]) - np.log(values[i]))))
    return otherwise
