"""Density of jointly normal values, with what its gradient needs."""

from dataclasses import dataclass

import numpy as np

from scaling.arrays import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalDensity:
    """Density of n values about their mean.

    Attributes:
        value: −log density without the normalization by (2π)^(n/2).
        weights: inverse covariance times the values, [n].
        slope: derivative of `value` by the entries of the covariance, [n, n].
    """

    value: float
    weights: Array
    slope: Array

    @classmethod
    def of(cls, values: Array, covariance: Array) -> "NormalDensity":
        """Density of the values by one Cholesky factor and inverse; raises LinAlgError if the covariance is rounded to indefinite."""
        from scipy.linalg.lapack import dpotrf, dpotri

        factor, failed = dpotrf(covariance, lower=1)
        if failed:
            raise np.linalg.LinAlgError("the covariance must be positive definite")
        lower = np.tril(dpotri(factor, lower=1)[0])
        inverse = lower + np.tril(lower, -1).T
        weights = inverse @ values
        value = values @ weights / 2 + np.log(np.diag(factor)).sum()
        return cls(value=float(value), weights=weights, slope=(inverse - np.outer(weights, weights)) / 2)
