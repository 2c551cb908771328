"""Segments of a run: hyperparameters and a length become recipes, phases and token positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.schedule import (
    Constant,
    Cooldown,
    CosineCycle,
    CosineDecay,
    ExponentialDecay,
    InverseSqrt,
    LinearCooldown,
    LinearDecay,
    Phase,
    Rewarmed,
    ScheduleName,
    StepDecay,
)
from proxy_models.serialization import Serializable


@dataclass(frozen=True, kw_only=True)
class Segment(Serializable):
    """Training from `start` to `end` tokens under one recipe and one phase of the schedule."""

    recipe: Recipe
    phase: Phase
    start: int
    end: int

    def __post_init__(self) -> None:
        ramp = self.recipe.ramp
        if not 0 <= self.start < self.end or not all(map(ramp.ends_step, (self.start, self.end))):
            ramped = f" (smaller ones within the ramp's first {ramp.ramp_tokens} tokens)" if ramp.doublings else ""
            raise ValueError(
                f"a segment runs over whole batches of {ramp.batch_tokens} tokens{ramped} from start to a later end, "
                f"got {self.start} to {self.end}"
            )

    @property
    def n_steps(self) -> int:
        return self.recipe.ramp.n_steps(self.end) - self.recipe.ramp.n_steps(self.start)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Return (tokens seen before, tokens of the step) for each step."""
        return self.recipe.ramp.steps(self.start, self.end)

    @property
    def begins_with_swap(self) -> bool:
        """True if the optimizer of this segment's recipe takes over from another optimizer at its start."""
        return isinstance(self.phase, Rewarmed) and self.phase.start == self.start

    def rate_factor(self, tokens: int) -> float:
        """Return the schedule's factor, without muP's, on every rate in the step that starts after `tokens` tokens of the run."""
        return self.phase.factor(tokens, self.recipe.ramp.batch_at(tokens))


def stem(recipe: Recipe, stable_tokens: int) -> Segment:
    """Return the warmup and constant phase of a WSD run, up to `stable_tokens`."""
    return Segment(recipe=recipe, phase=Constant(warmup_tokens=recipe.warmup_tokens), start=0, end=stable_tokens)


def branch(
    recipe: Recipe, stable_tokens: int, n_tokens: int, schedule: ScheduleName = "wsd"
) -> tuple[Segment, Segment]:
    """Return a run that cools down to zero: the run before cooldown to `stable_tokens`, then the cooldown to `n_tokens`.

    Raises:
        ValueError: If the schedule has no cooldown.
    """
    start = stem(recipe, stable_tokens)
    cooldown: Phase
    if schedule == "wsd":
        cooldown = Cooldown(start=stable_tokens, end=n_tokens)
    elif schedule == "wsd_linear":
        cooldown = LinearCooldown(start=stable_tokens, end=n_tokens)
    elif schedule == "inverse_sqrt":
        decaying = InverseSqrt(warmup_tokens=recipe.warmup_tokens)
        reached = decaying.factor(stable_tokens, recipe.batch_tokens)
        start = Segment(recipe=recipe, phase=decaying, start=0, end=stable_tokens)
        cooldown = LinearCooldown(start=stable_tokens, end=n_tokens, start_factor=reached)
    else:
        raise ValueError(f'a run is branched under "wsd", "wsd_linear" or "inverse_sqrt", got "{schedule}"')
    return start, Segment(recipe=recipe, phase=cooldown, start=stable_tokens, end=n_tokens)


def staged_branch(h: Hyperparameters, stable_tokens: int, n_tokens: int, *, tuned_at: int) -> tuple[Segment, ...]:
    """Return a run that cools down from `stable_tokens`, one segment per stage; warmup and decay as in a run of `tuned_at`.

    Raises:
        ValueError: If the schedule has no cooldown, or the run is too short for its warmup, batch ramp or stages.
    """
    recipes = [one.resolve(tuned_at) for one in h.stretches]
    start, cooldown = branch(recipes[0], stable_tokens, n_tokens, h.schedule)
    cuts = [0, *(h.whole_batches(stage.after * stable_tokens) for stage in h.stages), stable_tokens]
    if any(end <= begin for begin, end in pairwise(cuts)):
        raise ValueError(
            f"stages: {stable_tokens} tokens before the cooldown are too few for stages that would begin after "
            f"{', '.join(map(str, cuts[1:-1]))} tokens"
        )
    stretches = zip(recipes, pairwise(cuts), strict=True)
    stable = (replace(start, recipe=recipe, start=begin, end=end) for recipe, (begin, end) in stretches)
    return (*stable, replace(cooldown, recipe=recipes[-1]))


