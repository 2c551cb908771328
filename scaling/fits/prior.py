"""The prior of a forecast's fits: the joint form's numbers as families of public ladders have them, the same for every ladder.

Normal in the logarithms of the exponents, of g, and of E as a share of the least loss. In the families E, alpha and beta go together
(correlations .75 to .8), but a prior that binds them, and E as near to its centre as they do, was most wrong where it was needed: of
ladders planted with E at .05 to .3 of the least loss its 90 % intervals held 0 to 36 %, and its floor, drawn to .4 and above, did
not show it (`tests/benchmarks/low_floor.py` has the figures of this one).
"""

from __future__ import annotations

import numpy as np

from scaling.arrays import Array
from scaling.forms.powers import Joint

PRIOR = {"E": (0.7, 0.6), "alpha": (0.3, 0.35), "beta": (0.27, 0.4), "g": (0.46, 0.45)}
"""Centre (of E: as a share of the least loss) and standard deviation of the logarithm.

Centres are about those of nine families of finished public ladders (.73, .30, .27, .47 by `tests/benchmarks/prior.py`), deviations
above theirs (.18, .26, .36, .36), most for E, whose share is near .3 in ladders of the smallest models.
"""


def precision(unknown: float = 0.0) -> Array:
    """Precision of the joint form's theta, [6, 6]; of A and B `unknown`."""
    return np.diag([PRIOR[name][1] ** -2 if name in PRIOR else unknown for name in Joint.parameters])


def shifts(n_draws: int, seed: int) -> Array:
    """Moves of the prior's mean by the prior's own spread, [n_draws, 6].

    A draw is fitted to resampled runs about a mean that is drawn too: refits under one mean would show what the prior lets the runs
    tell, not what it leaves open (randomise, then optimise: Bardsley et al. 2014, SIAM J. Sci. Comput. 36, A1895).
    """
    deviations = np.array([PRIOR[name][1] if name in PRIOR else 0.0 for name in Joint.parameters])
    return np.asarray(deviations * np.random.default_rng([seed, 1]).standard_normal((n_draws, len(deviations))))
