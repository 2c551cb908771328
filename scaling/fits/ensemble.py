"""Several fits of one ladder, whose mean is the forecast, and refits under other runs and priors, whose spread is its uncertainty.

Each fit is of the joint form, or of its version with experts, under weak priors. The fits differ in the robust loss, in the rows that
they keep, and in whether compute weighs the rows: no single fit is best on every public ladder (measured on the ladders of
`tests/benchmarks/forecast.py`; the figures are in tests/benchmarks/RESULTS.md), and to choose one by its held-out error would be
hindsight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.errors import ScalingError
from scaling.fits.law_prior import precision, prior_numbers, shifts
from scaling.forms import Joint, OneSize
from scaling.forms.law import NATS, Form, Law, compute_flops
from scaling.forms.problem import Problem, Values
from scaling.minimizers.bootstrap import free_columns, noise_weights, refit, stem_weights, widening
from scaling.minimizers.newton import NormalPrior, minimize
from scaling.minimizers.starts import screened

TUNING = 1.345
"""Huber's threshold in standard deviations of the residual: 95 % efficiency under normal noise (Huber 1981, sec. 4.5)."""
L1_DELTA = 1e-3
USUAL_RATIO = (5.0, 200.0)
"""Range of D/N of the variants that leave out far under- and over-trained rows."""
MIN_USUAL_ROWS = 12
RESIDUAL_RATIO = (2.0, 500.0)
"""Range of D/N of the rows whose residuals measure how well the form fits."""
N_FINALISTS, N_DRAWS = 6, 60
MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_JOINT = Joint()
MIN_LEVELS = 3
"""Distinct N, and distinct D, below which the three numbers of E + A/N^alpha (E + B/D^beta) cannot be separated."""
LEAST_SIGMA_ONE_SIZE = 2e-3
"""Least scale of log residuals under a law of one size: few runs meet its four parameters almost exactly, noise included."""
FEW_ONE_SIZE = 2.5
"""Factor of the variance under a law of one size, in place of n / (n − 3): ladders of three to eight lengths, whose prior counts as
several runs, hold as often with one factor (measured, `tests/benchmarks/one_size.py`)."""
_LEAST_SIGMA = 1e-4  # least scale of log residuals; with a smaller one a prior would weigh nothing
_SCALE_STEPS = 4  # alternations of fit and residual scale


