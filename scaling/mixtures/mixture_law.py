"""Loss of each target over mixture weights and scale: predictions with intervals, calibrated on runs left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import numbers, positive
from scaling.mixtures.domain_process import POWER, DomainProcess, Inputs, judged_rows
from scaling.mixtures.table import LEAST_RUNS, SCALES, WEIGHT, Weights, as_weights, require_known
from scaling.serialization import JsonResult, TableLayout
from scaling.threads import single_threaded

Objective = str | Mapping[str, float] | None
"""Quantity to minimise: one target, a weighted sum of several, or (None) the mean of all."""
SAME_SCALE = 1.01
"""Factor within which two sizes count as equal, because of rounding."""
BEYOND = 0.1
"""Share of the runs' range of w^.4 by which a weight may lie outside it. Of losses with a weight .1 to .2 above the range 92 to 99 %
lay inside 90 % intervals, with one .5 above 75 % (measured, RegMix); weights below the range were not tested."""
_LEAST_SPREAD = 1e-3  # added to the spread of w^.4, which may be near 0 for a domain


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureLaw(JsonResult):
    """Law of each target's loss over the mixture.

    Attributes:
        domains: names of the weights, m in alphabetical order.
        targets: names of the losses, k in alphabetical order.
        weights: mixtures of the runs, [n, m].
        losses: losses of the runs, [n, k], in the table's unit.
        scales: n_params and n_tokens of the runs, as far as given.
        numbers: the fitted numbers of each target's process, [k, …] (`scaling.mixtures.domain_process`).
        expected, deviations: mean and standard deviation of g given the other runs, [judged, k], in the rows of `judged_rows`.
        notes: notes on rows of the table that were left out, and on columns that were read under another name.
        rows: the caller's names of the fitted rows, [n]; empty in laws that earlier versions saved.
        weight_prefix: prefix of the fitted table's weights.
    """

    domains: tuple[str, ...]
    targets: tuple[str, ...]
    weights: Array = field(repr=False)
    losses: Array = field(repr=False)
    scales: Annotated[pd.DataFrame, TableLayout("tight")] = field(repr=False)
    numbers: Array = field(repr=False)
    expected: Array = field(repr=False)
    deviations: Array = field(repr=False)
    notes: tuple[str, ...] = ()
    rows: tuple[str, ...] = field(default=(), repr=False)
    weight_prefix: str = WEIGHT

    @property
    def varying(self) -> tuple[str, ...]:
        """Names of n_params and n_tokens that differ between runs, and so are inputs of the law."""
        return varying(self.scales)

    @cached_property
    def processes(self) -> tuple[DomainProcess, ...]:
        """Processes, one for each target."""
        at = self.inputs(self.weights, self.scales)
        return tuple(DomainProcess.of(at, loss, own) for loss, own in zip(self.losses.T, self.numbers, strict=True))

    @cached_property
    def left_out(self) -> pd.DataFrame:
        """Each run's loss and its prediction from the other runs.

        Columns: row (number among the fitted rows), domain, loss, predicted, z (in standard deviations of g).
        """
        rows, tables = judged_rows(len(self.losses)), []
        for i, (name, process) in enumerate(zip(self.targets, self.processes, strict=True)):
            z = (process.response[rows] - self.expected[:, i]) / self.deviations[:, i]
            predicted = process.loss(self.expected[:, i])
            columns = {"loss": self.losses[rows, i], "predicted": predicted, "z": z}
            tables.append(pd.DataFrame({"row": rows, "domain": name, **columns}))
        return pd.concat(tables, ignore_index=True)

    def scale(self, n_params: float | None = None, n_tokens: float | None = None) -> dict[str, float]:
        """Size and length of a prediction, as far as the law has them: the given values, or by default the runs' largest.

        Raises:
            ValueError: a value is not positive, or is given although the runs do not differ in it.
        """
        for name, value in {"n_params": n_params, "n_tokens": n_tokens}.items():
            if value is None:
                continue
            positive(name, value)
            if name not in self.varying and not (self.scales.get(name, pd.Series([np.nan])) == value).all():
                raise ValueError(
                    f"{name}: the runs do not differ in it, so the law holds only for their value; got {value:g}; leave it out"
                )
        given = {"n_params": n_params, "n_tokens": n_tokens}
        return {name: given[name] or float(self.scales[name].max()) for name in self.varying}

    def unsupported(self, scale: Mapping[str, float]) -> tuple[str, ...]:
        """Reasons why intervals at a size and length were not validated: outside the runs' range, or with too few runs so large."""
        found = []
        for name in self.varying:
            runs, value = self.scales[name].to_numpy(), scale[name]
            ratio = max(value / runs.max(), runs.min() / value)
            if ratio > SAME_SCALE:
                end, bound = ("largest", runs.max()) if value > runs.max() else ("smallest", runs.min())
                found.append(
                    f"{name} {value:.3g} lies {ratio:.3g} times beyond the {end} run's {bound:.3g}: "
                    "intervals hold only within the runs'"
                )
            elif (n := int((runs >= value / SAME_SCALE).sum())) < LEAST_RUNS:
                found.append(f"{n} runs have {name} {value:.3g} or more: add {LEAST_RUNS - n} for intervals that hold")
        return tuple(found)

    def untried(self, weights: Array) -> tuple[str, ...]:
        """Reasons why intervals of one mixture [m] were not validated: weights far above or below all weights of the runs."""
        least, most = self.weights.min(axis=0), self.weights.max(axis=0)
        low, high = tested(least, most)
        return tuple(
            f"{self.domains[i]} at {weights[i]:.3f} lies outside the runs' {least[i]:.3f} to {most[i]:.3f}"
            for i in np.flatnonzero((weights < low) | (weights > high))
        )

    def inputs(self, weights: Array, scales: pd.DataFrame | Mapping[str, float]) -> Inputs:
        """Convert mixtures [p, m], at one scale or one scale each, to inputs of the processes."""
        return inputs(weights, scales, self.weights, self.scales)

    def means(self, weights: Array, scale: Mapping[str, float]) -> Array:
        """Predicted losses of mixtures [p, m], [p, k]: medians of the posterior."""
        at = self.inputs(weights, scale)
        return np.column_stack([process.loss(process.mean(at)) for process in self.processes])

    @single_threaded
    def predict(
        self, weights: Weights, n_params: float | None = None, n_tokens: float | None = None, *, level: float = 0.9
    ) -> pd.DataFrame:
        """Loss of one run of each mixture on each target: mixture (number), domain, loss, low, high, unsupported (reasons, or empty).

        The interval's width in standard deviations is the one that holds `level` of the runs left out one at a time.

        Args:
            weights: weights by domain (0 for missing domains), a DataFrame, or an array in the order of `domains`. A DataFrame
                may have n_params and n_tokens of each run.
            n_params, n_tokens: size and length of all predicted runs, allowed only if the law's runs differ in them; by default
                the largest of the law's runs.
            level: probability of the interval.

        Raises:
            ValueError: a domain is unknown, weights are negative or do not sum to 1, or the level or scale is invalid.
        """
        mixtures = as_weights(weights, self.domains, self.weight_prefix)
        scales = self._scales(weights if isinstance(weights, pd.DataFrame) else None, len(mixtures), n_params, n_tokens)
        reasons = [
            "; ".join((*self.unsupported(scale), *self.untried(mixture)))
            for scale, mixture in zip(scales.to_dict("records"), mixtures, strict=True)
        ]
        at = self.inputs(mixtures, scales)
        tables = []
        for name, process in zip(self.targets, self.processes, strict=True):
            mean = process.mean(at)
            half = self.widening(name, level) * np.sqrt(process.variance(at) + process.noise(at))
            loss, low, high = (process.loss(mean + shift) for shift in (0.0, -half, half))
            number = range(len(mixtures))
            columns = {"loss": loss, "low": low, "high": high, "unsupported": reasons}
            tables.append(pd.DataFrame({"mixture": number, "domain": name, **columns}))
        return pd.concat(tables, ignore_index=True).sort_values("mixture", kind="stable", ignore_index=True)

    def _scales(
        self, table: pd.DataFrame | None, n: int, n_params: float | None, n_tokens: float | None
    ) -> pd.DataFrame:
        """Size and length of each of n mixtures: from the table, from the arguments, or else the largest of the runs."""
        given = {"n_params": n_params, "n_tokens": n_tokens}
        own = {} if table is None else {name: numbers(table, name) for name in SCALES if name in table}
        if both := [name for name in own if given[name] is not None]:
            raise ValueError(
                f"{both[0]}: the table of mixtures has a column of it; got {given[both[0]]:g} besides; leave out one"
            )
        rows = [self.scale(**(given | {name: float(values[i]) for name, values in own.items()})) for i in range(n)]
        return pd.DataFrame(rows, index=range(n))

    def widening(self, target: str, level: float) -> float:
        """Standard deviations that hold `level` of the runs left out: the conformal quantile (Barber et al. 1905.02928)."""
        z = self.left_out.loc[self.left_out["domain"] == target, "z"].abs()
        return quantile_of(z.to_numpy(), level)

    def coefficients(self, objective: Objective) -> Array:
        """Weight of each target in the objective, [k]; raises ValueError if one is unknown, negative or not finite, or all are 0."""
        if objective is None:
            return np.full(len(self.targets), 1 / len(self.targets))
        given = {objective: 1.0} if isinstance(objective, str) else dict(objective)
        require_known("objective", given, self.targets)
        values = np.array([float(given.get(name, 0.0)) for name in self.targets])
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise ValueError(f"objective must have finite weights of at least 0, one of them above 0, got {given}")
        return values


