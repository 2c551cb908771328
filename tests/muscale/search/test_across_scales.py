"""Our own searcher in a sweep: what it is told, and what it must not take for something else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import pandas as pd

from muscale.search.across_scales import AcrossScales
from muscale.search.observations import Observation
from search_spaces import Choice, Config, Fixed, LogUniform, Ordinal, Space

RATE = LogUniform(low=1e-3, high=1e-1)


@dataclass(frozen=True)
class Told:
    """What is known, given as it is."""

    observations: list[Observation]
    pending: list[Config] = field(default_factory=list)


def searcher(space: Space, lessons: pd.DataFrame | None = None) -> AcrossScales:
    empty = pd.DataFrame(columns=[*space.searched, "n_params", "n_tokens", "loss"])
    taught = empty if lessons is None else lessons
    return AcrossScales(space=space, seed=0, n_params=1000, n_tokens=8000, taught=lambda: taught)


def lessons(best: float) -> pd.DataFrame:
    """A parabola in log rate at two smaller scales."""
    return pd.DataFrame(
        [
            {"learning_rate": rate, "n_params": n, "n_tokens": 8000, "loss": 3 + 0.05 * math.log2(rate / best) ** 2}
            for n in (250, 500)
            for rate in (0.002, 0.004, 0.008, 0.016, 0.032)
        ]
    )


def test_the_first_suggestion_is_where_smaller_scales_have_their_optimum() -> None:
    space = Space({"learning_rate": RATE})
    config = searcher(space, lessons(0.006)).propose(0, Told([]))
    assert abs(math.log2(cast(float, config["learning_rate"]) / 0.006)) < 0.3


def test_what_a_narrowed_space_does_not_know_any_more_tells_it_nothing() -> None:
    wide = [
        Observation(config={"learning_rate": 0.01, "optimizer": "lion", "batch_tokens": 512}, loss=1.0),
        Observation(config={"learning_rate": 0.01, "optimizer": "adamw", "batch_tokens": 4096}, loss=1.0),
        Observation(config={"learning_rate": 0.2, "optimizer": "adamw", "batch_tokens": 512}, loss=3.0),
    ]
    narrow = Space(
        {"learning_rate": RATE, "optimizer": Fixed(value="adamw"), "batch_tokens": Ordinal(values=(256, 512, 1024))}
    )
    left = searcher(narrow).propose(3, Told(wide))
    assert left == searcher(narrow).propose(3, Told(wide[2:])), "lion's loss is not taken for adamw's"
    assert narrow.contains(left)
    choices = Space({"learning_rate": RATE, "optimizer": Choice(values=("adamw", "muon"))})
    told = [Observation(config={"learning_rate": 0.01, "optimizer": name}, loss=2.0) for name in ("lion", "adamw")]
    assert choices.contains(searcher(choices).propose(2, Told(told)))
