"""[sweep]: one description of a search for all methods; senseless combinations are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from muscale.settings.strict import AllDiffer, StrictTable, broken
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import COOLING, ScheduleName
from proxy_models.recipes.stages import CHANGEABLE
from proxy_models.training.averaging import Tail
from search_spaces import Choice, LogUniform, Space, Uniform, mup_adamw

SearcherName = Literal["auto", "across_scales", "tpe", "gp", "cma_es", "quasi_random", "random", "grid"]
SchedulerName = Literal["asha", "pbt", "none"]
TUNE = "tune:"  # before the name of a class of Ray Tune's
TuneName = Annotated[str, Field(pattern=rf"^{TUNE}[A-Za-z_]\w*$")]
RankBy = Literal["averaged", "stable", "annealed", "mid_decay"]

POPULATIONS = ("pbt", "tune:PopulationBasedTraining", "tune:PB2")
MODELS = ("across_scales", "tpe", "gp", "cma_es")  # searchers that learn from losses
MIN_RUNG_RATIO = 1.25  # the averaged end of a rung (15 % of it) must not reach back over the rung before
MOST_RUNGS = 100  # generations too; at the smallest ratio the first rung has less than a billionth of the tokens
MOST_REDUCTION = 1000.0  # one trial in so many survives a rung (assumed)
DECAYING = ("linear", "cosine", "exponential", "step")


class SweepSettings(StrictTable):
    """[sweep]: the search at the base shape."""

    trials: PositiveInt  # all suggestions; under a population the members of the population
    n_tokens: PositiveInt  # tokens of a trial that is not stopped, including its cooldown
    # populations: quasi_random; others: across_scales with 5 runs of other scales, else tpe
    searcher: SearcherName | TuneName = "auto"
    scheduler: SchedulerName | TuneName = "asha"  # which trials go on at a rung, or are copied (populations)
    tune: Mapping[str, Any] = Field(default_factory=dict)  # arguments of Ray Tune's methods
    # lengths at which trials are compared; generations of a population
    rungs: Annotated[int, Field(ge=1, le=MOST_RUNGS)] = 4
    # ratio of tokens between rungs, and of trials to survivors
    reduction_factor: Annotated[float, Field(ge=MIN_RUNG_RATIO, le=MOST_REDUCTION)] = 2.0
    # weights whose loss ranks trials: "averaged" before a rung (at most 6 generations), "stable": the last, "annealed": after a
    # cooldown at every rung, "mid_decay": the last under a schedule that decays all the way
    rank_by: RankBy = "averaged"
    schedule: ScheduleName | None = None  # of the search, if it differs from the full run's
    top_k: PositiveInt = 3  # best trials of each rung, which get an annealed branch as those do that advance
    n_finalists: PositiveInt = 3  # trials with the best annealed losses, repeated over seeds
    n_seeds: NonNegativeInt = 3  # seeds of each finalist, all different from the search's
    # of a population's members that copy one of as many best members
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25  # pbt: probability of a fresh draw instead of a step
    cost_weight: NonNegativeFloat = 0.0  # the winner has the smallest log loss + cost_weight · log seconds of training
    max_tokens: PositiveInt | None = None  # the sweep stops before it would exceed any of these
    max_flops: PositiveFloat | None = None  # likewise
    max_device_hours: PositiveFloat | None = None  # likewise
    # other studies of the same corpus and family, or imported results
    learn_from: Annotated[tuple[str, ...], AllDiffer] = ()
    seed: NonNegativeInt = 0  # of suggestions, weights and data order
    grid_points: PositiveInt = 3  # values of each hyperparameter, for searcher = "grid"
    space: Space = Field(default_factory=mup_adamw)  # without init_scale if the study has initial_weights

    @property
    def is_population(self) -> bool:
        """Whether trials are members of a population, whose hyperparameters change during training."""
        return self.scheduler in POPULATIONS

    def cross_field_errors(self, h: Hyperparameters, rung_tokens: Sequence[int]) -> Iterator[str]:
        """Broken rules across keys, one per line.

        Args:
            h: The study's hyperparameters, with the schedule of the full run.
        """
        searched = self.schedule or h.schedule
        if searched not in (*COOLING, *DECAYING):
            yield (
                f"sweep.schedule: a search compares trials that end at the same length, under {', '.join((*COOLING, *DECAYING))}; "
                f'got "{searched}"'
            )
        yield from broken("sweep.schedule", lambda: replace(h, schedule=searched))
        for rank_by, schedules in (("stable", COOLING), ("annealed", COOLING), ("mid_decay", DECAYING)):
            if self.rank_by == rank_by and searched not in schedules:
                yield f'sweep.rank_by: "{rank_by}" is for schedule {" or ".join(schedules)}, got "{searched}"'
        yield from self._method_errors(searched)
        if self.is_population:
            yield from self._course_errors(h)
        if self.rank_by == "averaged":
            yield from self._average_errors(h, rung_tokens)

    def _course_errors(self, h: Hyperparameters) -> Iterator[str]:
        """Reasons why the full run can't follow a population's schedule."""
        if h.schedule not in COOLING:
            yield (
                f'sweep.scheduler: the schedule that "{self.scheduler}" finds is the full run\'s up to its cooldown: set '
                f'hyperparameters.schedule to "wsd" or "wsd_linear", got "{h.schedule}"'
            )
        if h.stages:
            stages = "; ".join(map(str, h.stages))
            yield f'hyperparameters.stages: "{self.scheduler}" finds the stages itself, so leave them out; got {stages}'

    def _average_errors(self, h: Hyperparameters, rung_tokens: Sequence[int]) -> Iterator[str]:
        """Reasons against ranking by averaged weights: an average must not span two stages."""
        cuts = rung_tokens if self.is_population else [h.whole_batches(s.after * rung_tokens[-1]) for s in h.stages]
        for rung in rung_tokens:
            begins = Tail().begins(rung, h.batch_tokens)
            if any(begins < cut < rung for cut in cuts):
                what = "generation" if self.is_population else "stage"
                remedy = f'rank_by "stable"{" or at most 6 rungs" if self.is_population else ""}'
                yield (
                    f"sweep.rank_by: the average at the rung of {rung} tokens begins at {begins}, before the last {what} "
                    f'begins: use {remedy}, got "averaged"'
                )
                return

    def _method_errors(self, schedule: ScheduleName) -> Iterator[str]:
        scheduler, searcher = self.scheduler, self.searcher
        kinds = [type(self.space[name]) for name in self.space.searched]
        if scheduler != "none" and self.rungs < 2:
            yield f'sweep.rungs: "{scheduler}" compares trials before their end, so it needs at least 2, got {self.rungs}'
        if searcher == "cma_es" and (len(kinds) < 2 or Choice in kinds):
            yield (
                'sweep.searcher: "cma_es" adapts a covariance, so it needs at least two hyperparameters and none of them a '
                f'choice; got {len(kinds)}, {kinds.count(Choice)} of them choices; "tpe" takes any'
            )
        if not self.is_population:
            return
        if searcher in ("grid", *MODELS) or searcher.startswith(TUNE):
            why = (
                "a grid's points do not change" if searcher == "grid" else "no losses are known when its members start"
            )
            yield f'sweep.searcher: a population can\'t start from "{searcher}": {why}; use "random" or "quasi_random"'
        if schedule not in COOLING:
            yield f'sweep.scheduler: "{scheduler}" finds the rate\'s schedule itself, from a constant rate: use schedule "wsd"'
        if self.rank_by == "annealed":
            yield f'sweep.rank_by: members of "{scheduler}" continue from the weights they are ranked by, so it can\'t be "annealed"'
        movable = changeable(self.space)
        if not movable:
            yield (
                f'sweep.space: "{scheduler}" needs a hyperparameter that can change during a run: one of '
                f"{', '.join(CHANGEABLE)}"
            )
        rough = [name for name in movable if not isinstance(self.space[name], Uniform | LogUniform)]
        if scheduler == "tune:PB2" and rough:
            yield f'sweep.space: "tune:PB2" changes only real numbers, got {", ".join(rough)}; "pbt" changes any'
        conditional = [name for name in movable if self.space[name].when] if scheduler.startswith(TUNE) else []
        if conditional:
            yield (
                f'sweep.space: "{scheduler}" changes every hyperparameter of every member, so {", ".join(conditional)} can\'t have a '
                '"when"; "pbt" knows conditions'
            )
        if self.trials < 2:
            yield f"sweep.trials: a population needs at least 2 members, got {self.trials}"


def changeable(space: Mapping[str, object]) -> Sequence[str]:
    """Hyperparameters of a space that may change during a run; the others come with the copied state."""
    return [name for name in space if name in CHANGEABLE]
