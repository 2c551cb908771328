"""The law of each domain's loss over mixture weights, and over size and length if the runs differ in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

import numpy as np
import pandas as pd

from scaling.drawing import Figure
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.runs import Table
from scaling.mixtures.best import BestMixture, best_mixture
from scaling.mixtures.domain_process import DomainProcess
from scaling.mixtures.following import NextMixtures, following_mixtures
from scaling.mixtures.mixture_bounds import MixtureLimits
from scaling.mixtures.mixture_figures import draw_effects
from scaling.mixtures.mixture_law import MixtureLaw, Objective, inputs
from scaling.mixtures.table import LOSS, WEIGHT, read_mixtures
from scaling.presentation import lines, span
from scaling.threads import single_threaded

RUNS_PER_DOMAIN = 2.0
"""Fewest runs per domain; with fewer the law is doubtful (assumed)."""
LEAST_ORDER = 0.5
"""Least rank correlation of left-out runs; below, a target is doubtful (assumed)."""
STEP = 0.1
"""Share of the mean mixture that is replaced by one domain in the table of effects."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureFit(MixtureLaw):
    """A mixture law with its quality, the best mixture and the mixtures to train next."""

    DERIVED = ("status", "warnings")

    @cached_property
    def quality(self) -> pd.DataFrame:
        """Table by target, from runs left out one at a time: error (root mean square, share of the loss) and order (Spearman)."""
        rows = {}
        for name, own in self.left_out.groupby("domain", sort=False):
            error = float(np.sqrt((np.log(own["predicted"] / own["loss"]) ** 2).mean()))
            rows[name] = {"error": error, "order": _order(own["predicted"], own["loss"])}
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the law is doubtful."""
        n, m = self.weights.shape
        few = [f"{n} runs for {m} domains: fewer than {RUNS_PER_DOMAIN:g} for each"] if n < RUNS_PER_DOMAIN * m else []
        poor = self.quality.index[~(self.quality["order"] >= LEAST_ORDER)]
        return (*few, *(f"runs left out are not put in order on {name}" for name in poor))

    @property
    def status(self) -> str:
        """`ok`, or `doubtful` for the reasons in `warnings`."""
        return "doubtful" if self.warnings else "ok"

    @cached_property
    def effects(self) -> pd.DataFrame:
        """Relative change of each target's loss (index) if one domain (columns) replaces .1 of the runs' mean mixture."""
        mean = self.weights.mean(axis=0)
        mixtures = np.concatenate([mean[None], (1 - STEP) * mean + STEP * np.eye(len(mean))])
        values = self.means(mixtures, self.scale())
        return pd.DataFrame(values[1:] / values[0] - 1, index=self.domains, columns=self.targets).T

    def best(
        self, objective: Objective = None, *, level: float = 0.9, seed: int = 0, **limits: Unpack[MixtureLimits]
    ) -> BestMixture:
        """Find the mixture of least objective within limits (`scaling.mixtures.best.best_mixture`, also for the errors raised).

        Args:
            objective: one target, weights of several, or None for the mean of all targets' losses.
            level: probability of the intervals.
            limits: bounds, available_tokens, n_tokens, max_epochs, n_params (`scaling.mixtures.mixture_bounds.MixtureLimits`).
        """
        return best_mixture(self, objective, level=level, seed=seed, **limits)

    def next_mixtures(
        self, n: int = 4, objective: Objective = None, *, seed: int = 0, **limits: Unpack[MixtureLimits]
    ) -> NextMixtures:
        """Choose the n mixtures to train next (`scaling.mixtures.following.following_mixtures`, also for the errors raised).

        Args:
            n: number of runs.
            objective: objective of the best mixture, as for `best`.
            seed: seed of the simulated outcomes.
            limits: limits of the best mixture, as for `best`.
        """
        return following_mixtures(self, n, objective, seed=seed, **limits)

    def plot(self) -> Figure:
        """Draw the table of effects as a map: which domain's data lowers which loss."""
        return draw_effects(self.effects)

    @property
    def about(self) -> str:
        """Lines about the runs, scales and status of the law."""
        scale = {name: span(self.scales[name].min(), self.scales[name].max()) for name in self.varying}
        about = {
            "runs": f"{len(self.weights)} over {len(self.domains)} domains",
            **scale,
            "error, order": "of runs predicted from the others: share of the loss, rank correlation",
            "lowered by": f"change of the loss where {STEP:g} of the mean mixture gives way to that domain",
            "status": "; ".join((self.status, *self.warnings)),
            **({"table": "; ".join(self.notes)} if self.notes else {}),
        }
        return lines(about)

    def __str__(self) -> str:
        """A line for each target, and the lines of `about`."""
        effects = self.effects
        shown = pd.DataFrame(
            {
                "domain": self.targets,
                "loss": [
                    span(*bounds, digits=4) for bounds in zip(self.losses.min(0), self.losses.max(0), strict=True)
                ],
                "error": [f"{error:.2%}" for error in self.quality["error"]],
                "order": [f"{order:.3f}" for order in self.quality["order"]],
                "lowered most by": [_most(effects.loc[name]) for name in self.targets],
            }
        )
        return f"{shown.to_string(index=False)}\n{self.about}"


@single_threaded
def fit_mixture(
    runs: Table, *, weight_prefix: str = WEIGHT, loss_prefix: str = LOSS, columns: Mapping[str, str] = NO_COLUMNS
) -> MixtureFit:
    """Fit each domain's loss over mixture weights, and over N and D if the runs differ in them.

    Args:
        runs: a DataFrame, a list of dicts, or a CSV, TSV, Parquet or JSON Lines file, a row per finished run:
            `weight_DOMAIN` for every domain (summing to 1 within .01), `loss_DOMAIN` for every held-out set (finite, above 0, in one
            unit; a run that lacks a loss is left out, and named), and `n_params`, `n_tokens` if runs differ in size or length. The
            columns `left_out` and `annealed` have their meaning in `scaling.fit`; others are ignored.
        weight_prefix, loss_prefix: prefixes of the columns' names, if the table has other prefixes.
        columns: names of the table's columns, by ours; `loss` names the only target, and the last row of each `run` counts.

    Raises:
        ValueError: a column is missing, or a value breaks its rule; the message names file, column, row and value.
    """
    table = read_mixtures(runs, weight_prefix, loss_prefix, columns)
    at = inputs(table.weights, table.scales, table.weights, table.scales)
    processes = [DomainProcess.fitted(at, loss) for loss in table.losses.T]
    expected, deviations = zip(*(process.cross_fitted() for process in processes), strict=True)
    return MixtureFit(
        domains=table.domains,
        targets=table.targets,
        weights=table.weights,
        losses=table.losses,
        scales=table.scales,
        numbers=np.array([process.numbers for process in processes]),
        expected=np.column_stack(expected),
        deviations=np.column_stack(deviations),
        notes=table.notes,
        rows=table.rows,
        weight_prefix=weight_prefix,
    )


def _order(predicted: pd.Series[float], loss: pd.Series[float]) -> float:
    """Rank correlation; NaN if all predictions or all losses are equal."""
    return float(predicted.corr(loss, method="spearman")) if min(np.ptp(predicted), np.ptp(loss)) > 0 else np.nan


def _most(effects: pd.Series[float]) -> str:
    least = effects.nsmallest(2)
    return ", ".join(f"{name} {change:+.1%}" for name, change in least.items())
