"""Check of whether the runs identify the best D/N, and a pair of runs that would.

Runs along one line of D/N show the loss over compute, and so allow a forecast on this line. The best D/N shows only in how the loss
changes across the line. With C fixed and rho = log D/N, the log loss is least at rho* and has the curvature alpha·beta·R/(4·L)
there, R = L − E (two terms in balance, N and D at C/6). So n runs of noise sigma whose rho scatters by s at one compute determine
rho* to about 4·L·sigma / (√n·s·alpha·beta·R). This module computes that deviation at a budget with the prior of the forecast's fits:
the joint form is linearised at the prior's centre, with its optimum amid the runs. The only estimate that enters is the noise:
if rho* is not identified, the others are arbitrary and may agree. On planted ladders rho* erred by .7 to 2 of these
deviations (tests/benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.fits.law_prior import PRIOR, precision
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN, compute_flops
from scaling.forms.powers import JointPowers
from scaling.presentation import span

MOST_FACTOR = 10.0
"""Factor either way that the 90 % interval of the best D/N may span. Published optima lie within a factor of 5 about 20 (assumed:
an interval twice as long is less informative than these). On planted ladders, wider intervals gave away up to 30 % of loss."""
LEAST_NOISE = 5e-4
"""Least seed noise of a log loss that is assumed: large runs had .015–.06 %."""
APART = (1 / 8, 1 / 4, 4.0, 8.0)
"""Factors of the two runs' D/N over the ladder's mean; public ladders span as much and follow one law."""
_COMPUTES = 4  # candidate computes of the two runs, from the ladder's least to its largest
_TWO_SIDED_90 = 1.645  # deviations of a normal distribution
_WEAK = 1e-6  # prior precision of a term's logarithm at the centre: the runs alone determine it


@dataclass(frozen=True, kw_only=True)
class Unidentified:
    """Finding that the runs do not identify the best D/N of a budget.

    Attributes:
        tokens_per_param_range: least and largest D/N of the runs.
        tokens_per_param: geometric mean of the runs' D/N; a forecast at this D/N is still of use.
        factor: factor either way of the 90 % interval of the best D/N.
        runs: two runs that would identify the best D/N: n_params, n_tokens, compute_flops.
        factor_then: the same factor with these two runs.
    """

    tokens_per_param_range: tuple[float, float]
    tokens_per_param: float
    factor: float
    runs: pd.DataFrame
    factor_then: float

    def __str__(self) -> str:
        pair = " and ".join(
            f"N {run.n_params:.3g} on D {run.n_tokens:.3g} ({run.compute_flops:.2g} FLOPs)"
            for run in self.runs.itertuples()
        )
        return (
            f"the runs' D/N, {span(*self.tokens_per_param_range)}, do not determine the best one: its 90% interval reaches a factor "
            f"of {self.factor:.3g} either way, more than {MOST_FACTOR:g}; two runs bring it to {self.factor_then:.2g}: {pair}"
        )


def unidentified(rows: pd.DataFrame, noise: float, flops: float) -> Unidentified | None:
    """Return why these runs do not identify the best D/N at a budget of FLOPs; None if they do.

    Args:
        rows: n_params, n_tokens, loss.
        noise: standard deviation of the noise of log loss.
    """
    n_params, n_tokens = (rows[name].to_numpy(np.float64) for name in ("n_params", "n_tokens"))
    log_loss, ratio = np.log(rows["loss"].to_numpy(np.float64)), n_tokens / n_params
    known = _factor(n_params, n_tokens, log_loss, noise, flops)
    if known <= MOST_FACTOR:
        return None
    own = float(np.exp(np.log(ratio).mean()))
    made = compute_flops(n_params, n_tokens)
    compute, apart = (grid.ravel() for grid in np.meshgrid(np.geomspace(made.min(), made.max(), _COMPUTES), APART))
    size = np.sqrt(compute / FLOPS_PER_PARAM_TOKEN / (own * apart))
    tokens = own * apart * size
    pairs = [[*pair] for pair in combinations(range(len(size)), 2)]
    then = [
        _factor(np.append(n_params, size[p]), np.append(n_tokens, tokens[p]), log_loss, noise, flops) for p in pairs
    ]
    # The cheapest pair that brings the factor within MOST_FACTOR, else the pair with the least factor.
    best = min(range(len(pairs)), key=lambda i: (max(then[i], MOST_FACTOR), compute[pairs[i]].sum(), then[i]))
    return Unidentified(
        tokens_per_param_range=(float(ratio.min()), float(ratio.max())),
        tokens_per_param=own,
        factor=known,
        runs=pd.DataFrame({"n_params": size, "n_tokens": tokens, "compute_flops": compute}).iloc[pairs[best]],
        factor_then=then[best],
    )


def _factor(n_params: Array, n_tokens: Array, log_loss: Array, noise: float, flops: float) -> float:
    """Factor either way of the 90 % interval of the best D/N at a budget, from K runs, of which `log_loss` are known."""
    law = JointPowers.at(n_params, n_tokens, log_loss)
    alpha, beta, g = (PRIOR[name][0] for name in ("alpha", "beta", "g"))
    E = PRIOR["E"][0] * math.exp(log_loss.min())
    reducible, total = math.exp(log_loss.mean()) - E, alpha + beta
    # alpha·(inner term of N) = beta·(inner term of D) at the centre of the runs puts the optimum there.
    terms = np.log([reducible ** (1 / g) * beta / total, reducible ** (1 / g) * alpha / total]) * g
    theta = np.array([math.log(E), *terms, *np.log([alpha, beta, g])])
    jacobian = law.linearise(theta[None])[1][0]
    covariance = np.linalg.inv(jacobian.T @ jacobian / max(noise, LEAST_NOISE) ** 2 + precision(_WEAK))
    # log N* = (g·log(alpha/beta) + a − b + beta·c) / (alpha + beta), c = log C/6, all about the centre; rho* = c − 2·log N*.
    c = math.log(flops / FLOPS_PER_PARAM_TOKEN) - sum(law.terms.centre)
    best = beta * c / total
    slope = -2 / total * np.array([0, 1, -1, g - alpha * best, beta * (c - best) - g, g * math.log(alpha / beta)])
    deviation = math.sqrt(float(slope @ covariance @ slope))
    return math.exp(min(_TWO_SIDED_90 * deviation, 700.0))
