"""The use-case card: which sizes keep the limits of [use_case] and reach its targets, and the cheapest run that does.

    memory     bytes of all weights, within a share of the serving devices' memory (`scaling.MemoryLimit`)
    latency    bytes of the weights that a token reads, over the memory bandwidth of the serving devices
    days       6·N·D on the plan's devices
    targets    probability that the run reaches the target, one-sided, by the forecast of its loss or score

Latency is a lower bound, for one sequence at a time: decoding then reads every weight for each token. It counts neither the cache of
keys and values nor the devices' communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from muscale.errors import StageError
from muscale.formatting import fold
from muscale.plans.plan import Plan
from muscale.plans.score_forecasts import task_laws
from muscale.plans.sizing import planned_family
from muscale.proxies.ladder import law_columns
from muscale.settings.config import StudyConfig
from muscale.settings.use_case import LOSS, UseCaseSettings
from proxy_models.architecture.member import Member
from proxy_models.data.mixture import MAX_EPOCHS
from scaling import Budget, ScalingError, ScalingFit, TaskLaw, accelerator, compute_flops
from scaling.downstream.score_law import FAR_RATIO
from scaling.presentation import Result, number

Reaches: TypeAlias = Callable[[Member, float], float]
"""Probability that the run of a model on so many tokens reaches a target; NaN if its score has no forecast."""
REACH = 100.0
"""Factor below and above the plan's compute within which the cheapest run is searched."""
_PER_DECADE = 6  # budgets of the search; the first that reaches the targets is then refined
_HALVINGS = 8
_MOST_ROWS = 15  # sizes printed
SPAN = 30.0
"""Factor below and above the compute-optimal size within which sizes are compared."""
_APART = 1.1  # least ratio of neighbouring sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class UseCaseCard(Result):
    """Sizes against the limits and targets of a use case.

    Attributes:
        settings: [use_case] of the study file.
        compute_flops: training compute of each size in the table, that of the plan.
        sizes: a row for each size: width, depth, a mixture's n_experts, `meets_all`, `fails` (limits and targets that are not met),
            n_params, n_params_total, n_tokens, memory_gb, latency_ms, days, and a column "P(name)" for each target.
        cheapest: the run of least compute that meets all: the same columns, and compute_flops; None if no run does.
        binding: the target that is reached with the least probability by the cheapest run, or by the best run if no run meets
            all; or the limits that no size keeps.
        searched: least and largest compute of the search.
        doubts: why the forecast of the cheapest run is unsupported.
    """

    settings: UseCaseSettings
    compute_flops: float
    sizes: pd.DataFrame
    cheapest: Mapping[str, Any] | None
    binding: tuple[str, ...]
    searched: tuple[float, float]
    doubts: tuple[str, ...]

    @property
    def shown(self) -> pd.DataFrame:
        """The table for reading: evenly spaced rows if it is long, without unknown columns, probabilities to three digits."""
        rows = np.unique(np.linspace(0, len(self.sizes) - 1, min(len(self.sizes), _MOST_ROWS)).round().astype(int))
        table = self.sizes.iloc[rows].dropna(axis=1, how="all")
        words = np.where(table["meets_all"], "yes", "no")
        return table.round({name: 3 for name in table if name.startswith("P(")}).assign(meets_all=words)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "compute_flops": self.compute_flops,
            "probability": self.settings.probability,
            "targets": dict(self.settings.targets),
            "sizes": self.sizes.to_dict("records"),
            "cheapest": dict(self.cheapest) if self.cheapest else None,
            "binding": list(self.binding),
            "searched": list(self.searched),
            "doubts": list(self.doubts),
        }

    @property
    def conclusion(self) -> str:
        """The cheapest run and what binds it."""
        binding, wanted = " and ".join(self.binding), f"{self.settings.probability:.0%}"
        if self.cheapest is None:
            low, high = self.searched
            tried = f"no run of {low:.3g} to {high:.3g} FLOPs"
            return f"{tried} is within all limits and reaches all targets with {wanted}: limited by {binding}"
        run = self.cheapest
        days = "" if math.isnan(run["days"]) else f", {run['days']:.3g} days"
        experts = f", {run['n_experts']} experts" if "n_experts" in run else ""
        return (
            f"cheapest run within all limits that reaches all targets with {wanted}: width {run['width']}, depth {run['depth']}"
            f"{experts}, N = {run['n_params']:,}, D = {run['n_tokens']:,} tokens, {run['compute_flops']:.3g} FLOPs{days}; limited by "
            f"{binding}"
        )

    def __str__(self) -> str:
        formats = dict.fromkeys(("n_params", "n_params_total", "n_tokens"), "{:,}".format)
        table = self.shown.to_string(
            index=False, formatters=formats, float_format=lambda value: number(value, ".3g")
        ).splitlines()
        doubts = [f"outside declared support: {doubt}" for doubt in self.doubts]
        about = [part for line in (self.conclusion, *doubts) for part in fold(line, 2, margin=2)]
        return "\n  ".join([f"use case at {self.compute_flops:.3g} FLOPs of training", *table, *about])


