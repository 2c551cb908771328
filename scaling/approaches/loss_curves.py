"""Loss curves of several runs at common levels of compute, and the levels at which the best run's size changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.forms.law import compute_flops

COLUMNS = ("compute_flops", "n_params", "n_tokens", "loss", "smaller", "larger")
"""Columns of a crossing."""
LEVELS = 400
"""Number of levels of compute, evenly spaced in log compute from least to most (1,500 in Hoffmann et al.)."""


@dataclass(frozen=True)
class Curves:
    """Interpolated losses [runs, levels], infinite outside a run's range, and N of each run."""

    compute: Array
    n_params: Array
    loss: Array

    def crossings(self, chosen: NDArray[np.int64]) -> Array:
        """Points where the best run changes size while both runs continue: compute, N, D, loss, smaller, larger, [n, 6].

        Noisy curves of the same two sizes may cross more than once: the mean of these crossings counts.
        """
        loss, sizes = self.loss[chosen], self.n_params[chosen]
        best, levels = np.argmin(loss, axis=0), np.arange(len(self.compute) - 1)
        before, after = best[:-1], best[1:]
        both = np.isfinite(loss[before, levels]) & np.isfinite(loss[before, levels + 1])
        both &= np.isfinite(loss[after, levels]) & np.isfinite(loss[after, levels + 1])
        found: dict[tuple[float, float], list[int]] = {}
        for i in np.flatnonzero(both & (sizes[before] != sizes[after])):
            pair = sorted((float(sizes[before[i]]), float(sizes[after[i]])))
            found.setdefault((pair[0], pair[1]), []).append(int(i))
        records = []
        for (smaller, larger), at in sorted(found.items()):
            after = np.array(at) + 1
            middle = float(np.exp((np.log(self.compute[at]) + np.log(self.compute[after])).mean() / 2))
            height = float((loss[best[at], at] + loss[best[after], after]).mean() / 2)
            size = math.sqrt(smaller * larger)
            tokens = middle / float(compute_flops(size, 1.0))
            records.append([middle, size, tokens, height, smaller, larger])
        return np.array(records).reshape(-1, len(COLUMNS))


def curves_of(table: pd.DataFrame) -> Curves:
    """Curves at `LEVELS` of compute, from a table with the columns run, n_params, compute_flops, loss."""
    compute = table["compute_flops"]
    levels = np.geomspace(compute.min(), compute.max(), LEVELS)
    sizes, losses = [], []
    for _, part in table.groupby("run", sort=True):
        curve = part.sort_values("compute_flops").drop_duplicates("compute_flops")
        sizes.append(float(curve["n_params"].iloc[0]))
        losses.append(
            np.interp(np.log(levels), np.log(curve["compute_flops"]), curve["loss"], left=np.inf, right=np.inf)
        )
    return Curves(levels, np.array(sizes), np.array(losses))
