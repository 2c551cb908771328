"""A user's own Tuner over a study: schedulers and searchers of Tune's, segments of the ledger, nothing trained twice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining
from ray.tune.search.optuna import OptunaSearch

import muscale.tune
from muscale import StageError, Study, StudyConfig
from muscale.layout import CURVES
from muscale.search.sweep import trial_plan
from muscale.store.ledger_tables import segments
from muscale.tune.study_trainable import trial_values
from proxy_models.training.numerics import Numerics
from search_spaces import Choice, Condition, Fixed, Integer, LogUniform, Ordinal, Simplex, Space, Uniform

SETTINGS = ["sweep.n_tokens=4096", "sweep.rungs=3", "resources.cpus_per_worker=0.5"]
RATES = [0.004, 0.01, 0.02, 0.03]
FOUR = {"learning_rate": tune.grid_search(RATES)}


def open_study(path: Path, *more: str) -> Study:
    return Study.open(path, [*SETTINGS, *more], quiet=True)


class Breaks(tune.Callback):
    """Ends the driver's work after some results, as a failure of its own would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_trial_result(self, *args: Any, **info: Any) -> None:
        self.left -= 1
        if not self.left:
            raise ConnectionError("the driver lost something")


def fit(
    study: Study,
    folder: Path,
    space: Any = None,
    callbacks: list[tune.Callback] | None = None,
    failures: tune.FailureConfig | None = None,
    **settings: Any,
) -> tune.ResultGrid:
    """Tune's results for a study, Tune's files in a folder."""
    tuner = tune.Tuner(
        muscale.tune.trainable(study),
        param_space=space or muscale.tune.param_space(study),
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", reuse_actors=True, **{"max_concurrent_trials": 2, **settings}
        ),
        run_config=tune.RunConfig(
            storage_path=str(folder), name="it", verbose=0, callbacks=callbacks, failure_config=failures
        ),
    )
    return tuner.fit()


def cpus() -> int:
    """All that the cluster has."""
    return int(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]


def population() -> PopulationBasedTraining:
    """A new rate, or a better member's state, after each rung, once all have come to it."""
    return PopulationBasedTraining(
        time_attr="training_iteration",  # by default seconds: a trial that ends early would leave the other waiting
        perturbation_interval=1,
        quantile_fraction=0.5,
        synch=True,
        hyperparam_mutations={"learning_rate": tune.loguniform(0.004, 0.03)},
    )


def trained(study: Study) -> list[dict[str, Any]]:
    """Rows of all segments in the order in which they were trained."""
    return study.ledger.read(lambda c: [dict(row) for row in c.execute(segments.select()).mappings()])


def keys(study: Study) -> list[str]:
    """Keys of all segments in the order in which they were trained."""
    return [row["key"] for row in trained(study)]


def curves(study: Study) -> dict[str, int]:
    """When the curve of each segment was written, which a second training would write again."""
    return {file.name: file.stat().st_mtime_ns for file in (study.directory / CURVES).iterdir()}


@pytest.fixture
def without_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tune without its CSV and JSON files, which it leaves open and `get_dataframe` reads; its handler of SIGINT goes, too."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "given",
    [
        {"cooldown_fraction": 0.5},
        {"swap_optimizer": "lion", "swap_fraction": 0.5},
        {"schedule": "cosine"},
        {"batch_tokens": 3 * 1024},
        {"batch_tokens": 0},
        {"batch_tokens": 16},
        {"batch_tokens": "256"},
        {"rate": 0.1},
    ],
)
def test_a_value_that_all_trials_share_is_refused_by_its_name(
    make_study: Callable[[], Path], given: dict[str, Any]
) -> None:
    """Trials with other cooldowns trained the same segments, and had the same loss."""
    config = StudyConfig.read(make_study(), SETTINGS)
    plan = trial_plan(
        config, Numerics(model=config.model, base=config.model, corpus_key="", seed=0, evaluation_tokens=1)
    )
    with pytest.raises(StageError) as refused:
        trial_values({"learning_rate": 0.01, **given}, plan, config.sweep.space)
    assert next(iter(given)) in str(refused.value)


