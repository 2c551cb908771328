"""Best hyperparameters at each length of a sweep's annealed runs: the minimum of a surface through all runs, not a single run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from muscale.search.across_scales import N_TOKENS, box_of, config_at, coordinates
from muscale.search.sweep_tables import config_of
from muscale.settings.config import StudyConfig
from proxy_models.training.numerics import Numerics
from scaling import ResponseOptimum, ResponseSurface, SearchBox, fit_response
from search_spaces import Config, Ordinal, Space

LEVEL = 0.9
SPARE = 2
"""Finite runs that a surface needs in addition to one for each coordinate; muscale's searcher begins with as many draws."""
AT_BOUND = 0.01
"""Distance from a bound, in widths of the box, within which an interval is not closed on that side (assumed)."""
RATE = "learning_rate"
GROUP = "sweep"
"""Group of a sweep's optima in the horizon law."""
ROUNDING = 0.1
"""Share by which a length may fall short because batches are whole."""
COLUMNS = ("n_tokens", "hyperparameter", "best", "low", "high", "probability", "n_runs", "status")


@dataclass(frozen=True, kw_only=True, eq=False)
class RungOptima:
    """A surface over the searched hyperparameters and the run's length, and its minimum at each length.

    One fit covers all lengths, so runs of every length inform each optimum.

    Attributes:
        runs: One row per run: n_tokens, loss (nats per token; NaN: diverged) and the searched hyperparameters.
    """

    runs: pd.DataFrame
    space: Space

    @cached_property
    def box(self) -> SearchBox:
        """The space, with the length as the only scale."""
        return replace(box_of(self.space), scales=(N_TOKENS,))

    @property
    def has_surface(self) -> bool:
        """Whether there are enough runs for a surface."""
        return bool(self.space.searched) and int(self.runs["loss"].notna().sum()) >= len(self.box.names) + SPARE

    @property
    def lengths(self) -> list[int]:
        """Tokens of the finite runs, ascending."""
        return [int(n) for n in np.unique(self.runs.loc[self.runs["loss"].notna(), N_TOKENS])]

    @cached_property
    def surface(self) -> ResponseSurface:
        """The surface through all runs."""
        rows = [
            {**coordinates(self.space, config_of(row, self.space)), N_TOKENS: row[N_TOKENS], "loss": row["loss"]}
            for row in self.runs.to_dict("records")
        ]
        return fit_response(pd.DataFrame(rows), box=self.box)

    def at(self, n_tokens: int) -> ResponseOptimum:
        """The minimum at a length."""
        if n_tokens not in self._found:
            self._found[n_tokens] = self.surface.optimum({N_TOKENS: float(n_tokens)}, level=LEVEL)
        return self._found[n_tokens]

    @cached_property
    def _found(self) -> dict[int, ResponseOptimum]:
        return {}

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each length and hyperparameter.

        Columns: n_tokens, hyperparameter, best; low and high, the 90 % interval (NaN for choices and mixtures); probability of a
        choice; n_runs, the finite runs of this length; status: `ok`, `edge` (the optimum lies on a bound of the space) or
        `open` (its interval reaches one). Hyperparameters that are inactive at the optimum have no row; the table is empty if the
        runs are too few for a surface.
        """
        return self._table(self.lengths)

    def longest(self) -> pd.DataFrame:
        """The rows of `table` for the longest length."""
        return self._table(self.lengths[-1:])

    def _table(self, lengths: Sequence[int]) -> pd.DataFrame:
        rows = [
            [n, name, best, *self._ends(optimum, name), optimum.n_here, self._status(optimum, name)]
            for n, optimum in ((n, self.at(n)) for n in (lengths if self.has_surface else ()))
            for name, best in self._best(optimum).items()
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def rates(self) -> pd.DataFrame:
        """The best rate of each length where its interval is closed: n_tokens, log2_rate, stderr (octaves).

        The rate may have been searched on any scale, but not as a choice, which has no interval.
        """
        rows = []
        for n in self.lengths if self.has_surface and RATE in self.box.bounds else ():
            optimum = self.at(n)
            if RATE in self._best(optimum) and self._status(optimum, RATE) == "ok":
                low, high = (self._log2_rate(optimum, end) for end in optimum.intervals[RATE])
                stderr = abs(high - low) / 2 / NormalDist().inv_cdf((1 + optimum.level) / 2)
                rows.append((n, self._log2_rate(optimum, optimum.point[RATE]), stderr))
        return pd.DataFrame(rows, columns=[N_TOKENS, "log2_rate", "stderr"])

    def _log2_rate(self, optimum: ResponseOptimum, place: float) -> float:
        """Return log2 of the rate at a place of the box; between the rates of an ordinal it is interpolated."""
        if isinstance(listed := self.space[RATE], Ordinal):
            rates = np.log2(np.asarray(listed.values, dtype=np.float64))
            return float(np.interp(place, np.arange(len(rates)), rates))
        rate: Any = config_at(self.space, optimum.point | {RATE: place})[RATE]
        return math.log2(rate)

    def misses(self, config: Config, n_tokens: int) -> list[str]:
        """Describe the hyperparameters of a configuration that lie outside the optimum's closed interval at a length."""
        if not self.has_surface or n_tokens not in self.lengths:
            return []
        optimum, place, table = self.at(n_tokens), coordinates(self.space, config), self._table([n_tokens])
        out = []
        for row in table[table["status"] == "ok"].to_dict("records"):
            name = row["hyperparameter"]
            if name in config and name in optimum.intervals:
                low, high = optimum.intervals[name]
                if not low <= place[name] <= high:
                    out.append(
                        f"{name} {_shown(config[name])} against {_shown(row['best'])}, {LEVEL:.0%} interval "
                        f"[{_shown(row['low'])}, {_shown(row['high'])}]"
                    )
        return out

    def _best(self, optimum: ResponseOptimum) -> Config:
        """The searched and active values at an optimum."""
        best = config_at(self.space, optimum.point)
        return {name: best[name] for name in self.space.searched if name in best}

    def _ends(self, optimum: ResponseOptimum, name: str) -> tuple[Any, Any, float]:
        if name in optimum.choice_probabilities:
            return math.nan, math.nan, optimum.choice_probabilities[name][optimum.point[name]]
        if name not in optimum.intervals:
            return math.nan, math.nan, math.nan
        low, high = (config_at(self.space, optimum.point | {name: end})[name] for end in optimum.intervals[name])
        return low, high, math.nan

    def _status(self, optimum: ResponseOptimum, name: str) -> str:
        places = [place for place in self.box.bounds if place == name or place.startswith(f"{name}.")]
        if any(place in optimum.at_edge for place in places):
            return "edge"
        return "open" if any(_is_open(optimum.intervals[p], self.box.bounds[p]) for p in places) else "ok"