def card_of(config: StudyConfig, fit: ScalingFit, plan: Plan, ladder: pd.DataFrame | None = None) -> UseCaseCard | None:
    """Return the card of a plan; None without [use_case].

    Args:
        ladder: Scores of the ladder's runs, as `ladder_scores` returns them; only targets of scores need any.
    """
    if config.use_case is None:
        return None
    family, wanted, unique = planned_family(config), plan.wanted_n_params, plan.decision["unique_tokens"]
    named = [plan.model] if fit.one_size else [shape.of(family) for shape in config.plan.shapes]

    def doubts(size: Member, n_tokens: float) -> tuple[str, ...]:
        repeated = unique is not None and n_tokens > MAX_EPOCHS * unique
        epochs = (f"{n_tokens / unique:.3g} epochs over the corpus",) if repeated else ()
        return (*fit.unsupported_reasons(size.n_params, n_tokens, **law_columns(fit, size)), *epochs)

    return use_case_card(
        config.use_case,
        named or _apart([*family.between(wanted / SPAN, wanted * SPAN)], plan.model),
        replace(config.plan.budget, compute_flops=plan.compute_flops, terms=""),
        _targets(config, fit, plan, ladder),
        doubts,
    )


def _targets(config: StudyConfig, fit: ScalingFit, plan: Plan, ladder: pd.DataFrame | None) -> dict[str, Reaches]:
    """Return the probability of each target of [use_case]."""
    wanted = dict(config.use_case.targets) if config.use_case else {}
    found = {LOSS: loss_target(fit, plan, wanted.pop(LOSS))} if LOSS in wanted else {}
    if not wanted:
        return found
    settings = config.scores
    laws = {}
    if settings is not None and ladder is not None:
        laws = {f"{task}.{metric}": law for task, metric, law in task_laws(ladder, plan, settings, wanted)}
    for name, target in wanted.items():
        if name not in laws:
            raise StageError(
                f"use_case.targets: must be a score of the ladder's runs, got {name}; `muscale evaluate` measures them"
            )
        found[name] = partial(_reached, laws[name], target, _ratios(ladder))
    return found


def loss_target(fit: ScalingFit, plan: Plan, target: float) -> Reaches:
    """Return the probability that a run's loss is at most the target.

    A batch that differs from the proxies' counts as in the plan's interval: by its largest possible effect.
    """
    least = target / (math.exp(plan.batch.effect) if plan.batch else 1.0)
    return lambda size, n_tokens: fit.forecast(size.n_params, n_tokens, **law_columns(fit, size)).probability(least)


def _ratios(ladder: pd.DataFrame | None) -> tuple[float, float]:
    """Range of D/N in which the laws of scores are used: that of the ladder's runs, and `FAR_RATIO` times beyond."""
    if ladder is None or ladder.empty:
        return 0.0, math.inf
    ratio = ladder["n_tokens"] / ladder["n_params"]
    return float(ratio.min()) / FAR_RATIO, float(ratio.max()) * FAR_RATIO


def _reached(law: TaskLaw | str, target: float, ratios: tuple[float, float], size: Member, n_tokens: float) -> float:
    """Probability that a score reaches its target; NaN if it has no forecast there."""
    if isinstance(law, str) or not ratios[0] <= n_tokens / size.n_params <= ratios[1]:
        return math.nan
    try:
        return law.probability(size.n_params, n_tokens, target)
    except ScalingError:
        return math.nan


def use_case_card(
    settings: UseCaseSettings,
    sizes: Sequence[Member],
    budget: Budget,
    targets: Mapping[str, Reaches],
    doubts: Callable[[Member, float], tuple[str, ...]] = lambda size, n_tokens: (),
) -> UseCaseCard:
    """Compare sizes with a use case.

    Args:
        budget: compute of training in the table, with the devices that train.
        targets: the probability of each target.
        doubts: why the forecast of a model on so many tokens is unsupported.
    """
    case = _Case(settings, budget, targets)
    able = [size for size in sizes if not case.broken(size)]
    best = case.best(able)
    cheapest = None if best is None else {"compute_flops": best[1], **case.row(*best)}
    return UseCaseCard(
        settings=settings,
        compute_flops=budget.compute_flops,
        sizes=pd.DataFrame([case.row(size, budget.compute_flops) for size in sizes]),
        cheapest=cheapest,
        binding=case.binding(cheapest, sizes, able),
        searched=case.searched,
        doubts=doubts(best[0], _tokens(*best)) if best else (),
    )


