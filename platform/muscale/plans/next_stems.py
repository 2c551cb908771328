"""Runs to add to the ladder: among the runs that family, corpus and schedule allow, the ones that narrow the forecast most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from muscale.formatting import fold
from muscale.plans.plan import Plan
from muscale.plans.sizing import most_tokens
from muscale.proxies.ladder import ladder_models, law_columns, mixtures_of, stem_lengths
from muscale.settings.config import StudyConfig
from muscale.settings.plan import with_experts
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import MAX_EPOCHS
from proxy_models.recipes.segments import chain
from scaling import NextRuns, ScalingFit, candidate_runs, compute_flops, next_runs
from scaling.forms.expert_law import SPARSITY
from scaling.presentation import Result

SHARE = 0.1
"""Default limit on the cost of further runs, as a share of the plan's compute. The ladder's largest run is allowed in any case:
smaller runs alone say little about a target far above them (assumed)."""
_SAME = math.log(1.1)  # log of the ratio of lengths below which two runs of a width count as the same
_PER_DECADE = 12  # sizes considered, and half as many ratios of tokens to parameters
NARROW = 0.02
"""Full width of the interval divided by the forecast, below which no further run is advised (assumed: about the tested
interval's width just above a ladder with little noise)."""


@dataclass(frozen=True, kw_only=True)
class NextStems(Result):
    """Runs to add to the ladder, best first.

    Attributes:
        result: Effect on the forecast's interval, and the reason why no more runs were chosen.
        affordable_flops: Limit on the cost of all runs together.
        share: This limit as a share of the plan's compute.
    """

    result: NextRuns
    affordable_flops: float
    share: float

    @property
    def table(self) -> pd.DataFrame:
        """A row for each run: d_model, n_params, n_tokens, cost_flops, spent_flops, variance_left, interval (width/forecast).

        Under a law of experts it also has n_experts.
        """
        return self.result.runs.drop(columns=SPARSITY, errors="ignore").reset_index(drop=True)

    @property
    def lines(self) -> tuple[str, ...]:
        """Each run as a line for `stems` of [ladder]."""
        keys = {"d_model": "width", "n_experts": "n_experts", "n_tokens": "n_tokens"}
        rows = self.table[[name for name in keys if name in self.table]].to_dict("records")
        stated = (", ".join(f"{keys[name]} = {int(value)}" for name, value in row.items()) for row in rows)
        return tuple(f"{{ {of_stem}, branches = 1 }}," for of_stem in stated)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
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
        about, how = (
            [part for line in lines for part in fold(line, 2, margin=2)] for lines in (self._about, self._how)
        )
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
    """Choose the affordable runs that shrink the variance of the plan's forecast most; the arguments are those of `Study.next_runs`.

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
        **law_columns(fit, plan.model),
    )
    return NextStems(result=found, affordable_flops=affordable_flops, share=affordable_flops / plan.compute_flops)


def candidates(
    config: StudyConfig, fit: ScalingFit, plan: Plan, corpus: Corpus, *, affordable_flops: float
) -> pd.DataFrame:
    """Return runs that could join the ladder: d_model, n_params, n_tokens in whole batches, cost_flops.

    Under a law of experts they also have n_experts, one of the ladder's or the plan's, and the sparsity. Widths are at least the
    smallest fitted and at most the plan's. Lengths are at least the shortest fitted, since a shorter run is mostly warmup, and at
    most so many epochs that repeats hardly matter. Runs that the ladder (nearly) has would add nothing.
    """
    columns, family = law_columns(fit, plan.model), config.family
    spread = candidate_runs(
        fit, plan.n_params, plan.n_tokens, affordable_flops=affordable_flops, per_decade=_PER_DECADE, **columns
    )
    points = spread[["n_params", "n_tokens"]].drop_duplicates()
    mixtures = mixtures_of([*ladder_models(config), plan.model])
    families = [with_experts(family, n) for n in sorted(filter(None, mixtures))] if columns else [family]
    depths = (None, config.model.n_layers)  # the candidates have the base's depth
    stems = [(stem.of(family), stem) for stem in config.ladder.stems if stem.depth in depths]
    taken = [(model, length) for model, stem in stems for length in stem_lengths(stem)]
    shortest, longest = fit.n_tokens_range[0], most_tokens(corpus, MAX_EPOCHS, config.model.context_length)
    rows = []
    for members, (n_params, n_tokens) in product(families, points.itertuples(index=False)):
        model, length = members.for_params(n_params), plan.hyperparameters.whole_batches(n_tokens)
        if fit.one_size not in (None, model.n_params):  # a size of another depth than the base's
            continue
        cost = float(compute_flops(model.n_params, length))
        known = any(model == other and abs(math.log(length / tokens)) < _SAME for other, tokens in taken)
        if shortest <= length <= longest and cost <= affordable_flops and not known and _resolves(plan, length):
            taken.append((model, float(length)))
            of_experts = {"n_experts": getattr(model, "n_experts", None), **law_columns(fit, model)} if columns else {}
            sizes = {"d_model": model.d_model, "n_params": model.n_params, "n_tokens": length}
            rows.append({**sizes, "cost_flops": cost, **of_experts})
    types = {"d_model": np.int64, "n_params": np.int64, "n_tokens": np.int64, "cost_flops": np.float64}
    further = dict.fromkeys(("n_experts", *columns) if columns else ())
    return pd.DataFrame(rows, columns=[*types, *further]).astype(types)


def _resolves(plan: Plan, n_tokens: int) -> bool:
    """Whether the schedule's phases fit into so few tokens."""
    try:
        chain(plan.hyperparameters, n_tokens)
    except ValueError:
        return False
    return True