def test_a_condition_holds_for_values_that_the_space_of_a_tuner_leaves_out(make_study: Callable[[], Path]) -> None:
    config = StudyConfig.read(make_study(), SETTINGS)
    plan = trial_plan(
        config, Numerics(model=config.model, base=config.model, corpus_key="", seed=0, evaluation_tokens=1)
    )
    space = Space(
        {
            "optimizer": Choice(values=("adamw", "lion")),
            "weight_decay_tau": LogUniform(low=0.05, high=0.5, when=Condition.from_dict({"optimizer": ["adamw"]})),
        }
    )
    config_of_tuner = {"learning_rate": 0.01, "weight_decay_tau": 0.1}
    assert plan.defaults.optimizer == "adamw"
    assert trial_values(config_of_tuner, plan, space) == config_of_tuner
    lion = {**config_of_tuner, "optimizer": "lion"}
    assert trial_values(lion, plan, space) == {"learning_rate": 0.01, "optimizer": "lion"}


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster", "without_loggers")
class TestTuner:
    def test_asha_stops_trials_and_a_tuner_that_broke_off_trains_no_segment_twice(
        self, make_study: Callable[[], Path], tmp_path: Path
    ) -> None:
        study = open_study(make_study())
        with pytest.raises(Exception, match="the driver lost something"):
            fit(study, tmp_path / "0", FOUR, callbacks=[Breaks(after=3)], max_concurrent_trials=1)
        known = curves(study)
        assert known
        asha = ASHAScheduler(max_t=3, grace_period=1, reduction_factor=2)
        grid = fit(study, tmp_path / "1", FOUR, scheduler=asha, max_concurrent_trials=1)
        assert not grid.errors
        assert known.items() <= curves(study).items(), "a segment was trained again"
        table = pd.json_normalize([grid[n].metrics for n in range(len(grid))], sep="/")
        trained = keys(study)
        assert set(table["segment"]) <= set(trained)
        noted = study.ledger.runs()
        ended = table[table["training_iteration"] == 3]
        assert len(ended)
        assert set(noted["purpose"]) == {"tune"}
        assert set(noted["loss"]) >= set(ended["annealed_loss"])
        assert b"ledger.sqlite" not in (tmp_path / "1" / "it" / "tuner.pkl").read_bytes()
        assert study.ledger.retrained() == []

    def test_what_no_node_has_is_refused_before_tune_waits_for_it(self, make_study: Callable[[], Path]) -> None:
        study = open_study(make_study(), f"resources.cpus_per_worker={cpus() + 1}")
        with pytest.raises(StageError, match=rf"^tune: .* {cpus() + 1} CPU"):
            muscale.tune.trainable(study)

    @pytest.mark.soak
    def test_a_member_of_a_population_continues_from_its_donor_s_state(
        self, make_study: Callable[[], Path], tmp_path: Path
    ) -> None:
        study = open_study(make_study())
        grid = fit(study, tmp_path, {"learning_rate": tune.grid_search([0.0005, 0.01])}, scheduler=population())
        assert not grid.errors
        copied = [h for h in study.ledger.runs()["hyperparameters"] if h.get("stages")]
        assert copied
        assert all(h["learning_rate"] == 0.01 for h in copied)
        assert study.ledger.retrained() == []

    @pytest.mark.soak
    def test_a_member_that_diverges_keeps_no_population_waiting_and_is_replaced(
        self, make_study: Callable[[], Path], tmp_path: Path
    ) -> None:
        """One at a time: it comes last, while the other waits for it to arrive."""
        study = open_study(make_study(), "sweep.rungs=2", "resources.workers=1", f"resources.cpus_per_worker={cpus()}")
        rates = {"learning_rate": tune.grid_search([0.01, 1e4])}
        grid = fit(study, tmp_path, rates, scheduler=population(), max_concurrent_trials=None)
        assert not grid.errors
        ended = [grid[n].metrics or {} for n in range(2)]
        assert [result["training_iteration"] for result in ended] == [2, 2]
        assert not any(result["diverged"] for result in ended)
        assert sum(row["diverged_because"] is not None for row in trained(study)) == 1
        assert len(study.ledger.runs()) == 2

    @pytest.mark.soak
    def test_a_member_that_fails_ends_a_population_that_fails_fast(
        self, make_study: Callable[[], Path], tmp_path: Path
    ) -> None:
        study = open_study(make_study(), "sweep.rungs=2", "resources.workers=1", f"resources.cpus_per_worker={cpus()}")
        rates, failures = {"learning_rate": tune.grid_search([0.01, -1.0])}, tune.FailureConfig(fail_fast=True)
        grid = fit(study, tmp_path, rates, failures=failures, scheduler=population(), max_concurrent_trials=None)
        assert "learning_rate" in str(*grid.errors)

    def test_a_trial_that_diverged_trains_nothing_more(self, make_study: Callable[[], Path], tmp_path: Path) -> None:
        study = open_study(make_study())
        result = fit(study, tmp_path, {"learning_rate": 1e4})[0]
        assert result.error is None
        assert result.metrics
        assert (result.metrics["training_iteration"], result.metrics["diverged"]) == (3, True)
        assert [row["key"] for row in trained(study)] == [result.metrics["segment"]]
        assert study.ledger.runs().empty

    @pytest.mark.soak
    def test_trials_train_on_two_ranks_each(self, make_study: Callable[[], Path], tmp_path: Path) -> None:
        study = open_study(make_study(), "resources.ranks_per_trial=2")
        grid = fit(study, tmp_path, FOUR, scheduler=ASHAScheduler(max_t=3, grace_period=1, reduction_factor=2))
        assert not grid.errors
        assert {row["environment"]["world_size"] for row in trained(study)} == {2}
        assert study.ledger.retrained() == []

    @pytest.mark.soak
    def test_optuna_suggests_from_the_study_s_space(self, make_study: Callable[[], Path], tmp_path: Path) -> None:
        study = open_study(make_study())
        grid = fit(study, tmp_path, search_alg=OptunaSearch(seed=0), num_samples=4)
        assert not grid.errors
        assert len(study.ledger.runs()) == 4

    @pytest.mark.soak
    @pytest.mark.parametrize("searcher", ["draws", "optuna"])
    def test_hyperband_pauses_trials_which_go_on_from_the_ledger(
        self, make_study: Callable[[], Path], tmp_path: Path, searcher: str
    ) -> None:
        """With Optuna BOHB's combination; Tune adds a searcher's trials one by one, so its brackets are never full and stop none."""
        study = open_study(make_study(), "sweep.rungs=4")
        grid = fit(
            study,
            tmp_path,
            num_samples=10,
            max_concurrent_trials=None,
            scheduler=HyperBandScheduler(max_t=4, reduction_factor=2),
            search_alg=OptunaSearch(seed=0) if searcher == "optuna" else None,
        )
        assert not grid.errors
        reached = [(grid[n].metrics or {})["training_iteration"] for n in range(10)]
        assert set(reached) == ({4} if searcher == "optuna" else {1, 2, 4})
        assert len(study.ledger.runs()) == reached.count(4)
        assert len(keys(study)) == sum(reached) + reached.count(4)  # and the annealed ends
        assert study.ledger.retrained() == []

    @pytest.mark.soak
    def test_what_is_no_hyperparameter_is_refused(self, make_study: Callable[[], Path], tmp_path: Path) -> None:
        grid = fit(open_study(make_study()), tmp_path, {"lr": 0.01})
        assert "StageError: tune: lr " in str(grid.errors[0])


