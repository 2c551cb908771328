"""Approach 1: the lowest of many loss curves at each compute, and the sizes of the runs that reach it as powers of compute.

Each curve is one run's loss against its compute so far; at every level of compute the run with the lowest loss has the best
size (Hoffmann et al. 2203.15556, sec. 3.1). Sizes come in steps, and the smallest and the largest win where smaller and larger
ones would, as does a size whose neighbour's curve has ended: such stretches are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from scaling.compute_powers import MIN_POINTS, ComputePowers, Powers, powers_through, resampled
from scaling.errors import ScalingError
from scaling.forms.form import Array
from scaling.law import compute_flops
from scaling.table import numbers, require_columns

LEVELS = 400
"""Of compute, evenly spaced in its logarithm from the least to the most (1,500 in Hoffmann et al.)."""
MAX_UNANSWERED = 0.05


@dataclass(frozen=True)
class _Curves:
    """Interpolated losses [runs, levels], infinite outside a run's range, and N of each run."""

    compute: Array
    n_params: Array
    loss: Array

    def envelope(self, chosen: Array) -> tuple[Array, Array]:
        """Levels at which a chosen run is best between sizes that are there too, and that run's number.

        A size's whole stretch is left out where it goes on being best without its neighbours: its middle isn't known.
        """
        loss, sizes = self.loss[chosen], self.n_params[chosen]
        there, best = np.isfinite(loss), np.argmin(loss, axis=0)
        levels, own = np.arange(len(self.compute)), sizes[best]
        known = np.unique(sizes)
        present = np.array([there[sizes == size].any(axis=0) for size in known])
        rank = np.searchsorted(known, own)
        inner = (rank > 0) & (rank < len(known) - 1)
        smaller, larger = np.maximum(rank - 1, 0), np.minimum(rank + 1, len(known) - 1)
        valid = there.any(axis=0) & inner & present[smaller, levels] & present[larger, levels]
        touches = np.zeros(len(levels), dtype=bool)
        same = own[1:] == own[:-1]
        touches[1:] |= same & valid[1:] & ~valid[:-1]
        touches[:-1] |= same & valid[:-1] & ~valid[1:]
        valid &= ~np.isin(own, own[touches])
        return levels[valid], chosen[best[valid]]

    def powers(self, chosen: Array, reference: float) -> Powers | None:
        """Through the middle of each size's stretch of the envelope."""
        levels, runs = self.envelope(chosen)
        points = self._stretches(levels, runs)
        if len(points) < 2:
            return None
        return powers_through(points[:, 0], points[:, 1], points[:, 2], reference)

    def points(self, chosen: Array) -> pd.DataFrame:
        """One row per size on the envelope."""
        columns = ["compute_flops", "n_params", "n_tokens", "loss", "low", "high"]
        return pd.DataFrame(self._stretches(*self.envelope(chosen)), columns=columns)

    def _stretches(self, levels: Array, runs: Array) -> Array:
        records = []
        for size in np.unique(self.n_params[runs]):
            own = levels[self.n_params[runs] == size]
            middle = float(np.exp(np.log(self.compute[own]).mean()))
            loss = float(self.loss[runs[self.n_params[runs] == size], own].mean())
            tokens = middle / float(compute_flops(size, 1.0))
            records.append([middle, size, tokens, loss, self.compute[own].min(), self.compute[own].max()])
        return np.array(records).reshape(-1, 6)


def fit_envelope(
    curves: pd.DataFrame, *, n_params_convention: str, n_bootstrap: int = 400, seed: int = 0
) -> ComputePowers:
    """Fit N* and D* as powers of compute through the envelope of loss curves.

    Args:
        curves: one row per evaluation: `run`, `n_params`, `n_tokens` (so far), `loss` (nats per token, smoothed); optional
            `annealed`. A curve's losses should be what a run of that length ends at: annealed branches, or runs of several
            lengths; of one cosine run only the end is.
        n_params_convention: what N counts.
        n_bootstrap: resamplings of the runs.
        seed: of the resampling.

    Returns:
        Powers, with `points` one row per size on the envelope: the middle (in the logarithm), least and most of the compute
        at which it is best.

    Raises:
        ValueError: a column is missing or breaks its rule, or a run has several sizes.
        ScalingError: fewer than two sizes are best anywhere between a smaller and a larger one.
    """
    require_columns(curves, ("run", "n_params", "n_tokens", "loss"))
    table = pd.DataFrame({name: numbers(curves, name) for name in ("n_params", "n_tokens", "loss")})
    table["run"] = curves["run"].to_numpy()
    if (several := table.groupby("run")["n_params"].nunique()).gt(1).any():
        raise ValueError(f"n_params must be one of each run, got {several.max()} in run {several.idxmax()!r}")
    interpolated = _interpolated(table)
    everyone = np.arange(len(interpolated.n_params))
    points = interpolated.points(everyone)
    if len(points) < 2:
        raise ScalingError(
            f"need two sizes that are best at some compute between a smaller and a larger one, got {len(points)} "
            f"of {len(np.unique(interpolated.n_params))} sizes"
        )
    reference = float(np.exp(np.log(points["compute_flops"]).mean()))
    estimate = interpolated.powers(everyone, reference)
    assert estimate is not None  # noqa: S101 - there are two points

    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(everyone), (n_bootstrap, len(everyone)))
    draws, unanswered = resampled(n_bootstrap, lambda i: interpolated.powers(np.unique(picks[i]), reference))
    doubts = []
    if len(points) < MIN_POINTS:
        doubts.append(f"{len(points)} sizes on the envelope: at least {MIN_POINTS} show whether the power is straight")
    if "annealed" in curves and not curves["annealed"].astype(bool).all():
        doubts.append("losses in mid-schedule: the envelope compares runs before and after their decay")
    if unanswered > MAX_UNANSWERED:
        doubts.append(f"{unanswered:.0%} of the resamplings leave fewer than two sizes on the envelope")
    return ComputePowers(
        approach="envelope",
        params_exponent=estimate[0],
        tokens_exponent=estimate[1],
        n_params_ref=estimate[2],
        n_tokens_ref=estimate[3],
        compute_ref=reference,
        n_params_convention=n_params_convention,
        draws=draws,
        points=points,
        bias={},
        warnings=tuple(doubts),
    )


def _interpolated(table: pd.DataFrame) -> _Curves:
    compute = compute_flops(table["n_params"], table["n_tokens"])
    levels = np.geomspace(compute.min(), compute.max(), LEVELS)
    sizes, losses = [], []
    for _, part in table.assign(compute=compute).groupby("run", sort=True):
        curve = part.sort_values("compute").drop_duplicates("compute")
        sizes.append(float(curve["n_params"].iloc[0]))
        losses.append(
            np.interp(np.log(levels), np.log(curve["compute"]), curve["loss"], left=np.inf, right=np.inf)
        )
    return _Curves(levels, np.array(sizes), np.array(losses))
