"""What makes no sense together is refused when the file is read, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyConfig, StudyFileError
from muscale.plans.costs import estimate
from muscale.settings.sweep import SweepSettings
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Choice, Integer, LogUniform, Space, Uniform

SPACE = Space({"learning_rate": LogUniform(low=1e-3, high=1e-1), "beta2": Uniform(low=0.9, high=0.999)})
MakeStudy = Callable[..., Path]


H = Hyperparameters(learning_rate=0.01, batch_tokens=100)
RUNGS = (1000, 2000, 4000, 8000)


def told(**values: Any) -> list[str]:
    given: dict[str, Any] = {"trials": 8, "n_tokens": 8000, "space": SPACE}
    return list(SweepSettings(**{**given, **values}).cross_field_errors(H, RUNGS))


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median", "none"])
@pytest.mark.parametrize("searcher", ["auto", "across_scales", "tpe", "gp", "cma_es", "quasi_random", "random", "grid"])
def test_every_searcher_goes_with_every_early_stopping(searcher: str, scheduler: str) -> None:
    assert told(searcher=searcher, scheduler=scheduler) == []


@pytest.mark.parametrize("scheduler", ["pbt", "pb2"])
def test_a_population_starts_from_draws(scheduler: str) -> None:
    for searcher in ("auto", "random", "quasi_random"):
        assert told(searcher=searcher, scheduler=scheduler) == []
    for searcher in ("across_scales", "tpe", "gp", "cma_es", "grid"):
        (problem,) = told(searcher=searcher, scheduler=scheduler)
        assert problem.startswith(f'sweep.searcher: a population can\'t start from "{searcher}"')


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "constant"}, "sweep.schedule: a search compares trials on their way to one end"),
        ({"rank_by": "mid_decay"}, 'sweep.rank_by: "mid_decay" is for schedule linear or cosine'),
        ({"rank_by": "stable", "schedule": "linear"}, 'sweep.rank_by: "stable" is for schedule wsd'),
        ({"rank_by": "annealed", "schedule": "cosine"}, 'sweep.rank_by: "annealed" is for schedule wsd'),
        ({"rungs": 1, "scheduler": "asha"}, 'sweep.rungs: "asha" compares trials before their end'),
        (
            {"searcher": "cma_es", "space": Space({"learning_rate": SPACE["learning_rate"]})},
            'sweep.searcher: "cma_es" adapts a covariance, so it needs at least two hyperparameters .* got 1, 0 of them',
        ),
        (
            {"searcher": "cma_es", "space": SPACE.updated({"zero_readout": Choice(values=(True, False))})},
            'sweep.searcher: "cma_es" adapts .* got 3, 1 of them choices',
        ),
        (
            {"scheduler": "pbt", "space": Space({"init_scale": Uniform(low=0.5, high=2.0)})},
            'sweep.space: "pbt" needs a hyperparameter that can change in mid-run: one of learning_rate',
        ),
        (
            {"scheduler": "pb2", "space": Space({"clip_norm": Integer(low=1, high=4)})},
            'sweep.space: "pb2" moves real numbers only, got clip_norm',
        ),
        ({"scheduler": "pbt", "schedule": "linear"}, 'sweep.scheduler: "pbt" finds the course of the rate itself'),
        ({"scheduler": "pbt", "trials": 1}, "sweep.trials: a population needs at least 2 members, got 1"),
    ],
)
def test_what_makes_no_sense_is_told_with_the_reason(values: dict[str, Any], message: str) -> None:
    problems = told(**values)
    assert len(problems) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])


def test_batches_are_listed_and_divide_the_largest(make_study: MakeStudy) -> None:
    path = make_study()
    for values, message in (
        ('distribution="integer", low=256, high=1024', "rungs lie at whole batches of every trial: list them"),
        ('distribution="ordinal", values=[256, 384]', "each must divide the largest, 384, got 256"),
        ('distribution="ordinal", values=[48, 96]', "must be a multiple of model.context_length = 32, got 48"),
    ):
        with pytest.raises(StudyFileError, match=f"study.toml: sweep.space.batch_tokens: {message}"):
            StudyConfig.read(path, [f"sweep.space.batch_tokens={{{values}}}"])
    odd = 'sweep.space.batch_tokens={distribution="ordinal", values=[32, 256]}'
    with pytest.raises(
        StudyFileError, match="promote.workers: 2 ranks need a sequence of a batch for each share, got 1"
    ):
        StudyConfig.read(path, [odd, "promote.workers=2"])
    listed = StudyConfig.read(path, ['sweep.space.batch_tokens={distribution="ordinal", values=[128, 256, 512]}'])
    assert all(tokens % 512 == 0 for tokens in listed.rung_tokens())


def test_the_dry_run_counts_every_branch_and_repetition_but_no_more_than_the_budget(make_study: MakeStudy) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    first, last = config.rung_tokens()
    annealed = config.hyperparameters.annealed_tokens
    trial = last + (annealed(first) - first) + (annealed(last) - last)
    sweep = estimate(config).set_index("stage").loc["sweep"]
    assert sweep["n_tokens"] == 4 * trial + 9 * annealed(last)
    capped = estimate(StudyConfig.read(path, ["sweep.max_tokens=50000"])).set_index("stage").loc["sweep"]
    assert capped["n_tokens"] == 50_000
