"""Ray Tune's methods by name: a sweep decides as the real Tuner does, from any point of its record."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray import tune
from ray.tune.search import BasicVariantGenerator

from muscale.errors import StageError
from muscale.search.engine import Engine
from muscale.search.sweep_jobs import TrialSegment
from muscale.search.tune_methods import Reports, require_known_arguments, tune_scheduler, tune_searcher
from muscale.settings.sweep import SweepSettings
from proxy_models.architecture.member import NATS
from search_spaces import Choice, Config, LogUniform, Simplex, Space, Uniform
from tests.quick import quick_and_soak

MakeEngine = Callable[..., Engine]
Drive = Callable[..., list[TrialSegment]]
TRIALS, RUNGS = 12, 4
SPACE = Space({"learning_rate": LogUniform(low=1e-3, high=1e-1), "beta2": Uniform(low=0.9, high=0.999)})
MIXED = Space({**SPACE, "zero_readout": Choice(values=(True, False))})
COMPARED = [  # of which the real Tuner draws nothing from global generators
    ("random", "tune:ASHAScheduler", {"brackets": 1}),
    ("random", "tune:HyperBandScheduler", {}),
    ("random", "tune:MedianStoppingRule", {"min_samples_required": 2}),
    ("tune:OptunaSearch", "none", {}),
    ("tune:OptunaSearch", "tune:ASHAScheduler", {}),
]
METHODS = [
    *COMPARED,
    ("random", "tune:AsyncHyperBandScheduler", {"brackets": 2}),
    ("random", "tune:PopulationBasedTraining", {}),
    ("random", "tune:PB2", {}),
    ("tune:OptunaSearch", "asha", {}),
    ("tune:OptunaSearch", "tune:HyperBandScheduler", {}),
]


def settings(searcher: str, scheduler: str, **values: Any) -> SweepSettings:
    given: dict[str, Any] = {"trials": TRIALS, "n_tokens": 8000, "rungs": RUNGS, "space": SPACE}
    return SweepSettings(**{**given, "searcher": searcher, "scheduler": scheduler, **values})


def loss_of(config: Config, rung: int) -> float:
    octaves = math.log2(cast(float, config["learning_rate"]) / 0.01)
    return 4 - 0.3 * rung + 0.05 * octaves**2 + cast(float, config["beta2"])


def loss_at(segment: TrialSegment, rung: int) -> float | None:
    return loss_of(segment.path[-1][1], rung)


class Toy(tune.Trainable):
    """The same losses as a program of a Tune user's; the state is the number of the rung."""

    def setup(self, config: dict[str, Any]) -> None:
        self.rung = 0

    def step(self) -> dict[str, Any]:
        self.rung += 1
        return {"loss": loss_of(self.config, self.rung - 1), "relative_length": 2.0 ** (self.rung - 1)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "rung").write_text(str(self.rung))

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.rung = int(Path(checkpoint, "rung").read_text())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.config, self.rung = new_config, 0
        return True


class Seen(tune.Callback):
    """Rungs and configurations of trials, which are numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.reached: dict[int, int] = {}
        self.configs: dict[int, Config] = {}

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.reached[trials.index(trial)] = result["training_iteration"] - 1
        self.configs.setdefault(trials.index(trial), result["config"])


def by_tune(folder: Path, chosen: SweepSettings, configs: list[Config]) -> Seen:
    """A real Tuner, one trial at a time, with the configurations in their order or those of Tune's searcher."""
    space = {"learning_rate": tune.loguniform(1e-3, 1e-1), "beta2": tune.uniform(0.9, 0.999)}
    seen = Seen()
    scheduler = None if chosen.scheduler == "none" else tune_scheduler(chosen, SPACE)
    if chosen.searcher == "random":
        searcher: Any = BasicVariantGenerator(points_to_evaluate=[dict(config) for config in configs])
    else:
        searcher = tune.search.ConcurrencyLimiter(tune_searcher(chosen, chosen.searcher, SPACE), max_concurrent=1)
        space = {}
    if scheduler and chosen.searcher == "random":  # the Tuner names the metric
        scheduler._metric = scheduler._mode = None
    tune.Tuner(
        tune.with_resources(Toy, {"CPU": ray.cluster_resources()["CPU"]}),  # type: ignore[no-untyped-call]
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss" if chosen.searcher == "random" else None,
            mode="min" if chosen.searcher == "random" else None,
            num_samples=chosen.trials,
            scheduler=scheduler,
            search_alg=searcher,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=str(folder), verbose=0, callbacks=[seen], stop={"training_iteration": chosen.rungs}
        ),
    ).fit()
    return seen


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("searcher", "scheduler", "arguments"), quick_and_soak(COMPARED, *COMPARED[1:4:2]))
def test_a_sweep_decides_as_a_real_tuner_does(
    make_engine: MakeEngine,
    drive: Drive,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    searcher: str,
    scheduler: str,
    arguments: dict[str, Any],
) -> None:
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    chosen = settings(searcher, scheduler, tune=arguments)
    drive(engine := make_engine(chosen), loss_at, workers=1)
    record = engine.record
    seen = by_tune(tmp_path / "tune", chosen, [record.configs[number] for number in range(TRIALS)])
    assert seen.reached == {number: record.last_rung(number) for number in range(TRIALS)}
    assert seen.configs == {number: pytest.approx(record.configs[number]) for number in range(TRIALS)}


