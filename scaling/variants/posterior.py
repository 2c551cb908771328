"""The baseline's law, measured multipliers of a variant, and their posterior at any compute.

`scaling.variants.compare` states the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.errors import ScalingError

FLOOR, GAMMA = (0.7, 0.6), (0.18, 0.5)
"""Lognormal priors, each a median and a standard deviation of the logarithm: E as a share of the least loss; the exponent gamma."""
OFFSET_SD = 0.3
"""Prior standard deviation of log m at C0."""
SLOPE_SCALE, SLOPE_DOF = 0.015, 1.0
"""Student-t prior of g per e-fold of compute: half of the mass lies within ±.015, a tenth beyond ±.095."""
BEND = 0.25
"""Standard deviation of the random walk after one e-fold of compute, as a share of g's: steady gains are straight, changing gains
also bend. `qlabs_variants.csv`, where one gain turns, is 25 nats likelier with this share than with a walk of .01 for all and two
degrees of freedom. The other tables of `tests/benchmarks/variants.py` change by less than half a nat; so does any share up to 1."""
NOISE = (1e-3, 2.0)
"""Prior of the standard deviation of log loss between repeated runs: its value and its degrees of freedom. Nine tenths lie between
.06 %, as of large proxies, and .44 %, as of tiny ones. Four degrees of freedom ruled out tiny proxies' noise: over one seed with a
noise of .3 %, 90 % intervals held 75 % of planted multipliers."""
BEYOND = 2.0
"""Factor in compute beyond the baseline's finished runs up to which its law stands in for missing runs: extrapolated from two of
four sizes, 16 times below, it took a variant without effect for one worth 15 times its compute."""
_STEP = 1e-6  # of derivatives, in standard deviations
_LEAST_SHARE = 1e-8  # singular value of the fit, as a share of the largest, below which a flat baseline has no slope
_N_SLOPES = 24  # grid points of the sum over slopes
_BISECTIONS = 40  # halvings of the distance between the normals' quantiles: a part in 1e12 is left
Seeds = tuple[tuple[tuple[str, str], ...], ...]
"""The seeds of each cell, each with its size: another size has other initial values under the same seed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """The baseline's loss along its ladder.

    Attributes:
        floor, excess: logarithms of E and of L − E at x0.
        gamma: exponent of compute.
        x0: mean log compute of the cells.
        x, residual, runs, sizes: log compute, log loss above the law, number of runs, and label ("" without one) of each cell, [K].
        seeds: seeds of the runs in each cell, [K]; empty if they are not known.
        errors: independent errors of one standard deviation of floor, excess and log gamma, [R, 3]; none with one size, whose slope
            is assumed.
    """

    floor: float
    excess: float
    gamma: float
    x0: float
    x: Array
    residual: Array
    runs: Array
    sizes: tuple[str, ...]
    seeds: Seeds
    errors: Array

    @classmethod
    def fitted(cls, cells: pd.DataFrame, noise: float, seed_variance: float) -> Baseline:
        """Fit by least squares with the priors of E and gamma; with one size the priors alone give the slope.

        `noise` and `seed_variance` are the standard deviation of one run's log loss and the variance that a seed adds to it.
        """
        from scipy.optimize import least_squares

        x, y = np.log(cells["flops"].to_numpy()), cells["y"].to_numpy()
        runs, seeds = cells["runs"].to_numpy(dtype=np.float64), tuple(cells["seeds"])
        of_seeds = np.diag(_unshared(seeds, seeds, np.zeros((len(x), len(x)))))
        x0, weights, least = float(x.mean()), 1 / np.sqrt(noise**2 / runs + seed_variance * of_seeds), float(y.min())

        def distances(theta: Array) -> Array:
            floor, excess, gamma = theta
            off = np.logaddexp(floor, excess - np.exp(gamma) * (x - x0)) - y
            prior = [(floor - least - math.log(FLOOR[0])) / FLOOR[1], (gamma - math.log(GAMMA[0])) / GAMMA[1]]
            return np.append(weights * off, prior)

        start = [least + math.log(FLOOR[0]), least + math.log(1 - FLOOR[0]), math.log(GAMMA[0])]
        found = least_squares(distances, start)
        floor, excess, gamma = found.x
        return cls(
            floor=float(floor),
            excess=float(excess),
            gamma=float(np.exp(gamma)),
            x0=x0,
            x=x,
            residual=y - np.logaddexp(floor, excess - np.exp(gamma) * (x - x0)),
            runs=runs,
            sizes=tuple(cells["size"]),
            seeds=seeds,
            errors=np.linalg.pinv(found.jac, _LEAST_SHARE).T[: None if len(x) > 1 else 0],
        )

    def moved(self, error: Array) -> Baseline:
        """Return the law with `error` added to floor, excess and log gamma; the cells keep their losses."""
        floor, excess, gamma = self.floor + error[0], self.excess + error[1], self.gamma * math.exp(error[2])
        law = replace(self, floor=floor, excess=excess, gamma=gamma)
        change = [self.log_loss(x) - law.log_loss(x) for x in self.x]
        return replace(law, residual=self.residual + change)

    def log_loss(self, x: float) -> float:
        """Log loss of the law at log compute `x`."""
        return float(np.logaddexp(self.floor, self.excess - self.gamma * (x - self.x0)))

    def compute_of(self, log_loss: Array) -> Array:
        """Log compute at which the law has each log loss, which must be above the floor."""
        return np.asarray(self.x0 - (log_loss + np.log1p(-np.exp(self.floor - log_loss)) - self.excess) / self.gamma)

    def slope(self, x: Array) -> Array:
        """−d log L / d log C at log compute `x`, of the same shape."""
        excess = np.exp(self.excess - self.gamma * (x - self.x0))
        return np.asarray(self.gamma * excess / (np.exp(self.floor) + excess))

    def compares(self, cells: pd.DataFrame) -> NDArray[np.bool_]:
        """Mask of the cells whose size the baseline has, or whose compute lies at most `BEYOND` times beyond its runs, [J]."""
        x, labelled = np.log(cells["flops"].to_numpy()), cells["size"].isin([*filter(None, self.sizes)]).to_numpy()
        beyond = np.maximum(x - self.x.max(), self.x.min() - x)
        return np.asarray(labelled | (beyond <= math.log(BEYOND)))

    def between(self, x: Array, sizes: Sequence[str]) -> Array:
        """Weights of the K cells in the baseline's residual at J log computes, [J, K].

        The nearest cell of the same label has all the weight. Without one the residual is interpolated, and constant beyond the ends.
        """
        weights = np.array([np.interp(x, self.x, row) for row in np.eye(len(self.x))]).T
        for row, size, at in zip(weights, sizes, x, strict=True):
            if size and size in self.sizes:
                apart = np.where(np.array(self.sizes) == size, np.abs(self.x - at), np.inf)
                row[:] = np.arange(len(row)) == np.argmin(apart)
        return weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Gains:
    """Measured log multipliers of one variant.

    Attributes:
        x: log compute minus x0, [J].
        x0: logarithm of C0.
        log_m: log multipliers, [J].
        change: log loss above the baseline's at the same compute, [J].
        unit_change: variance of `change` for runs of noise 1, [J].
        unit_noise: covariance of `log_m` for runs of noise 1 in log loss, with the share of the baseline's runs, [J, J].
        change_of_seeds: variance of `change` by seeds that variant and baseline do not share, [J].
        other_noise: covariance of `log_m` by these seeds and by the errors of the baseline's law, [J, J].
    """

    x: Array
    x0: float
    log_m: Array
    change: Array
    unit_change: Array
    unit_noise: Array
    change_of_seeds: Array
    other_noise: Array

    @classmethod
    def measured(cls, law: Baseline, cells: pd.DataFrame, name: str, seed_variance: float) -> Gains:
        """Measure m: baseline's compute at the variant's loss over the variant's compute.

        `seed_variance` is that of log loss from seed to seed which runs of one size and seed have in common.

        Raises:
            ScalingError: there is no cell, or a loss is below the floor.
        """
        if cells.empty:
            raise ScalingError(f"variant {name!r} has no run near one of the baseline: give both a common size")
        x = np.log(cells["flops"].to_numpy())
        weights = law.between(x, tuple(cells["size"]))
        y = cells["y"].to_numpy() - weights @ law.residual
        if (low := y <= law.floor).any():
            raise ScalingError(
                f"variant {name!r} has a loss of {math.exp(float(cells['y'].to_numpy()[low][0])):.4g}, below the floor "
                f"{math.exp(law.floor):.4g} of the baseline's law: no compute of the baseline reaches it, so it has no multiplier; "
                "check that both have losses in one unit on one held-out set, or add larger runs of the baseline"
            )
        equal = law.compute_of(y)
        # the derivatives of log m along each error of the law
        of_law = [
            (moved.compute_of(cells["y"].to_numpy() - weights @ moved.residual) - equal) / _STEP
            for moved in (law.moved(_STEP * error) for error in law.errors)
        ]
        # the slope at `equal`: at x, a baseline that hardly falls any more would blur any gap
        per_loss = 1 / law.slope(equal)
        own = np.diag(1 / cells["runs"].to_numpy(dtype=np.float64)) + (weights / law.runs) @ weights.T
        others = seed_variance * _unshared(tuple(cells["seeds"]), law.seeds, weights)
        return cls(
            x=x - law.x0,
            x0=law.x0,
            log_m=equal - x,
            change=y - np.array([law.log_loss(at) for at in x]),
            unit_change=np.diag(own),
            unit_noise=own * np.outer(per_loss, per_loss),
            change_of_seeds=np.diag(others),
            other_noise=others * np.outer(per_loss, per_loss) + sum(np.outer(each, each) for each in of_law),
        )

    def _prior(self, left: Array, right: Array, slope_sd: Array) -> Array:
        """Prior covariance of log m between two sets of log computes (minus x0), for each sd of g, [n_slopes, J, J']."""
        same_side = np.multiply.outer(np.sign(left), np.sign(right)) > 0
        walk = np.where(same_side, np.minimum.outer(np.abs(left), np.abs(right)), 0.0)
        changes = np.multiply.outer(left, right) + BEND**2 * walk
        return np.asarray(OFFSET_SD**2 + slope_sd[:, None, None] ** 2 * changes)

    def _covariance(self, scales: Array) -> Array:
        """Covariance of the measured log m, [n_noises, n_slopes, J, J]."""
        noise = np.multiply.outer(scales**2, self.unit_noise)
        return self._prior(self.x, self.x, _slope_sds()) + noise[:, None] + self.other_noise

    def evidence(self, scales: Array) -> Array:
        """Log density of the measured log m for each noise and sd of g, up to a constant, [n_noises, n_slopes]."""
        covariance = self._covariance(scales)
        solved = np.linalg.solve(covariance, np.broadcast_to(self.log_m[:, None], (*covariance.shape[:-1], 1)))[..., 0]
        return np.asarray(-(np.linalg.slogdet(covariance)[1] + solved @ self.log_m) / 2)

    def mixtures(self, log_compute: Array, scales: Array, chances: Array) -> list[NormalMixture]:
        """Posterior of log m at each of P computes, given the probability of each noise, [n_noises]."""
        means, variances = self.predict(log_compute, scales)
        by_slope = self.evidence(scales)
        by_slope = np.exp(by_slope - by_slope.max(axis=1, keepdims=True))
        weights = (chances[:, None] * by_slope / by_slope.sum(axis=1, keepdims=True)).ravel()
        sds = np.sqrt(variances)
        return [NormalMixture(means[..., p].ravel(), sds[..., p].ravel(), weights) for p in range(len(log_compute))]

    def predict(self, log_compute: Array, scales: Array) -> tuple[Array, Array]:
        """Mean and variance of log m at P computes for each noise and sd of g, [n_noises, n_slopes, P] each."""
        there, sds = log_compute - self.x0, _slope_sds()
        across = self._prior(self.x, there, sds)
        gain = np.linalg.solve(self._covariance(scales), np.broadcast_to(across, (len(scales), *across.shape)))
        own = np.diagonal(self._prior(there, there, sds), axis1=1, axis2=2)
        return np.einsum("abjp,j->abp", gain, self.log_m), own - (gain * across).sum(axis=2)

    def with_runs(self, log_compute: float, variance: float) -> Gains:
        """Return the gains with one more measurement of this variance at noise 1; its log m is 0, as only variances are predicted."""
        n = len(self.x)
        noise, other_noise = np.zeros((2, n + 1, n + 1))
        noise[:n, :n], noise[n, n], other_noise[:n, :n] = self.unit_noise, variance, self.other_noise
        x, log_m = np.append(self.x, log_compute - self.x0), np.append(self.log_m, 0.0)
        return replace(self, x=x, log_m=log_m, unit_noise=noise, other_noise=other_noise)


