"""A learning-rate schedule in the terms of the multi-power law (equation at the head of `scaling.schedules.schedule_law`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scaling.arrays import Array

MAX_KNOTS = 1000
"""Most changes of the rate that are kept; if there are more, they are thinned evenly."""
WARMUP_KNOTS = 50
"""Number of steps into which the warmup's rise is divided."""


@dataclass(frozen=True)
class ScheduleCurve:
    """A schedule, and the K steps at which the loss is predicted.

    Attributes:
        summed: S1 + S_W at these steps, [K].
        since: S_k at these steps, [K, knots]; 0 if the drop comes later.
        drops: eta_{k−1} − eta_k, [knots].
        log_rates: log eta_k, [knots].
        peak: highest rate.
    """

    summed: Array
    since: Array
    drops: Array
    log_rates: Array
    peak: float

    @classmethod
    def of(cls, steps: Array, rates: Array, at: Array, warmup_steps: float) -> ScheduleCurve:
        """Curve of one run: the rate is linear between rows, with its drop placed half-way, and counts with its value after the drop.

        Raises:
            ValueError: the first row lies in the warmup, or its rate is 0.
        """
        order = np.argsort(steps, kind="stable")
        steps, rates = steps[order], rates[order]
        if steps[0] < warmup_steps:
            raise ValueError(
                f"step must be at least warmup_steps = {warmup_steps:g} from a run's first row on, got {steps[0]:g}"
            )
        if rates[0] == 0:
            raise ValueError(
                f"lr must be above 0 in a run's first row, where its warmup ends, got 0 at step {steps[0]:g}"
            )
        if len(steps) > MAX_KNOTS:
            kept = np.unique(np.linspace(0, len(steps) - 1, MAX_KNOTS).astype(int))
            steps, rates = steps[kept], rates[kept]
        if warmup_steps > 0:
            steps = np.concatenate([np.linspace(0, warmup_steps, WARMUP_KNOTS + 1), steps])
            rates = np.concatenate([np.linspace(0, rates[0], WARMUP_KNOTS + 1), rates])
        summed = np.cumsum(np.diff(steps) * (rates[1:] + rates[:-1]) / 2)
        summed = rates[0] * steps[0] + np.concatenate([[0.0], summed])
        drops, middle = rates[:-1] - rates[1:], (summed[1:] + summed[:-1]) / 2
        # A rate that drops to 0 counts as half of its previous value, since the law divides by the rate.
        after = np.where(rates[1:] > 0, rates[1:], rates[:-1] / 2)
        changes = (drops != 0) & (after > 0)
        here = np.interp(at, steps, summed)
        since = np.maximum(here[:, None] - middle[changes], 0.0)
        return cls(here, since, drops[changes], np.log(after[changes]), float(rates.max()))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Loss [K] and its Jacobian [K, 7] for theta, the logarithms of (L0, A, alpha, B, C, beta, gamma)."""
        level, scale, alpha, gain, c, beta, gamma = np.exp(theta)
        powers = scale * self.summed**-alpha
        x = c * np.exp(-gamma * self.log_rates) * self.since
        log_x = np.log1p(x)
        kept = np.exp(-beta * log_x)
        slope = beta * x * kept / (1 + x)  # derivative of G by log x
        loss_drop = gain * ((1 - kept) @ self.drops)
        by_log_x = gain * (slope @ self.drops)
        jacobian = np.stack(
            [
                np.full_like(powers, level),
                powers,
                -alpha * np.log(self.summed) * powers,
                -loss_drop,
                -by_log_x,
                -gain * beta * ((log_x * kept) @ self.drops),
                gain * gamma * (slope @ (self.drops * self.log_rates)),
            ],
            axis=1,
        )
        return level + powers - loss_drop, jacobian


def peak_and_depth(rates: Array) -> tuple[float, float]:
    """Return a curve's highest rate, and its least rate as a share of that; raise ValueError if the rate is 0 in every row."""
    if not (peak := float(rates.max())) > 0:
        raise ValueError("lr must be above 0 in some row of a schedule, got 0 in all of them")
    return peak, float(rates.min()) / peak
