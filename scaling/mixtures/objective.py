"""A weighted sum of losses over mixtures: its mean, its uncertainty, and the effect of future runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.mixtures.domain_process import DomainProcess, Inputs
from scaling.mixtures.mixture_law import MixtureLaw, quantile_of

_JITTER = 1e-6  # added to the correlation's diagonal, so that it has a Cholesky root


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """Σ coefficient · loss at one scale, over the k' targets with a coefficient above 0.

    Attributes:
        fit: the law.
        coefficients: coefficients of all targets, [k].
        scale: size and length of the objective.
        processes: processes of the targets with a coefficient; they include future runs once some are chosen.
    """

    fit: MixtureLaw
    coefficients: Array
    scale: Mapping[str, float]
    processes: tuple[DomainProcess, ...]

    @classmethod
    def of(cls, fit: MixtureLaw, coefficients: Array, scale: Mapping[str, float]) -> Objective:
        """Objective by the law's runs."""
        chosen = tuple(p for p, c in zip(fit.processes, coefficients, strict=True) if c > 0)
        return cls(fit=fit, coefficients=coefficients, scale=scale, processes=chosen)

    @property
    def _shares(self) -> Array:
        return self.coefficients[self._chosen]

    def at(self, weights: Array) -> Inputs:
        """Mixtures [p, m] at the objective's scale."""
        return self.fit.inputs(weights, self.scale)

    def mean(self, weights: Array) -> Array:
        """Mean of the objective at mixtures [p, m], [p]."""
        at = self.at(weights)
        parts = [c * p.loss(p.mean(at)) for c, p in zip(self._shares, self.processes, strict=True)]
        return np.asarray(np.sum(parts, axis=0))

    def deviation(self, weights: Array, *, of_run: bool = True) -> Array:
        """Standard deviation [p], to first order in each g, of a run's objective (`of_run`) or of the law's mean.

        Errors of targets are correlated like the errors of left-out runs.
        """
        at = self.at(weights)
        parts = []
        for c, p in zip(self._shares, self.processes, strict=True):
            variance = p.variance(at) + p.noise(at) * of_run
            parts.append(c * np.exp(p.mean(at)) * np.sqrt(variance))
        errors = np.array(parts)
        return np.asarray(np.sqrt(np.einsum("ip,ij,jp->p", errors, self.correlation, errors)))

    @cached_property
    def correlation(self) -> Array:
        """Correlation of the targets' errors in left-out runs, [k', k']."""
        z = self._z
        scaled = z / np.sqrt((z**2).mean(axis=0))
        return np.asarray(scaled.T @ scaled / len(z))

    @cached_property
    def _z(self) -> Array:
        """Standardised errors of left-out runs, [runs, k']."""
        wide = self.fit.left_out.pivot_table(index="row", columns="domain", values="z")
        return np.asarray(wide[np.array(self.fit.targets)[self._chosen]])

    def widening(self, level: float) -> float:
        """Standard deviations that hold the objective of `level` of the left-out runs."""
        # An error of g moves the loss by exp(g), the loss above the floor, times the error.
        sizes = self._shares * (np.exp(self.fit.expected) * self.fit.deviations)[:, self._chosen]
        spread = np.sqrt(np.einsum("ni,ij,nj->n", sizes, self.correlation, sizes))
        return quantile_of(np.abs((sizes * self._z).sum(axis=1)) / spread, level)

    @property
    def _chosen(self) -> NDArray[np.bool_]:
        return self.coefficients > 0

    def draws(self, weights: Array, n: int, generator: np.random.Generator) -> Array:
        """Objective of mixtures [p, m] in functions drawn from the posterior, [n, p]; targets are correlated like their errors."""
        at, total = self.at(weights), np.zeros((n, len(weights)))
        normal = self.normal((n, len(weights)), generator)
        for i, (c, p) in enumerate(zip(self._shares, self.processes, strict=True)):
            values, axes = np.linalg.eigh(p.covariance(at, at))  # differences of large numbers: some are below 0
            shift = normal[..., i] @ (axes * np.sqrt(np.maximum(values, 0.0))).T
            total += c * p.loss(p.mean(at) + shift)
        return total

    def normal(self, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
        """Standard normal numbers of this shape for each target, [..., k'], correlated like the targets' errors."""
        roots = np.linalg.cholesky(self.correlation + _JITTER * np.eye(len(self.processes)))
        return generator.standard_normal((*shape, len(roots))) @ roots.T

    def moves(self, weights: Array, runs: Inputs) -> Array:
        """Change of the objective's mean at mixtures [p, m] by one run, per standard deviation of its loss, [runs, k', p]."""
        at = self.at(weights)
        out = []
        for c, p in zip(self._shares, self.processes, strict=True):
            slope = c * np.exp(p.mean(at))
            surprise = np.sqrt(p.variance(runs) + p.noise(runs))
            out.append(p.covariance(runs, at) * slope / surprise[:, None])
        return np.stack(out, axis=1)

    def and_run(self, run: Inputs) -> Objective:
        """Objective after a further run with the expected losses."""
        return replace(self, processes=tuple(process.and_at(run) for process in self.processes))
