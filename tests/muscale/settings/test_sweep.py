"""What makes no sense together is refused when the file is read, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from muscale import StudyConfig
from muscale.plans.costs import cost_of, estimate
from muscale.settings.sweep import SweepSettings
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Choice, Condition, Integer, LogUniform, Range, Space, Uniform

SPACE = Space({"learning_rate": LogUniform(low=1e-3, high=1e-1), "beta2": Uniform(low=0.9, high=0.999)})
MakeStudy = Callable[..., Path]


H = Hyperparameters(learning_rate=0.01, batch_tokens=100)
RUNGS = (1000, 2000, 4000, 8000)


def errors(**values: Any) -> list[str]:
    given: dict[str, Any] = {"trials": 8, "n_tokens": 8000, "space": SPACE}
    return list(SweepSettings(**{**given, **values}).cross_field_errors(H, RUNGS))


@pytest.mark.parametrize("scheduler", ["asha", "tune:HyperBandScheduler", "tune:MedianStoppingRule", "none"])
@pytest.mark.parametrize("searcher", ["auto", "across_scales", "tpe", "gp", "cma_es", "quasi_random", "random", "grid"])
def test_every_searcher_goes_with_every_early_stopping(searcher: str, scheduler: str) -> None:
    assert errors(searcher=searcher, scheduler=scheduler) == []


RATE = Uniform(low=0.01, high=0.1)
CONDITIONAL = Space(
    {"learning_rate": RATE, "clip_norm": replace(RATE, when=Condition(parents=(("learning_rate", Range(low=0.05)),)))}
)


@pytest.mark.parametrize("scheduler", ["pbt", "tune:PB2"])
def test_a_population_starts_from_draws(scheduler: str) -> None:
    for searcher in ("auto", "random", "quasi_random"):
        assert errors(searcher=searcher, scheduler=scheduler) == []
    for searcher in ("across_scales", "tpe", "gp", "cma_es", "grid"):
        (error,) = errors(searcher=searcher, scheduler=scheduler)
        assert error.startswith("sweep.searcher: ")
        assert f'"{searcher}"' in error


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"schedule": "constant"}, "schedule"),
        ({"rank_by": "mid_decay"}, "rank_by"),
        ({"rank_by": "stable", "schedule": "linear"}, "rank_by"),
        ({"rank_by": "annealed", "schedule": "cosine"}, "rank_by"),
        ({"rungs": 1, "scheduler": "asha"}, "rungs"),
        ({"searcher": "cma_es", "space": Space({"learning_rate": SPACE["learning_rate"]})}, "searcher"),
        ({"searcher": "cma_es", "space": SPACE.updated({"zero_readout": Choice(values=(True, False))})}, "searcher"),
        ({"scheduler": "pbt", "space": Space({"init_scale": Uniform(low=0.5, high=2.0)})}, "space"),
        ({"scheduler": "tune:PB2", "space": Space({"clip_norm": Integer(low=1, high=4)})}, "space"),
        ({"scheduler": "tune:PB2", "space": CONDITIONAL}, "space"),
        ({"scheduler": "tune:PopulationBasedTraining", "space": CONDITIONAL}, "space"),
        ({"scheduler": "pbt", "schedule": "linear"}, "scheduler"),
        ({"scheduler": "pbt", "trials": 1}, "trials"),
    ],
)
def test_what_makes_no_sense_together_is_refused(values: dict[str, Any], key: str) -> None:
    (error,) = errors(**values)
    assert error.startswith(f"sweep.{key}: ")
    if isinstance(value := values.get(key), str):
        assert f'"{value}"' in error


def test_batches_divide_the_largest(make_study: MakeStudy) -> None:
    batches = 'sweep.space.batch_tokens={distribution="ordinal", values=[128, 256, 512]}'
    assert all(tokens % 512 == 0 for tokens in StudyConfig.read(make_study(), [batches]).rung_tokens())


def test_the_dry_run_counts_every_branch_and_repetition_but_no_more_than_the_budget(make_study: MakeStudy) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    first, last = config.rung_tokens()
    annealed = config.hyperparameters.annealed_tokens
    trial = last + (annealed(first) - first) + (annealed(last) - last)
    sweep = estimate(config).set_index("stage").loc["sweep"]
    assert sweep["n_tokens"] == 4 * trial + 9 * annealed(last)
    narrowed = cost_of("sweep --narrow", config)
    assert narrowed["n_tokens"].tolist() == 2 * [sweep["n_tokens"]], "a narrower round repeats finalists of its own"
    for limit, expected in ((50_000, [50_000, 0]), (int(sweep["n_tokens"]) + 7, [sweep["n_tokens"], 7])):
        capped = cost_of("sweep --narrow", StudyConfig.read(path, [f"sweep.max_tokens={limit}"]))
        assert capped["n_tokens"].tolist() == expected


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_setting_may_be_searched_under_the_optimizers_that_read_it(optimizer: str, make_study: MakeStudy) -> None:
    config = StudyConfig.read(
        make_study(),
        [
            f"hyperparameters.optimizer={optimizer}",
            'sweep.space.optimizer={distribution="choice", values=["adamw", "adafactor"]}',
            'sweep.space.beta1={distribution="uniform", low=0.8, high=0.95, when={optimizer=["adamw"]}}',
            'sweep.space.beta2={distribution="uniform", low=0.9, high=0.99, when={beta1={low=0.5}}}',
        ],
    )
    drawn = config.sweep.space.sample(50, seed=0)
    assert {replace(config.hyperparameters, **cast(dict[str, Any], values)).optimizer for values in drawn} == {
        "adamw",
        "adafactor",
    }