def with_space(study: Study, space: Space) -> Study:
    study.contents = study.contents.__class__(
        **{
            **vars(study.contents),
            "config": study.config.model_copy(update={"sweep": study.config.sweep.model_copy(update={"space": space})}),
        }
    )
    return study


def test_a_space_is_the_same_in_tune_s_words(make_study: Callable[[], Path]) -> None:
    space = Space(
        {
            "learning_rate": LogUniform(low=0.004, high=0.03),
            "beta1": Uniform(low=0.8, high=0.95),
            "warmup_steps": Integer(low=1, high=3),
            "batch_tokens": Ordinal(values=(256, 512)),
            "optimizer": Choice(values=("adamw", "lion")),
            "init_scale": Fixed(value=1.0),
        }
    )
    found = muscale.tune.param_space(with_space(open_study(make_study()), space))
    assert list(found) == list(space)
    assert found["init_scale"] == 1.0
    drawn = [{n: d.sample() if hasattr(d, "sample") else d for n, d in found.items()} for _ in range(64)]
    assert all(space.contains(config) for config in drawn)
    assert {config["warmup_steps"] for config in drawn} == {1, 2, 3}


def test_a_space_that_tune_cannot_express_is_refused_by_its_key(make_study: Callable[[], Path]) -> None:
    space = Space({"mixture": Simplex(parts=("a", "b"))})
    with pytest.raises(StageError, match=r"^sweep\.space\.mixture: .* simplex"):
        muscale.tune.param_space(with_space(open_study(make_study()), space))