@dataclass(frozen=True, eq=False)
class _Case:
    """A use case with the devices that train and the probabilities of its targets."""

    settings: UseCaseSettings
    budget: Budget
    targets: Mapping[str, Reaches]

    def days(self, flops: float) -> float:
        days = replace(self.budget, compute_flops=flops).days
        return math.nan if days is None else days

    @cached_property
    def latest(self) -> float:
        """Compute that the deadline allows."""
        deadline = self.settings.deadline_days
        return math.inf if deadline is None else deadline / self.days(1.0)

    @cached_property
    def searched(self) -> tuple[float, float]:
        most = min(self.budget.compute_flops * REACH, self.latest)
        return min(self.budget.compute_flops, most) / REACH, most

    def latency_ms(self, size: Member) -> float:
        """Milliseconds in which a token's weights are read; NaN without a serving device."""
        s = self.settings
        if s.serving_device is None:
            return math.nan
        return 1e3 * accelerator(s.serving_device).read_seconds(size.n_params * s.serving_bits / 8, s.serving_devices)

    def broken(self, size: Member) -> list[str]:
        """The limits that a size breaks whatever its training."""
        s, memory = self.settings, self.settings.memory
        limits = {
            "max_params": s.max_params is not None and size.n_params_total > s.max_params,
            "memory": memory is not None and size.n_params_total > memory.max_params,
            "latency": s.latency_ms_per_token is not None and self.latency_ms(size) > s.latency_ms_per_token,
        }
        return [name for name, is_broken in limits.items() if is_broken]

    def probabilities(self, size: Member, flops: float) -> dict[str, float]:
        return {name: reached(size, _tokens(size, flops)) for name, reached in self.targets.items()}

    def row(self, size: Member, flops: float) -> dict[str, Any]:
        """A row of `UseCaseCard.sizes`."""
        chances = self.probabilities(size, flops)
        fails = self.broken(size) + (["deadline"] if flops > self.latest * (1 + 1e-9) else [])
        fails += [name for name, chance in chances.items() if not chance >= self.settings.probability]
        return {
            "width": size.d_model,
            "depth": size.n_layers,
            **({"n_experts": experts} if (experts := getattr(size, "n_experts", None)) else {}),
            "meets_all": not fails,
            "fails": ", ".join(fails),
            "n_params": size.n_params,
            "n_params_total": size.n_params_total,
            "n_tokens": round(_tokens(size, flops)),
            "memory_gb": size.n_params_total * self.settings.serving_bits / 8e9,
            "latency_ms": self.latency_ms(size),
            "days": self.days(flops),
            **{f"P({name})": chance for name, chance in chances.items()},
        }

    def best(self, sizes: Sequence[Member]) -> tuple[Member, float] | None:
        """The size and the compute of the cheapest run that reaches all targets; None if no run does."""
        best: tuple[Member, float] | None = None
        for size in sizes:
            if (flops := self.least(size, best[1] if best else self.searched[1])) is not None:
                best = size, flops
        return best

    def least(self, size: Member, most: float) -> float | None:
        """The least compute, at most `most`, with which a size reaches all targets; None if it does not."""

        def reached(flops: float) -> bool:
            return all(chance >= self.settings.probability for chance in self.probabilities(size, flops).values())

        n_steps = math.ceil(_PER_DECADE * math.log10(most / self.searched[0]))
        budgets = np.geomspace(self.searched[0], most, n_steps + 1)
        first = next((i for i, flops in enumerate(budgets) if reached(float(flops))), None)
        if not first:
            return None if first is None else float(budgets[0])
        low, high = map(float, budgets[first - 1 : first + 1])
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high

    def binding(
        self, cheapest: Mapping[str, Any] | None, sizes: Sequence[Member], able: Sequence[Member]
    ) -> tuple[str, ...]:
        """Return `UseCaseCard.binding`."""
        if cheapest is not None:
            return (min(self.targets, key=lambda name: cheapest[f"P({name})"]),)
        if not able:
            broken = [set(self.broken(size)) for size in sizes]
            by_all = set.intersection(*broken) or set.union(*broken)
            return tuple(name for name in ("max_params", "memory", "latency") if name in by_all)
        most = self.searched[1]
        of_best = max((self.probabilities(size, most) for size in able), key=lambda each: min(each.values()))
        return (min(of_best, key=of_best.__getitem__), *(("deadline",) if most == self.latest else ()))


def _tokens(size: Member, flops: float) -> float:
    return flops / float(compute_flops(size.n_params, 1.0))


def _apart(sizes: Sequence[Member], always: Member) -> list[Member]:
    """Sizes that differ by a factor of `_APART` at least, the smallest first, and the one that is always there."""
    kept: list[Member] = []
    for size in sizes:
        if not kept or size.n_params >= _APART * kept[-1].n_params:
            kept.append(size)
    return sorted({*kept, always}, key=lambda size: size.n_params)