@dataclass(frozen=True)
class NormalMixture:
    """Mixture of normal distributions of log m: means, standard deviations and weights, [M] each."""

    means: Array
    sds: Array
    weights: Array

    def above(self, value: float) -> float:
        """Probability that log m is above `value`."""
        from scipy.special import ndtr

        return float(self.weights @ ndtr((self.means - value) / self.sds))

    def quantiles(self, *p: float) -> Array:
        """Quantiles at probabilities `p`, of the shape of `p`, by bisection between the quantiles of the single normals."""
        from scipy.special import ndtr

        wanted = np.array(p)
        each = self.means + np.multiply.outer([normal_quantile(q) for q in p], self.sds)
        low, high = each.min(axis=1), each.max(axis=1)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below = ndtr((middle[:, None] - self.means) / self.sds) @ self.weights < wanted
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray((low + high) / 2)

    def moments(self) -> tuple[float, float]:
        """Mean and variance."""
        mean = float(self.weights @ self.means)
        return mean, float(self.weights @ (self.sds**2 + (self.means - mean) ** 2))


def _unshared(own: Seeds, baseline: Seeds, weights: Array) -> Array:
    """Covariance of J changes against K weighted cells of the baseline, for seeds of variance 1; 0 where all seeds are shared."""
    every = {seed: number for number, seed in enumerate(sorted({seed for cell in (*own, *baseline) for seed in cell}))}

    def means(cells: Seeds) -> Array:
        shares = np.zeros((len(cells), len(every)))
        for row, cell in zip(shares, cells, strict=True):
            for seed in cell:
                row[every[seed]] += 1 / len(cell)
        return shares

    apart = means(own) - weights @ means(baseline)
    return np.asarray(apart @ apart.T)


def _slope_sds() -> Array:
    """Standard deviations of g, [n_slopes]: normals with these, in equal shares, mix to the Student-t prior."""
    from scipy.special import gammaincinv

    middles = (np.arange(_N_SLOPES) + 0.5) / _N_SLOPES
    return np.asarray(SLOPE_SCALE / np.sqrt(gammaincinv(SLOPE_DOF / 2, middles) * 2 / SLOPE_DOF))


def normal_quantile(p: float) -> float:
    """Quantile of the standard normal distribution."""
    from scipy.special import ndtri

    return float(ndtri(p))
