"""The forecast's prior from the public ladders: centres, deviations and correlations over families, the noise of each fit left out.

    python tests/benchmarks/prior.py

Expectation and maximisation: each ladder is fitted under the normal prior of the step before, its numbers' covariance taken from the
linearised fit (Laplace); the families' means and covariance, a family's ladders averaged, are the next prior.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.fits.ensemble import TUNING, BaseFits
from scaling.fits.law_prior import PRIOR
from scaling.forms.powers import Joint
from scaling.minimizers.newton import NormalPrior, minimize
from tests.benchmarks.ladders import ladders

STEPS = 12
AT = [[*Joint.parameters].index(name) for name in PRIOR]


@cache
def base_fits() -> list[tuple[str, BaseFits, Array, float]]:
    """(family, fits, estimate and scale of residuals) of every finished ladder under the prior as it is."""
    found = [(ladder.family, BaseFits.of(ladder.runs)) for ladder in ladders() if ladder.annealed]
    return [(family, fits, *fits.adaptive()) for family, fits in found]


def of_families(without: str = "") -> tuple[Array, Array]:
    """Mean [4] and covariance [4, 4] over all families but one."""
    centre, deviations = np.array([*PRIOR.values()]).T
    centre, spread = np.log(centre), np.diag(deviations**2)
    for _ in range(STEPS):
        estimates: dict[str, list[tuple[Array, Array]]] = {}
        for family, fits, start, sigma in base_fits():
            if family == without:
                continue
            mean, inverse = np.zeros(len(Joint.parameters)), np.zeros((len(Joint.parameters),) * 2)
            mean[AT], inverse[np.ix_(AT, AT)] = centre, np.linalg.inv(spread)
            mean[0] += fits.log_loss.min()
            prior = NormalPrior(mean=mean, precision=sigma**2 * inverse)
            (theta,), _, _ = minimize(
                fits.problem, fits.log_loss, fits.weights[None], start[None], (TUNING * sigma,), prior
            )
            jacobian = fits.problem.linearise(theta[None])[1][0]
            noise = np.linalg.inv(jacobian.T @ jacobian / sigma**2 + inverse + 1e-9 * np.eye(len(theta)))
            estimates.setdefault(family, []).append((theta[AT] - [fits.log_loss.min(), 0, 0, 0], noise[np.ix_(AT, AT)]))
        means = np.array([np.mean([estimate for estimate, _ in each], axis=0) for each in estimates.values()])
        noise = np.mean([np.mean([each for _, each in some], axis=0) for some in estimates.values()], axis=0)
        centre, spread = means.mean(axis=0), np.cov(means.T, bias=True) + noise
    return centre, spread


def left_out(family: str) -> dict[str, tuple[float, float]]:
    """What PRIOR would be by the other families: their centres, as wide as it is."""
    centres, _ = of_families(family)
    return {name: (float(np.exp(value)), PRIOR[name][1]) for name, value in zip(PRIOR, centres, strict=True)}


def main() -> None:
    """Print them, of all families and with each left out."""
    rows = {}
    for family in ("", *dict.fromkeys(family for family, *_ in base_fits())):
        centre, spread = of_families(family)
        deviation = np.sqrt(np.diag(spread))
        correlation = spread / np.outer(deviation, deviation)
        rows[family or "all nine"] = {
            **dict(zip(PRIOR, np.exp(centre), strict=True)),
            **{f"sd {name}": value for name, value in zip(PRIOR, deviation, strict=True)},
            **{f"{a}~{b}": correlation[i, j] for i, a in enumerate(PRIOR) for j, b in enumerate(PRIOR) if i < j},
        }
    print(pd.DataFrame(rows).T.round(2).to_string())


if __name__ == "__main__":
    main()