def chain(hyperparameters: Hyperparameters, n_tokens: int) -> tuple[Segment, ...]:
    """Return the segments of a run of `n_tokens` (whole batches) to its end, annealed unless the schedule is "constant".

    Raises:
        ValueError: If the run is too short for its warmup, batch ramp, stages and cooldown, a cycle is too short for its warmup,
            or a part before or after a swap of the optimizer is too short for its warmup.
    """
    h = hyperparameters
    segments = _scheduled(h, n_tokens)
    if h.swap_optimizer is None:
        return segments
    recipe = segments[0].recipe.swapped(h.swap_optimizer, h.swap_learning_rate)
    return _swapped(segments, recipe, h.whole_batches(n_tokens * h.swap_fraction))


def _scheduled(h: Hyperparameters, n_tokens: int) -> tuple[Segment, ...]:
    """Return the segments of the run under its first optimizer."""
    recipe = h.resolve(n_tokens)
    warmup, final_fraction = recipe.warmup_tokens, h.final_fraction
    phase: Phase
    match h.schedule:
        case "wsd" | "wsd_linear" | "inverse_sqrt":
            return staged_branch(h, h.stable_tokens(n_tokens), n_tokens, tuned_at=n_tokens)
        case "cosine_cycles":
            return _cycles(recipe, n_tokens, h.cycles, final_fraction)
        case "constant" | "linear" | "cosine" | "exponential":
            phase = single_phase(h.schedule, warmup_tokens=warmup, end=n_tokens, final_fraction=final_fraction)
        case "step":
            milestones = tuple(h.whole_batches(n_tokens * share) for share in h.milestones)
            phase = StepDecay(warmup_tokens=warmup, end=n_tokens, milestones=milestones, step_factor=h.step_factor)
    return (Segment(recipe=recipe, phase=phase, start=0, end=n_tokens),)


def single_phase(
    schedule: Literal["constant", "linear", "cosine", "exponential"],
    *,
    warmup_tokens: int,
    end: int,
    final_fraction: float,
) -> Phase:
    """Return the single phase of a run that ends at `end` tokens; only "cosine" and "exponential" read `final_fraction`."""
    match schedule:
        case "constant":
            return Constant(warmup_tokens=warmup_tokens)
        case "linear":
            return LinearDecay(warmup_tokens=warmup_tokens, end=end)
        case "cosine":
            return CosineDecay(warmup_tokens=warmup_tokens, end=end, final_fraction=final_fraction)
        case "exponential":
            return ExponentialDecay(warmup_tokens=warmup_tokens, end=end, final_fraction=final_fraction)


def _cycles(recipe: Recipe, n_tokens: int, cycles: int, final_fraction: float) -> tuple[Segment, ...]:
    """Return equal cycles in whole batches; each cycle after the first warms up from the final fraction."""
    batch = recipe.batch_tokens
    if cycles > n_tokens // batch:
        raise ValueError(f"{n_tokens // batch} batches are too few for {cycles} cycles")
    ends = [n_tokens * number // cycles // batch * batch for number in range(cycles + 1)]
    shortest = min(end - start for start, end in pairwise(ends))
    if recipe.warmup_tokens >= shortest:
        raise ValueError(
            f"a warmup of {recipe.warmup_tokens} tokens does not fit into a cycle of {shortest}: lower warmup_fraction or cycles"
        )
    return tuple(
        Segment(
            recipe=recipe,
            phase=CosineCycle(
                start=start,
                end=end,
                warmup_tokens=recipe.warmup_tokens,
                start_factor=final_fraction if start else 0.0,
                final_fraction=final_fraction,
            ),
            start=start,
            end=end,
        )
        for start, end in pairwise(ends)
    )


def _swapped(segments: tuple[Segment, ...], recipe: Recipe, swap: int) -> tuple[Segment, ...]:
    """Cut the run after `swap` tokens, and give the rest another optimizer's recipe."""
    n_tokens, warmup = segments[-1].end, recipe.warmup_tokens
    if not warmup <= swap < n_tokens - warmup:
        raise ValueError(
            f"a swap after {swap} tokens leaves a warmup of {warmup} no room before or after it in a run of {n_tokens}: "
            "change swap_fraction"
        )
    before = [replace(segment, end=min(segment.end, swap)) for segment in segments if segment.start < swap]
    after = [
        replace(
            segment,
            recipe=recipe,
            phase=Rewarmed(phase=segment.phase, start=swap, warmup_tokens=warmup),
            start=max(segment.start, swap),
        )
        for segment in segments
        if segment.end > swap
    ]
    return (*before, *after)
