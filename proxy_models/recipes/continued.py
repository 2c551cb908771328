"""Training that continues from the state of another run: its recipes, and a schedule that counts tokens from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.schedule import (
    COOLING,
    Constant,
    Cooldown,
    CosineDecay,
    LinearCooldown,
    LinearDecay,
    Phase,
    Shifted,
)
from proxy_models.recipes.segments import Segment

ContinuedSchedule = Literal["wsd", "wsd_linear", "constant", "linear", "cosine"]
"""Schedules that need only a warmup, a cooldown fraction or a final fraction."""
REPLACED = ("beta1", "beta2", "eps", "clip_norm", "embedding_rate", "output_rate")
"""Values that an amendment replaces in every recipe, without an effect on the others."""


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
    recipe = amended_recipe(before, {"learning_rate": learning_rate, "optimizer": optimizer or before.optimizer})
    batch = recipe.batch_tokens
    length = _whole(n_tokens, batch)
    return _new_schedule(
        recipe,
        schedule,
        length,
        cooldown=length * cooldown_fraction,
        final_fraction=final_fraction,
        warmup=round(rewarm_tokens / batch) * batch,
    )


def amended(
    segments: Sequence[Segment],
    after: int,
    values: Mapping[str, Any],
    *,
    n_tokens: int | None = None,
    before: int = 0,
) -> tuple[Segment, ...]:
    """Return the segments, counted from 0, of a run that branches off after `after` tokens of a run with these segments.

    Without `schedule`, `cooldown_fraction`, `final_fraction` and `n_tokens` it follows the rest of the parent's schedule. With any
    of them it follows a schedule of that kind, which begins at the factor that the parent's rate had, or with `rewarm_tokens`
    at the peak.

    Args:
        segments: Segments of the parent.
        after: Tokens of the parent at which the run branches off.
        values: Changed values: those of `amended_recipe`, and `schedule`, `cooldown_fraction` (the share of `n_tokens` that
            cools down), `final_fraction` and `rewarm_tokens`.
        n_tokens: Length of the whole run, with `before` and `after`; None: the parent's.
        before: Tokens trained before the parent's token 0.

    Raises:
        ValueError: Naming the key, if no tokens remain for a ramp or a warmup, the parent's schedule can't be changed there, or a
            value is not one of the schedule's.
    """
    total = before + segments[-1].end if n_tokens is None else n_tokens
    if total <= before + after:
        raise ValueError(f"n_tokens: must be more than the {before + after} tokens at the checkpoint, got {total}")
    rest = [segment for segment in segments if segment.end > after] or [segments[-1]]
    if "learning_rate" in values:  # later stages of the parent have other rates
        factor = values["learning_rate"] / rest[0].recipe.learning_rate
        values = {name: value for name, value in values.items() if name != "learning_rate"} | {
            "learning_rate_factor": factor
        }
    recipes = [amended_recipe(segment.recipe, values, total) for segment in rest]
    batch, rewarm = recipes[0].batch_tokens, values.get("rewarm_tokens", 0)
    length, warmup = _whole(total - before - after, batch), _whole(rewarm, batch) if rewarm else 0
    for name, needed in (("rewarm_tokens", warmup), ("batch_ramp_tokens", recipes[0].batch_ramp_tokens)):
        if needed >= length:
            raise ValueError(f"{name}: must be less than the {length} tokens that remain, got {needed}")
    if n_tokens is None and not values.keys() & {"schedule", "cooldown_fraction", "final_fraction"}:
        ends = [*(_whole(segment.end - after, batch) for segment in rest[:-1]), length]
        parts = zip(rest, recipes, [0, *ends], ends, strict=False)
        return tuple(
            Segment(
                recipe=replace(recipe, warmup_tokens=warmup),
                phase=_rest(segment.phase, after, warmup),
                start=start,
                end=end,
            )
            for segment, recipe, start, end in parts
            if end > start
        )
    if len({replace(segment.recipe, warmup_tokens=0) for segment in rest}) > 1:
        raise ValueError(
            f"schedule: schedule and length can't change before the parent's hyperparameters do, at {rest[1].start} tokens; "
            "branch off after that, or change other values only"
        )
    if after < rest[0].recipe.warmup_tokens and not warmup:
        raise ValueError(
            f"rewarm_tokens: must be set to change schedule or length before the parent's warmup ends, at "
            f"{rest[0].recipe.warmup_tokens} tokens, got none after {after}"
        )
    schedule, share, final = _inherited(segments, before, values)
    scale = 1.0 if warmup else rest[0].phase.factor(after, batch)
    if scale <= 0:
        raise ValueError(
            f"rewarm_tokens: must be set, as the parent's rate is 0 after {after} tokens; or branch off an earlier checkpoint"
        )
    return _new_schedule(
        recipes[0], schedule, length, cooldown=share * total, final_fraction=final, warmup=warmup, scale=scale
    )


def _rest(phase: Phase, after: int, warmup: int) -> Phase:
    """The phase from `after` tokens on, after a warmup."""
    if isinstance(phase, Shifted) and after >= phase.warmup_tokens:
        return replace(phase, tokens=phase.tokens + after, warmup_tokens=warmup)
    return Shifted(phase=phase, tokens=after, warmup_tokens=warmup)


def amended_recipe(recipe: Recipe, values: Mapping[str, Any], n_tokens: int | None = None) -> Recipe:
    """Return a recipe with changed values, without a batch ramp unless `values` has one.

    The decay's timescale in tokens, batch / (rate · decay), stays the same when the rate or the batch changes, unless
    `weight_decay_tau` sets it (Wang and Aitchison, arXiv 2405.13698). The moments of the optimizer stay.

    Args:
        values: `learning_rate`, or `learning_rate_factor` on the recipe's own; `batch_tokens`, `batch_doublings`,
            `batch_ramp_tokens`, `optimizer`, `weight_decay_tau` and the names of `REPLACED`; others are ignored.
        n_tokens: Length of the run of which `weight_decay_tau` is a share.
    """
    rate = values.get("learning_rate", recipe.learning_rate * values.get("learning_rate_factor", 1.0))
    batch = values.get("batch_tokens", recipe.batch_tokens)
    decay = recipe.weight_decay
    if rate != recipe.learning_rate or batch != recipe.batch_tokens:
        decay = decay * recipe.learning_rate / rate * (batch / recipe.batch_tokens)
    if (tau := values.get("weight_decay_tau")) is not None and n_tokens:
        decay = batch / (rate * tau * n_tokens)
    return replace(
        recipe,
        learning_rate=rate,
        weight_decay=decay,
        batch_tokens=batch,
        batch_doublings=values.get("batch_doublings", 0),
        batch_ramp_tokens=values.get("batch_ramp_tokens", 0),
        optimizer=values.get("optimizer", recipe.optimizer),
        **{name: values[name] for name in REPLACED if name in values},
    )


def _inherited(
    segments: Sequence[Segment], before: int, values: Mapping[str, Any]
) -> tuple[ContinuedSchedule, float, float]:
    """Return schedule, cooldown's share of the run and final fraction, as stated or as the run's segments have them."""
    phase, scale = segments[-1].phase, 1.0
    while isinstance(phase, Shifted):
        scale *= phase.scale
        phase = phase.phase
    found: ContinuedSchedule | None = None
    share, final = 0.15, 0.1
    match phase:
        case Cooldown():
            found = "wsd"
        case LinearCooldown(start_factor=1.0):
            found = "wsd_linear"
        case Constant():
            found = "constant"
        case LinearDecay():
            found = "linear"
        case CosineDecay():
            found, final = "cosine", scale * phase.final_fraction
    if isinstance(phase, Cooldown | LinearCooldown):
        share = (phase.end - phase.start) / (before + segments[-1].end)
    if (schedule := values.get("schedule", found)) is None:
        raise ValueError(
            f"schedule: must be stated, one of wsd, wsd_linear, constant, linear, cosine, because the rest of the parent's "
            f"{type(phase).__name__} can't be changed"
        )
    for name, readers in (("cooldown_fraction", COOLING), ("final_fraction", ("cosine",))):
        if name in values and schedule not in readers:
            raise ValueError(f"{name}: is for schedule {' and '.join(readers)}, got {values[name]} with {schedule}")
    return schedule, values.get("cooldown_fraction", share), values.get("final_fraction", final)


def _new_schedule(
    recipe: Recipe,
    schedule: ContinuedSchedule,
    length: int,
    *,
    cooldown: float,
    final_fraction: float,
    warmup: int,
    scale: float = 1.0,
) -> tuple[Segment, ...]:
    """Return the segments of a schedule that begins at `scale` times the peak rate, with `cooldown` tokens at its end if it cools."""
    cooldown_tokens = min(_whole(cooldown, recipe.batch_tokens), length) if schedule in COOLING else 0
    stable = length - cooldown_tokens
    if warmup and warmup >= (stable if cooldown_tokens else length):
        raise ValueError(
            f"rewarm_tokens: {warmup} tokens don't fit into the {stable} tokens before the cooldown, of {length} in all"
        )
    recipe = replace(recipe, warmup_tokens=warmup)

    def segment(phase: Phase, start: int, end: int) -> Segment:
        return Segment(
            recipe=recipe, phase=phase if scale == 1 else Shifted(phase=phase, scale=scale), start=start, end=end
        )

    if cooldown_tokens:
        kind = Cooldown if schedule == "wsd" else LinearCooldown
        cooling = segment(kind(start=stable, end=length), stable, length)
        return (segment(Constant(warmup_tokens=warmup), 0, stable), cooling) if stable else (cooling,)
    phase: Phase
    match schedule:
        case "linear":
            phase = LinearDecay(warmup_tokens=warmup, end=length)
        case "cosine":
            if final_fraction >= scale:
                raise ValueError(
                    f"final_fraction: must be below {scale:.3g}, the factor on the rate at the checkpoint, got {final_fraction}"
                )
            phase = CosineDecay(warmup_tokens=warmup, end=length, final_fraction=final_fraction / scale)
        case _:
            phase = Constant(warmup_tokens=warmup)
    return (segment(phase, 0, length),)


def _whole(tokens: float, batch: int) -> int:
    """Round to whole batches, at least one."""
    return max(1, round(tokens / batch)) * batch
