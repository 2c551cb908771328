"""Searchers that know no other runs: the end of a grid, and the priors that the first trials are drawn by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import pytest

from muscale.errors import StageError
from muscale.search.protocols import Observation, Searcher
from muscale.search.searchers import START_UP, CmaEs, Draws, Grid, gaussian_process, tpe
from search_spaces import Config, LogUniform, Prior, Space

LOW, HIGH, CENTRE = 2e-3, 6e-2, 4e-3
SPACE = Space(
    {
        name: LogUniform(low=LOW, high=HIGH, prior=Prior(centre=CENTRE, spread=0.25))
        for name in ("learning_rate", "other")
    }
)


@dataclass
class Nothing:
    """What is known of a sweep."""

    space: Space = field(default_factory=lambda: SPACE)
    observations: list[Observation] = field(default_factory=list)
    pending: list[Config] = field(default_factory=list)


def test_a_grid_that_is_tried_has_no_further_point() -> None:
    grid = Grid(configs=({"learning_rate": LOW}, {"learning_rate": HIGH}), first=3)
    assert [grid.propose(n, Nothing())["learning_rate"] for n in (3, 4)] == [LOW, HIGH]
    with pytest.raises(StageError):
        grid.propose(5, Nothing())


@pytest.mark.parametrize(
    "make", [tpe, gaussian_process, lambda space, seed: CmaEs(space=space, seed=seed)], ids=["tpe", "gp", "cma_es"]
)
def test_the_first_trials_are_near_the_priors_centre(make: Callable[[Space, int], Any]) -> None:
    def octaves_away(space: Space) -> float:
        searcher: Searcher = make(space, 0)
        known = Nothing(space)
        for number in range(START_UP):
            known.pending = [dict.fromkeys(space, HIGH)] * 6  # they have no result that a sampler could use
            known.observations.append(Observation(config=searcher.propose(number, known), loss=3.0))
        return median(
            abs(math.log2(cast(float, seen.config[name]) / CENTRE)) for seen in known.observations for name in space
        )

    without = Space({name: LogUniform(low=LOW, high=HIGH) for name in SPACE})
    assert octaves_away(SPACE) < octaves_away(without) - 0.3


def test_without_priors_the_sampler_draws_from_the_first_trial_on() -> None:
    space = Space({"learning_rate": LogUniform(low=LOW, high=HIGH)})
    assert tpe(space, 0).propose(0, Nothing(space)) != Draws(space=space, seed=0).propose(0, Nothing(space))
