"""The prior of a forecast's fits: the joint form's numbers in families of public ladders; the prior is the same for every ladder.

The prior is normal in the logarithms of the exponents, of g, and of E as a share of the least loss. In the families E, alpha and
beta are correlated (.75 to .8). But a prior with these correlations, and with as little spread of E, was most wrong where it was
needed: on ladders planted with E at .05 to .3 of the least loss its 90 % intervals held 0 to 36 %, and the fitted E, drawn to .4 and
above, did not show this (`tests/benchmarks/low_floor.py` has the figures of the present prior).
"""

from __future__ import annotations

import numpy as np

from scaling.arrays import Array
from scaling.forms.law import Form
from scaling.forms.powers import Joint

PRIOR = {"E": (0.7, 0.6), "alpha": (0.3, 0.35), "beta": (0.27, 0.4), "g": (0.46, 0.45)}
"""Centre (E: as a share of the least loss) and standard deviation of the logarithm.

The centres are close to those of nine families of finished public ladders (.73, .30, .27, .47 by `tests/benchmarks/prior.py`). The
deviations are above the families' (.18, .26, .36, .36), most for E, whose share is near .3 in ladders of the smallest models.
"""
OF_EXPERTS = {"alpha_total": (0.2, 0.35), "h": (1.0, 0.7)}
"""The same for the further numbers of a law of experts. The centres are those of the two routers of Clark et al. (2202.01169); the
deviations are assumed, as two routers of one paper show no spread."""
OF_ONE_SIZE = {"E": (0.75, 0.3), "beta": (0.4, 0.4), "D_0": (0.2, 2.0)}
"""The same for the form of one size; D_0 as a share of the runs' geometric mean of tokens. Chosen on runs of one size of the public
ladders and on runs counted from a checkpoint (`tests/benchmarks/one_size.py`)."""
_JOINT = Joint()


def prior_numbers(form: Form) -> dict[str, tuple[float, float]]:
    """Return centre and standard deviation of the logarithm, by parameter, of the numbers with a prior."""
    return OF_ONE_SIZE if form.tokens_only else PRIOR | OF_EXPERTS


def precision(unknown: float = 0.0, form: Form = _JOINT) -> Array:
    """Precision of the theta of a forecast's form, [P, P]; A and B have the precision `unknown`."""
    known = prior_numbers(form)
    return np.diag([known[name][1] ** -2 if name in known else unknown for name in form.parameters])


def shifts(n_draws: int, seed: int, form: Form = _JOINT) -> Array:
    """Shifts of the prior's mean, drawn from the prior's spread, [n_draws, P].

    Each refit to resampled runs also has a drawn prior mean: refits under one mean would leave out the uncertainty of the prior
    (randomise, then optimise: Bardsley et al. 2014, SIAM J. Sci. Comput. 36, A1895).
    """
    known = prior_numbers(form)
    deviations = np.array([known[name][1] if name in known else 0.0 for name in form.parameters])
    return np.asarray(deviations * np.random.default_rng([seed, 1]).standard_normal((n_draws, len(deviations))))
