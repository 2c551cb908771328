"""The job of a segment as its program gets it: absolute values at the program's shape, and the schedule as points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from muscale.programs.protocol import TrainerJob
from proxy_models.architecture.parametrization import ForwardMultipliers, Parametrization, TensorClass
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initial_std, multipliers_of, rate_decay_eps

_MOST_POINTS = 1024  # largest number of points of a segment's schedule
_STRAIGHT = 1e-9  # in units of the factor: points this near to the line between their neighbours are left out


def job_of(numerics: Numerics, segments: Sequence[Segment]) -> TrainerJob:
    """The job that trains consecutive segments under one recipe; raises ValueError if the recipe changes among the segments."""
    first, last = segments[0], segments[-1]
    if any(segment.recipe != first.recipe for segment in segments):
        raise ValueError("a trainer's job has one recipe, got several: train each segment as a separate job")
    table = numerics.parametrization(first.recipe.optimizer)
    multipliers = multipliers_of(table, first.recipe)
    return TrainerJob(
        width=numerics.model.d_model,
        depth=numerics.model.n_layers,
        hyperparameters={
            **asdict(first.recipe),
            "embedding_multiplier": multipliers.embedding,
            "branch_multiplier": multipliers.branch,
            "output_multiplier": multipliers.readout,
            "attention_multiplier": multipliers.attention,
        },
        tensors={name: _values(name, table, multipliers, first.recipe) for name in table.rules},
        schedule=_straightened([point for segment in segments for point in _points(segment)]),
        start=first.start,
        end=last.end,
        seed=numerics.seed,
    )


def _values(name: str, table: Parametrization, multipliers: ForwardMultipliers, recipe: Recipe) -> dict[str, Any]:
    rule = table.rules[name]
    rate, decay, eps = rate_decay_eps(rule, recipe, table.optimizer)
    own = {TensorClass.EMBEDDING: multipliers.embedding, TensorClass.READOUT: multipliers.readout}
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "eps": eps,
        "init_mean": rule.init_mean,
        "init_std": initial_std(rule, recipe),
        "multiplier": own.get(rule.tensor_class, 1.0),
    }


def _points(segment: Segment) -> list[tuple[int, float]]:
    """(tokens, factor) at steps, evenly chosen if the segment has too many, and at the end of the segment."""
    starts = [tokens for tokens, _ in segment.steps()]
    kept = sorted({round(at) for at in np.linspace(0, len(starts) - 1, min(len(starts), _MOST_POINTS))})
    found = [(starts[number], segment.rate_factor(starts[number])) for number in kept]
    return [*found, (segment.end, segment.rate_factor(segment.end))]


def _straightened(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Drop points on the line between their neighbours; of two points at the same tokens keep the later."""
    found = list(dict(points).items())
    kept = found[:1]
    for number in range(1, len(found) - 1):
        (left, low), (at, factor), (right, high) = kept[-1], found[number], found[number + 1]
        if abs(low + (high - low) * (at - left) / (right - left) - factor) > _STRAIGHT:
            kept.append(found[number])
    return (*kept, *found[-1:]) if len(found) > 1 else tuple(kept)