def inputs(
    weights: Array, scales: pd.DataFrame | Mapping[str, float], of_runs: Array, run_scales: pd.DataFrame
) -> Inputs:
    """Convert mixtures [p, m], at one scale or one scale each, to the units of the runs."""
    columns = []
    for name in varying(run_scales):
        own = np.log(run_scales[name].to_numpy())
        middle, half = (own.max() + own.min()) / 2, (own.max() - own.min()) / 2
        columns.append((np.log(np.broadcast_to(scales[name], len(weights))) - middle) / half)
    return Inputs(
        x=weights**POWER / ((of_runs**POWER).std(axis=0) + _LEAST_SPREAD),
        s=np.column_stack(columns) if columns else np.zeros((len(weights), 0)),
    )


def tested(least: Array, most: Array) -> tuple[Array, Array]:
    """Return the least and the largest weights at which intervals were validated, by those of the runs: `BEYOND`."""
    margin = BEYOND * (most**POWER - least**POWER)
    low = np.maximum(least**POWER - margin, 0.0) ** (1 / POWER)
    return low - 1e-6, (most**POWER + margin) ** (1 / POWER) + 1e-6


def varying(scales: pd.DataFrame) -> tuple[str, ...]:
    """Columns with more than one value."""
    return tuple(name for name in scales if scales[name].min() < scales[name].max())


def quantile_of(z: Array, level: float) -> float:
    """Return the (n + 1)·level-th of n absolute values, or the largest; raise ValueError if `level` does not lie between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    return float(np.quantile(z, min(1.0, level * (len(z) + 1) / len(z)), method="inverted_cdf"))