@pytest.mark.parametrize(
    ("searcher", "scheduler", "arguments"),
    quick_and_soak(METHODS, *(method for method in METHODS if method[1] != "tune:PB2")),
)
def test_a_sweep_that_is_begun_again_after_each_job_is_the_same(
    make_engine: MakeEngine, drive: Drive, searcher: str, scheduler: str, arguments: dict[str, Any]
) -> None:
    chosen = settings(searcher, scheduler, trials=8, tune=arguments)
    whole = drive(make_engine(chosen, "whole"), loss_at, workers=1)
    pieces: list[TrialSegment] = []
    while started := drive(make_engine(chosen, "pieces"), loss_at, workers=1, n_segments=2):
        pieces.append(started[0])  # the second begins, and begins again
    assert [(each.trial, each.first, each.until, each.path) for each in pieces] == [
        (each.trial, each.first, each.until, each.path) for each in whole
    ]


@pytest.mark.parametrize(
    ("scheduler", "arguments", "named"),
    [
        ("tune:NoSuchScheduler", {}, "sweep.scheduler"),
        ("tune:OptunaSearch", {}, "sweep.scheduler"),
        ("tune:ResourceChangingScheduler", {}, "sweep.scheduler"),
        ("tune:ASHAScheduler", {"grace_period": -1}, "sweep.scheduler"),
        ("tune:PopulationBasedTraining", {"synch": False}, "sweep.tune.synch"),
        ("tune:PB2", {"quantile_fraction": 0.9}, "sweep.scheduler"),
        ("tune:ASHAScheduler", {"time_attr": "time_total_s"}, "sweep.tune.time_attr"),  # it stopped no trial
        ("tune:HyperBandScheduler", {"time_attr": "n_tokens"}, "sweep.tune.time_attr"),
    ],
)
def test_a_scheduler_that_tune_refuses_names_its_key(scheduler: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(StageError) as refused:
        tune_scheduler(settings("random", scheduler, tune=arguments), SPACE)
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    ("name", "arguments", "space", "named"),
    [
        ("tune:NoSuchSearch", {}, SPACE, "sweep.searcher"),
        ("tune:ASHAScheduler", {}, SPACE, "sweep.searcher"),
        ("tune:ConcurrencyLimiter", {}, SPACE, "sweep.searcher"),
        ("tune:HEBOSearch", {}, SPACE, "sweep.searcher"),  # its package is not installed
        ("tune:OptunaSearch", {"sampler": "tpe"}, SPACE, "sweep.searcher"),
        ("tune:OptunaSearch", {}, Space({"mix": Simplex(parts=("a", "b", "c"))}), "sweep.space.mix"),
    ],
)
def test_a_searcher_that_tune_refuses_names_its_key(
    name: str, arguments: dict[str, Any], space: Space, named: str
) -> None:
    with pytest.raises(StageError) as refused:
        tune_searcher(settings(name, "none", tune=arguments, space=space), name, space)
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    ("searcher", "scheduler", "key"),
    [
        ("random", "tune:ASHAScheduler", "seed"),  # the searcher's alone
        ("random", "tune:ASHAScheduler", "metric"),
        ("tune:OptunaSearch", "asha", "brackets"),
        ("random", "asha", "brackets"),
    ],
)
def test_an_argument_that_no_method_takes_is_refused_by_name(searcher: str, scheduler: str, key: str) -> None:
    require_known_arguments(
        settings("tune:OptunaSearch", "tune:ASHAScheduler", tune={"brackets": 2, "seed": 1}), "tune:OptunaSearch"
    )
    with pytest.raises(StageError) as refused:
        require_known_arguments(settings(searcher, scheduler, tune={key: 1}), searcher)
    assert str(refused.value).startswith(f"sweep.tune.{key}:")


def test_a_divergence_is_worse_than_any_loss_so_far_in_every_metric() -> None:
    chosen = settings("random", "tune:ASHAScheduler")
    reports = Reports(chosen, NATS)
    assert reports.of(0, None)["loss"] == 100
    assert reports.of(0, 320.0)["loss"] == 320
    assert reports.of(1, None)["loss"] == 3200
    of_another_unit = Reports(chosen, "squared error")
    assert of_another_unit.of(0, None)["loss"] == 1e9  # no loss so far tells the scale
    assert of_another_unit.of(0, 0.2)["loss"] == 0.2
    assert of_another_unit.of(0, None)["loss"] == pytest.approx(2)
