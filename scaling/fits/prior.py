"""The prior of a forecast's fits: the joint form's numbers as families of public ladders have them, the same for every ladder.

Normal in the logarithms of the exponents, of g, and of E as a share of the least loss. E, alpha and beta go together: where the
floor is low the loss falls slowly, along the very direction that a short ladder leaves open, so that a prior which holds them
apart bends long extrapolations. Centres and correlations are those of nine families of finished ladders, by expectation and
maximisation over their fits (`tests/benchmarks/prior.py`), which leaves the noise of each fit out.
"""

from __future__ import annotations

import numpy as np

from scaling.arrays import Array
from scaling.forms.powers import Joint

PRIOR = {"E": (0.73, 0.4), "alpha": (0.3, 0.35), "beta": (0.27, 0.45), "g": (0.46, 0.6)}
"""Centre (of E: as a share of the least loss) and standard deviation of the logarithm.

The families' deviations are .18, .26, .36 and .36. Those of alpha and beta are 1.3 times as large here, as nine families tell
neither centre nor spread exactly; that of E is twice as large, as ladders of the smallest models have shares near .3; that of g
leaves Chinchilla's own 1 within 1.3 deviations.
"""
CORRELATIONS = {("E", "alpha"): 0.75, ("E", "beta"): 0.8, ("alpha", "beta"): 0.8}
"""Of the logarithms, as the families have them. g is held apart: bound to E it draws the best sizes of Chinchilla's form aside."""


def covariance() -> Array:
    """Covariance of the names in PRIOR, [4, 4]."""
    names = [*PRIOR]
    matrix = np.diag([deviation**2 for _, deviation in PRIOR.values()])
    for (one, other), correlation in CORRELATIONS.items():
        i, j = names.index(one), names.index(other)
        matrix[i, j] = matrix[j, i] = correlation * PRIOR[one][1] * PRIOR[other][1]
    return matrix


def precision(unknown: float = 0.0) -> Array:
    """Precision of the joint form's theta, [6, 6]; of A and B `unknown`."""
    matrix = np.diag([0.0 if name in PRIOR else unknown for name in Joint.parameters])
    matrix[np.ix_(_AT, _AT)] = np.linalg.inv(covariance())
    return matrix


def shifts(n_draws: int, seed: int) -> Array:
    """Moves of the prior's mean by the prior's own spread, [n_draws, 6].

    A draw is fitted to resampled runs about a mean that is drawn too: refits under one mean would show what the prior lets the runs
    tell, not what it leaves open (randomise, then optimise: Bardsley et al. 2014, SIAM J. Sci. Comput. 36, A1895).
    """
    moved = np.zeros((n_draws, len(Joint.parameters)))
    normal = np.random.default_rng([seed, 1]).standard_normal((n_draws, len(PRIOR)))
    moved[:, _AT] = normal @ np.linalg.cholesky(covariance()).T
    return moved


_AT = [[*Joint.parameters].index(name) for name in PRIOR]