@dataclass(frozen=True, kw_only=True, eq=False)
class Ensemble:
    """Fits of one ladder.

    Attributes:
        variants: fits by name, whose mean in log loss is the forecast; the first is the base.
        refits: function that computes `draws`; only spreads and intervals call it, as it takes half of the time of a fit.
        widening: factor by which `moves` spreads the draws (`minimizers.bootstrap`); the forecast's scale was calibrated to
            the draws without this factor.
        residual: recency-weighted rms of the base's log residuals.
        n_runs: independent runs (stems).
    """

    variants: Mapping[str, Law]
    refits: Callable[[], Array]
    widening: float
    residual: float
    n_runs: int
    largest_flops: float

    @property
    def form(self) -> Form:
        """Form of every fit."""
        return next(iter(self.variants.values())).form

    @cached_property
    def draws(self) -> Array:
        """Refits of the base under resampled stems and drawn prior means: parameters in the form's order, [n_draws, P]."""
        return self.refits()

    @cached_property
    def law(self) -> Law:
        """Point forecast at every (N, D), as a law."""
        return mean_of([*self.variants.values()])

    def moves(self, log_of: Callable[[Values, int], Array]) -> Array:
        """Moves of a quantity's logarithm with the fit and with the runs, [n_variants·n_draws, …].

        A move is the sum of a variant's difference from the variants' mean and of a draw's widened difference from the base, for
        every pair of variant and draw; infinite if a fit has no such quantity.

        Args:
            log_of: function from J sets of the form's parameters, [J, 1] each, and J to the logarithm, [J, …].
        """
        laws = np.array([[*law.parameters.values()] for law in self.variants.values()])
        every = np.vstack([laws, self.draws])
        logs = log_of(self.form.stacked(every), len(every))
        fits, draws = logs[: len(laws)], logs[len(laws) :]
        with np.errstate(invalid="ignore"):
            centre = np.nanmean(np.where(np.isfinite(fits), fits, np.nan), axis=0)
            moved = (fits - centre)[:, None] + self.widening * (draws - fits[0])
        return np.asarray(np.nan_to_num(moved, nan=np.inf, posinf=np.inf, neginf=-np.inf).reshape(-1, *logs.shape[1:]))

    def log_loss(self, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> Array:
        """Forecast log loss, of the broadcast shape of the columns."""
        return np.asarray(np.log(self.law.loss(n_params, n_tokens, **columns)))

    def draw_spread(self, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> Array:
        """Standard deviation of log loss over the draws."""
        given = {"n_params": n_params, "n_tokens": n_tokens, **columns}
        found = dict(zip(given, np.broadcast_arrays(*given.values()), strict=True))
        values = dict(zip(self.form.parameters, self.draws.T[(...,) + (None,) * found["n_params"].ndim], strict=True))
        return np.asarray(np.log(self.form.loss(values, self.form.columns_of(found))).std(axis=0))


def least_points(form: Form, n_parameters: int) -> int:
    """Return the number of distinct points that a fit needs; under the prior of one size, MIN_LEVELS suffice."""
    return MIN_LEVELS if isinstance(form, OneSize) else n_parameters + 1


def spread(form: Form, problem: Problem, theta: Array, weights: Array, stems: NDArray[np.int64]) -> float:
    """Return the factor that spreads the draws about theta [P] (`minimizers.bootstrap.widening`).

    A law of one size has that of its forecast: `widening` counts no prior, which determines most of few runs' parameters.
    """
    if isinstance(form, OneSize):
        return math.sqrt(FEW_ONE_SIZE)
    return widening(free_columns(problem, theta), weights, stems)


def fit_ensemble(
    rows: pd.DataFrame, *, form: Form = _JOINT, seed: int = 0, n_params_convention: str = "", loss_unit: str = NATS
) -> Ensemble:
    """Fit every variant.

    Args:
        rows: the form's columns, loss, stem; with a column `noise` rows are weighted by 1/noise².
        form: one of `FORECAST_FORMS`; the joint form by default.
        n_params_convention, loss_unit: what N counts, and the unit of the loss.

    Raises:
        ScalingError: the rows have too few distinct points for the form.
    """
    fits = BaseFits.of(rows, form, n_params_convention=n_params_convention, loss_unit=loss_unit)
    points, wanted = len(rows[[*fits.form.columns]].drop_duplicates()), least_points(form, len(fits.problem.lower))
    if points < wanted:
        raise ScalingError(
            f"a forecast's fits have {len(fits.problem.lower)} parameters: need at least {wanted} distinct "
            f"({', '.join(fits.form.columns)}), got {points}"
        )
    n_params, n_tokens = rows["n_params"].to_numpy(), rows["n_tokens"].to_numpy()
    log_compute, ratio = np.log10(compute_flops(n_params, n_tokens)), n_tokens / n_params
    weights = fits.weights
    usual = (ratio >= USUAL_RATIO[0]) & (ratio <= USUAL_RATIO[1]) & (not form.tokens_only)
    base, sigma = fits.adaptive()
    residual = fits.residual(base)
    kept = {"adaptive Huber": np.ones(len(rows))}
    if usual.sum() >= MIN_USUAL_ROWS:
        kept[f"rows of {USUAL_RATIO[0]:g} to {USUAL_RATIO[1]:g} tokens per parameter"] = usual.astype(np.float64)
    weighed = {"": np.ones(len(rows)), ", weighed by compute": 10 ** (log_compute - log_compute.max())}
    huber = {name + by: rows_of * weight for name, rows_of in kept.items() for by, weight in weighed.items()}
    absolute = {"least absolute residuals" + by: weight for by, weight in weighed.items()}
    robust = TUNING * sigma
    # The prior gets the weight that it has against Laplace noise of the mean absolute residual.
    laplace = L1_DELTA * float(np.average(np.abs(residual), weights=weights))
    thetas = [
        *fits.polished(np.array([*huber.values()]), (robust,), sigma**2, base),
        *fits.polished(np.array([*absolute.values()]), (robust, L1_DELTA), laplace, base),
    ]
    stems = pd.factorize(rows["stem"])[0]

    telling = (ratio >= RESIDUAL_RATIO[0]) & (ratio <= RESIDUAL_RATIO[1])
    telling = telling if telling.any() and not form.tokens_only else np.ones(len(rows), dtype=bool)
    recent = 10 ** (0.5 * (log_compute - log_compute.max()))
    return Ensemble(
        variants={name: fits.law(theta) for name, theta in zip([*huber, *absolute], thetas, strict=True)},
        refits=partial(fits.redrawn, base, sigma, stems, seed),
        widening=spread(form, fits.problem, base, weights, stems),
        residual=float(np.sqrt(np.average(residual[telling] ** 2, weights=(weights * recent)[telling]))),
        n_runs=int(stems.max()) + 1,
        largest_flops=float(compute_flops(n_params, n_tokens).max()),
    )


@dataclass(frozen=True)
class BaseFits:
    """Fits of a forecast's form to one ladder under the prior, with row weights of mean one."""

    form: Form
    problem: Problem
    log_loss: Array
    weights: Array
    n_params_convention: str
    loss_unit: str

    @classmethod
    def of(
        cls, rows: pd.DataFrame, form: Form = _JOINT, *, n_params_convention: str = "", loss_unit: str = NATS
    ) -> BaseFits:
        """Bind rows with the form's columns, loss and possibly `noise`, which weighs them."""
        log_loss = np.log(rows["loss"].to_numpy())
        columns = {name: rows[name].to_numpy() for name in form.columns}
        problem = form.problem(columns, log_loss)
        return cls(form, problem, log_loss, noise_weights(rows), n_params_convention, loss_unit)

    def prior(self, variance: float, shift: Array | float = 0.0) -> NormalPrior:
        """Prior in the units of an objective whose residuals have this variance, with the mean moved by `shift`, [P] or [J, P]."""
        centres = {name: math.log(centre) for name, (centre, _) in prior_numbers(self.form).items()}
        centres["E"] += float(self.log_loss.min())
        mean = np.array([centres.get(name, 0.0) for name in self.form.parameters])
        free = self.problem.free
        return NormalPrior(
            mean=(mean + shift)[..., free], precision=variance * precision(form=self.form)[np.ix_(free, free)]
        )

    def adaptive(self) -> tuple[Array, float]:
        """Huber's fit and the scale of its residuals, found alternately."""
        wide = 1e-2
        prior = self.prior(wide**2)
        best = screened(self.problem, self.log_loss, self.weights, wide, N_FINALISTS, prior)
        tiled = np.tile(self.weights, (len(best), 1))
        thetas, values, _ = minimize(self.problem, self.log_loss, tiled, best, (10 * wide, wide), prior)
        theta = thetas[np.argmin(values)]
        for _ in range(_SCALE_STEPS):
            residual = np.sqrt(self.weights) * self.residual(theta)
            sigma = max(
                MAD * float(np.median(np.abs(residual))),
                LEAST_SIGMA_ONE_SIZE if self.form.tokens_only else _LEAST_SIGMA,
            )
            (theta,) = self.polished(np.ones((1, len(residual))), (TUNING * sigma,), sigma**2, theta)
        return theta, sigma

    def polished(self, weights: Array, deltas: tuple[float, ...], variance: float, start: Array) -> Array:
        """Fits from one start, [J, P], with J further weightings of the rows, [J, K], scaled to mean one over weights above 0."""
        weights = self.weights * weights / weights.mean(axis=1, where=weights > 0, keepdims=True)
        starts = np.tile(start, (len(weights), 1))
        return minimize(self.problem, self.log_loss, weights, starts, deltas, self.prior(variance))[0]

    def redrawn(self, base: Array, sigma: float, stems: NDArray[np.int64], seed: int) -> Array:
        """Parameters of the base fit under resampled stems [K], each with a drawn prior mean, [N_DRAWS, P]."""
        resampled = self.weights * stem_weights(stems, N_DRAWS, seed)
        moved = self.prior(sigma**2, shifts(N_DRAWS, seed, self.form))
        draws, _ = refit(self.problem, self.log_loss, resampled, base, (TUNING * sigma,), moved)
        return self.problem.natural(draws)

    def residual(self, theta: Array) -> Array:
        """Expected minus measured log loss, [K]."""
        return np.asarray(self.problem.log_loss(theta[None])[0] - self.log_loss)

    def law(self, theta: Array) -> Law:
        numbers = dict(zip(self.form.parameters, map(float, self.problem.natural(theta[None])[0]), strict=True))
        return Law(
            form=self.form, parameters=numbers, n_params_convention=self.n_params_convention, loss_unit=self.loss_unit
        )


@dataclass(frozen=True, eq=False)
class MeanOf(Form):
    """Form whose loss is exp of the mean log loss of `count` laws; their parameters are named alpha_1, alpha_2 and so on."""

    form: Form
    count: int

    source = "the mean forecast of scaling.fits.ensemble"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"mean of {self.count} fits of {self.form.name}"

    @property
    def formula(self) -> str:  # type: ignore[override]
        return f"exp of the mean of log({self.form.formula}) over {self.count} fits"

    @property
    def parameters(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        return {
            f"{name}_{i}": bounds for i in range(1, self.count + 1) for name, bounds in self.form.parameters.items()
        }

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.form.columns

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        laws = range(1, self.count + 1)
        each = [self.form.loss({name: values[f"{name}_{i}"] for name in self.form.parameters}, rows) for i in laws]
        return np.exp(np.mean([np.log(loss) for loss in each], axis=0))


def mean_of(laws: Sequence[Law]) -> Law:
    """Return the mean of laws of one form, with one convention of N and one loss unit."""
    values = {f"{name}_{i}": value for i, law in enumerate(laws, 1) for name, value in law.parameters.items()}
    return replace(laws[0], form=MeanOf(laws[0].form, len(laws)), parameters=values)
