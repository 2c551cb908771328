"""Training that continues from the state of another run: its recipe, and a schedule that counts tokens from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.schedule import COOLING, Cooldown, LinearCooldown, Phase
from proxy_models.recipes.segments import Segment, branch, single_phase

ContinuedSchedule = Literal["wsd", "wsd_linear", "constant", "linear", "cosine"]
"""Schedules that need only a warmup, a cooldown fraction or a final fraction."""


def continued(
    before: Recipe,
    n_tokens: int,
    *,
    learning_rate: float,
    rewarm_tokens: int = 0,
    schedule: ContinuedSchedule = "wsd",
    cooldown_fraction: float = 0.15,
    final_fraction: float = 0.1,
    optimizer: OptimizerName | None = None,
) -> tuple[Segment, ...]:
    """Return the segments, counted from 0, of a continuation of `n_tokens` that starts from a run's state.

    The rate rises linearly from zero to its peak over `rewarm_tokens` (re-warming: Gupta et al., arXiv 2308.04014; Ibrahim et
    al., arXiv 2403.08763, section 4), then follows the schedule. A continuation that is only cooldown is a branch of the run
    (Hägele et al., arXiv 2405.18392). The product of rate and decay stays the same, and so does the decay's timescale in tokens.

    Args:
        before: Recipe of the run's last step.
        n_tokens: Length, rounded to whole batches; at least one batch.
        learning_rate: Peak rate at the base shape.
        rewarm_tokens: Length of the re-warming, rounded to whole batches.
        cooldown_fraction: Share of the continuation that cools down to zero, under "wsd" and "wsd_linear"; 1: all of it.
        final_fraction: Factor on the rate at the end of "cosine".
        optimizer: Optimizer that takes over with new moments; None: the run's optimizer with its moments.

    Raises:
        ValueError: If no tokens remain for the schedule after the re-warming.
    """
    batch = before.batch_tokens
    n_tokens = max(1, round(n_tokens / batch)) * batch
    warmup = round(rewarm_tokens / batch) * batch
    swapped = optimizer is not None and optimizer != before.optimizer
    if swapped or learning_rate != before.learning_rate:
        before = before.swapped(optimizer or before.optimizer, learning_rate)
    recipe = replace(before, warmup_tokens=warmup, batch_doublings=0, batch_ramp_tokens=0)
    cooldown = min(max(1, round(n_tokens * cooldown_fraction / batch)) * batch, n_tokens) if schedule in COOLING else 0
    stable = n_tokens - cooldown
    if warmup and warmup >= (stable if cooldown else n_tokens):
        raise ValueError(
            f"a re-warming of {warmup} tokens does not fit into the {stable} tokens before the cooldown "
            f"of a continuation of {n_tokens}"
        )
    if cooldown and stable:
        return branch(recipe, stable, n_tokens, schedule)
    phase: Phase
    match schedule:
        case "wsd":
            phase = Cooldown(start=0, end=n_tokens)
        case "wsd_linear":
            phase = LinearCooldown(start=0, end=n_tokens)
        case _:
            phase = single_phase(schedule, warmup_tokens=warmup, end=n_tokens, final_fraction=final_fraction)
    return (Segment(recipe=recipe, phase=phase, start=0, end=n_tokens),)