def _is_open(interval: tuple[float, float], bounds: tuple[float, float]) -> bool:
    margin = AT_BOUND * (bounds[1] - bounds[0])
    return interval[0] < bounds[0] + margin or interval[1] > bounds[1] - margin


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def edge_messages(table: pd.DataFrame, space: Mapping[str, Any]) -> list[str]:
    """Return messages about the hyperparameters whose optimum lies on a bound, with the remedy."""
    return [
        f"the fitted optimum of {row['hyperparameter']} is {_shown(row['best'])}, on a bound of the space: widen "
        f"sweep.space.{row['hyperparameter']} ({space[row['hyperparameter']]})"
        for row in table[table["status"] == "edge"].to_dict("records")
    ]


def for_horizon(fitted: RungOptima, config: StudyConfig, numerics: Numerics) -> pd.DataFrame:
    """Return a sweep's best rates as observations for the horizon law, `optima` of `scaling.fit_verdict`; may be empty.

    The rates count if the sweep followed the full run's schedule, and every length saw the data of a separate run of that length.
    Lengths below the grids' shortest horizon, as a share of the longest, are left out: a branch has the warmup of the whole
    trial, so warmup takes a larger share of a shorter branch.

    The optima of one surface are not independent. Treating them as independent, with the law's scatter added to each, still
    overstates the errors. Measured on 24 planted sweeps of two hyperparameters, with 33 annealed runs at four lengths,
    for each of the exponents .27 and .6: the mean found was .24 and .58, and the root mean square of (found - planted) /
    stated error was .49 and .63.
    """
    columns = ["group", N_TOKENS, "log2_rate", "stderr"]
    own_schedule = (config.sweep.schedule or config.hyperparameters.schedule) == config.hyperparameters.schedule
    if not own_schedule or numerics.stages_by_fraction or not fitted.has_surface:
        return pd.DataFrame(columns=columns)
    rates = fitted.rates().assign(group=GROUP)
    shortest = min(config.transfer.horizons) * max(fitted.lengths)
    rates = rates[rates[N_TOKENS] >= (1 - ROUNDING) * shortest]
    return rates.loc[:, columns] if len(rates) > 1 else pd.DataFrame(columns=columns)
