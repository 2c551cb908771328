"""Runs to add to the ladder: of those that the family, the corpus and the schedule allow, the ones that tell the plan's loss best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from muscale.formatting import fold
from muscale.plans.planning import Plan
from muscale.plans.sizing import most_tokens
from muscale.proxies.ladder import stem_lengths
from muscale.settings.config import StudyConfig
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import MAX_EPOCHS
from proxy_models.recipes.segments import chain
from scaling import NextRuns, ScalingFit, candidate_runs, compute_flops, next_runs
from scaling.presentation import Result

SHARE = 0.1
"""Of the plan's compute that further runs may cost, unless it is said, or as much as the ladder's largest run: smaller ones
alone tell little of a target far above them (assumed)."""
_SAME = math.log(1.1)  # between the lengths of two runs of a width that tell the same
_PER_DECADE = 12  # sizes looked at, and half as many ratios of tokens to parameters
NARROW = 0.02
"""Full width of the interval over the forecast at which no further run is advised (assumed: about what the tested interval
comes to right above a ladder of little noise)."""


@dataclass(frozen=True, kw_only=True)
class NextStems(Result):
    """Runs to add to the ladder, best first.

    Attributes:
        result: What they do to the forecast's interval, and why no more were chosen.
        affordable_flops: What they may cost together.
        share: Of the plan's compute that this is.
    """

    result: NextRuns
    affordable_flops: float
    share: float

    @property
    def table(self) -> pd.DataFrame:
        """A row for each run: d_model, n_tokens, cost_flops, spent_flops, variance_left, interval (width over forecast)."""
        columns = ["d_model", "n_params", "n_tokens", "cost_flops", "spent_flops", "variance_left", "width"]
        return self.result.runs[columns].rename(columns={"width": "interval"}).reset_index(drop=True)

    @property
    def lines(self) -> tuple[str, ...]:
        """Each run as a line for `stems` of [ladder]."""
        rows = self.table[["d_model", "n_tokens"]].itertuples(index=False)
        return tuple(
            f"{{ width = {int(width)}, n_tokens = {int(n_tokens)}, branches = 1 }}," for width, n_tokens in rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "affordable_flops": self.affordable_flops,
            "width_now": self.result.width_now,
            "width_then": self.result.width_then,
            "stopped": self.result.stopped,
            "reasons": list(self.result.reasons),
            "runs": self.table.to_dict("records"),
            "stems": list(self.lines),
        }

    @property
    def advice(self) -> str:
        """Effect of the runs and how to train them, without their table."""
        return "\n".join([*self._about, *self._how])

    def __str__(self) -> str:
        formats = {
            "d_model": "{:d}".format,
            "n_params": "{:,.0f}".format,
            "n_tokens": "{:,.0f}".format,
            "cost_flops": "{:.3g}".format,
            "spent_flops": "{:.3g}".format,
            "variance_left": "{:.0%}".format,
            "interval": "{:.2%}".format,
        }
        table = self.table.to_string(index=False, formatters=formats).splitlines() if len(self.table) else []
        about, how = ([part for line in lines for part in fold(line, 2)] for lines in (self._about, self._how))
        return "\n  ".join([*about, *table, *how])

    @property
    def _about(self) -> list[str]:
        found = self.result
        expected = f", {found.width_then:.2%} expected after these" if len(found.runs) else ""
        return [
            f"next runs, for up to {self.affordable_flops:.3g} FLOPs, {self.share:.2g} of the plan",
            f"the forecast's {found.now.level:.0%} interval is {found.width_now:.2%} of the loss wide{expected}",
        ]

    @property
    def _how(self) -> list[str]:
        stopped = f"{'no more' if self.lines else 'none'}: {self.result.stopped}"
        still = [f"the forecast would still be outside declared support: {reason}" for reason in self.result.reasons]
        add = ["to train them, add to stems of [ladder]:", *(f"  {line}" for line in self.lines)] if self.lines else []
        return [stopped, *still, *add]


def choose(
    config: StudyConfig,
    fit: ScalingFit,
    plan: Plan,
    corpus: Corpus,
    *,
    affordable_flops: float | None = None,
    n_runs: int = 4,
    width: float = NARROW,
) -> NextStems:
    """The runs that shrink the variance of the plan's forecast most for what may be spent; the arguments are `Study.next_runs`'s.

    Raises:
        ValueError: If an argument breaks its rule.
    """
    if affordable_flops is None:
        affordable_flops = max(SHARE * plan.compute_flops, fit.compute_range[1])
    found = next_runs(
        fit,
        plan.n_params,
        plan.n_tokens,
        affordable_flops=affordable_flops,
        candidates=candidates(config, fit, plan, corpus, affordable_flops=affordable_flops),
        n_runs=n_runs,
        width=width,
        level=config.plan.level,
    )
    return NextStems(result=found, affordable_flops=affordable_flops, share=affordable_flops / plan.compute_flops)


def candidates(
    config: StudyConfig, fit: ScalingFit, plan: Plan, corpus: Corpus, *, affordable_flops: float
) -> pd.DataFrame:
    """Runs that could join the ladder: d_model, n_params, n_tokens in whole batches, cost_flops.

    Widths from the smallest fitted to the plan's; lengths from the shortest fitted, as a shorter run is mostly warmup, to so
    many epochs that repeats hardly count. What the ladder has already, or nearly, is none: the same run tells nothing new.
    """
    spread = candidate_runs(
        fit, plan.n_params, plan.n_tokens, affordable_flops=affordable_flops, per_decade=_PER_DECADE
    )
    depths = (None, config.model.n_layers)  # those looked at have the base's
    stems = [stem for stem in config.ladder.stems if stem.depth in depths]
    taken = [(stem.width, length) for stem in stems for length in stem_lengths(stem)]
    shortest, longest = fit.n_tokens_range[0], most_tokens(corpus, MAX_EPOCHS)
    rows = []
    for n_params, n_tokens in spread[["n_params", "n_tokens"]].itertuples(index=False):
        model, length = config.family.for_params(n_params), plan.hyperparameters.whole_batches(n_tokens)
        cost = float(compute_flops(model.n_params, length))
        known = any(width == model.d_model and abs(math.log(length / other)) < _SAME for width, other in taken)
        if shortest <= length <= longest and cost <= affordable_flops and not known and _resolves(plan, length):
            taken.append((model.d_model, float(length)))
            rows.append((model.d_model, model.n_params, length, cost))
    table = pd.DataFrame(rows, columns=["d_model", "n_params", "n_tokens", "cost_flops"])
    return table.astype({"d_model": np.int64, "n_params": np.int64, "n_tokens": np.int64, "cost_flops": np.float64})


def _resolves(plan: Plan, n_tokens: int) -> bool:
    """Whether the schedule has room for its stretches in so few tokens."""
    try:
        chain(plan.hyperparameters, n_tokens)
    except ValueError:
        return False
    return True
