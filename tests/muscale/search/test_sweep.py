"""Sweeps by Ray Tune for real: every method, narrowing, learning from another study, a lost worker, two sweeps at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from ray.tune import Callback

from muscale import StageError, Study, StudyFileError
from muscale.actors.work import LOSS
from muscale.search.methods import resolve_searcher
from muscale.search.prior_runs import describe_prior_runs
from muscale.search.sweep import Sweep
from muscale.settings.sweep import POPULATIONS, SweepSettings
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import LogUniform, Space
from tests.quick import quick_and_soak

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

MakeStudy = Callable[..., Path]
QUICK = ["sweep.n_seeds=0", "sweep.top_k=1", "sweep.rungs=3", "sweep.trials=5"]
COVERING = [
    ("across_scales", "asha"),
    ("gp", "none"),
    ("tune:OptunaSearch", "tune:HyperBandScheduler"),
    ("cma_es", "tune:MedianStoppingRule"),
    ("quasi_random", "pbt"),
    ("random", "tune:PB2"),
]


def sweep(path: Path, *settings: str, callbacks: Sequence[Callback] = ()) -> Study:
    study = Study.open(path, [*QUICK, *settings], quiet=True)
    study.sweep(callbacks=callbacks)
    return study


class Results(Callback):
    """Losses that Tune reports to a user's callback."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.losses.append(result[LOSS])


@pytest.mark.parametrize(
    ("searcher", "scheduler"),
    quick_and_soak(COVERING, ("across_scales", "asha")),
)
def test_every_method_runs_in_tune(make_study: MakeStudy, searcher: str, scheduler: str) -> None:
    check_pair(make_study(), searcher, scheduler)


@pytest.mark.soak
@pytest.mark.parametrize(
    "scheduler",
    [
        "none",
        "asha",
        "pbt",
        "tune:ASHAScheduler",
        "tune:HyperBandScheduler",
        "tune:PopulationBasedTraining",
        "tune:PB2",
    ],
)
@pytest.mark.parametrize(
    "searcher", ["auto", "grid", "random", "quasi_random", "tpe", "gp", "cma_es", "across_scales", "tune:OptunaSearch"]
)
def test_every_pair_of_methods_runs_in_tune_or_is_refused(make_study: MakeStudy, searcher: str, scheduler: str) -> None:
    space = Space({"learning_rate": LogUniform(low=0.004, high=0.03), "init_scale": LogUniform(low=0.5, high=2.0)})
    settings = SweepSettings(trials=5, n_tokens=1024, searcher=searcher, scheduler=scheduler, space=space)
    if list(settings.cross_field_errors(Hyperparameters(learning_rate=0.01, batch_tokens=256), (4096, 8192, 16384))):
        with pytest.raises(StudyFileError, match=f'"{searcher}"'):
            Study.open(make_study(), [*QUICK, f"sweep.searcher={searcher}", f"sweep.scheduler={scheduler}"])
    else:
        check_pair(make_study(), searcher, scheduler)


def check_pair(path: Path, searcher: str, scheduler: str) -> None:
    study = sweep(path, f"sweep.searcher={searcher}", f"sweep.scheduler={scheduler}", "resources.workers=1")
    found = study.sweep()
    assert len(found.trials) == 5
    assert found.trials["annealed_loss"].notna().any()
    assert "completed" in set(found.trials["status"])
    assert study.ledger.retrained() == []
    assert found.copies["donor"].notna().any() if len(found.copies) else scheduler not in POPULATIONS, scheduler


def test_a_narrower_round_adds_to_the_same_table_and_a_rerun_adds_nothing(make_study: MakeStudy) -> None:
    path = make_study()
    settings = [
        *("sweep.trials=6", "sweep.scheduler=none", "sweep.searcher=random"),
        *("sweep.rungs=1", "sweep.n_tokens=4096"),
    ]
    reported = Results()
    first = sweep(path, *settings, callbacks=[reported]).sweep()
    assert len(reported.losses) >= len(first.trials), "callbacks run in the sweep's own Tuner"
    assert np.isfinite(reported.losses).all()
    study = Study.open(path, [*QUICK, *settings], quiet=True)
    narrower = study.sweep(narrower=True)
    assert len(narrower.trials) == 12
    pd.testing.assert_series_equal(
        narrower.trials.set_index("trial").loc[first.trials["trial"], "learning_rate"],
        first.trials.set_index("trial")["learning_rate"],
    )
    rounds = study.ledger.rounds(Sweep.of(study.config, study.ledger, study.corpus).key)
    assert [row["first_trial"] for row in rounds] == [0, 6]
    space = Space.from_dict(rounds[1]["space"])
    added = narrower.trials[narrower.trials["trial"] >= 6]
    assert all(space.contains({name: row[name] for name in space}) for row in added.to_dict("records"))
    assert len(Study.open(path, [*QUICK, *settings], quiet=True).sweep().trials) == 12
    where = "a narrower" if space != study.config.sweep.space else "the same"
    assert f"round 1, from trial 6 on, in {where} space" in str(narrower)
    with pytest.raises(StageError, match="sweep.max_tokens"):
        Study.open(path, [*QUICK, *settings, "sweep.max_tokens=5000"], quiet=True).sweep(narrower=True)
    assert len(study.ledger.rounds(Sweep.of(study.config, study.ledger, study.corpus).key)) == 2, (
        "a round that can't begin is not noted"
    )


def test_a_sweep_begins_with_what_another_study_has_learnt(make_study: MakeStudy) -> None:
    source, target = make_study("source"), make_study("target")
    source_sweep = sweep(source, "sweep.searcher=random", "sweep.scheduler=none", "resources.workers=1")

    def learns(*settings: str) -> tuple[int, str]:
        study = Study.open(target.parent / "study.toml", [*settings, "sweep.searcher=auto"], quiet=True)
        prior_runs = replace(Sweep.of(study.config, study.ledger, study.corpus), learn_from=(str(source),)).prior_runs()
        return len(prior_runs), resolve_searcher(study.config.sweep, prior_runs)

    assert learns("sweep.n_tokens=32768") == (len(source_sweep.runs()), "across_scales")
    search, runs = Sweep.of(source_sweep.config, source_sweep.ledger, source_sweep.corpus), len(source_sweep.runs())
    assert describe_prior_runs(source, search.plan.defaults, search.config.sweep.space, search.numerics) == (
        f"using {runs} of {runs} runs from {source}"
    )
    other = replace(search.numerics, corpus_key="another")
    assert describe_prior_runs(source, search.plan.defaults, search.config.sweep.space, other) == (
        f"warning: using 0 of {runs} runs from {source}: its corpus_key is "
        f"{search.numerics.corpus_key!r}, the study's is 'another'"
    )
    assert learns("hyperparameters.beta1=0.8") == (0, "tpe"), "runs under other fixed values are not used"
    assert learns("sweep.space.beta1={distribution='uniform', low=0.8, high=0.95}") == (
        len(source_sweep.runs()),
        "across_scales",
    )


def test_a_sweep_names_a_table_of_results_that_disagrees_with_its_own(make_study: MakeStudy) -> None:
    """The table's losses rise with the rate from 2^-12 on, where those of the sweep fall."""
    path = make_study()
    rates = 2.0 ** np.linspace(-12, -4, 17)
    losses = 2 + 0.02 * np.log2(rates * 2**12) ** 2
    table = pd.DataFrame({"learning_rate": rates, "init_scale": 1.0, "loss": losses})
    table.to_csv(path.parent / "other.csv", index=False)
    study = sweep(
        path,
        "sweep.searcher=across_scales",
        "sweep.scheduler=none",
        "sweep.trials=8",
        "resources.workers=1",
        'sweep.learn_from=["other.csv"]',
        'sweep.space.learning_rate={distribution="log_uniform", low=0.0002, high=0.06}',
    )
    assert re.search(
        r"warning: .*other\.csv (disagrees with|has its optimum elsewhere than) this study", str(study.sweep())
    )


@pytest.mark.soak
def test_a_worker_that_is_killed_costs_its_segment_and_no_more(make_study: MakeStudy) -> None:
    path = make_study()
    settings = [
        "sweep.searcher=random",
        "sweep.scheduler=none",
        "sweep.n_tokens=65536",
        "sweep.trials=3",
        "resources.workers=2",
    ]
    killed = threading.Event()

    def kill() -> None:
        deadline = time.monotonic() + 600
        while not killed.is_set() and time.monotonic() < deadline:
            for process in psutil.Process().children(recursive=True):
                try:
                    busy = "ResourceTrainable.train" in " ".join(process.cmdline())
                except psutil.NoSuchProcess:
                    continue
                if busy and (path.parent / "states").exists():
                    process.send_signal(signal.SIGKILL)
                    killed.set()
                    return
            time.sleep(0.02)

    assassin = threading.Thread(target=kill)
    assassin.start()
    found = sweep(path, *settings).sweep()
    assassin.join()
    assert killed.is_set()
    undisturbed = sweep(make_study("undisturbed"), *settings).sweep()
    columns = ["trial", "status", "learning_rate", "annealed_loss"]
    pd.testing.assert_frame_equal(found.trials[columns], undisturbed.trials[columns])


@pytest.mark.soak
def test_two_sweeps_at_once_train_nothing_twice(make_study: MakeStudy, tmp_path: Path) -> None:
    path = make_study()
    Study.open(path, quiet=True).corpus  # noqa: B018 -- written before the race
    log = (tmp_path / "log").open("w")
    drivers = [
        subprocess.Popen(
            [sys.executable, "-m", "muscale", "sweep", str(path), *flatten([*QUICK, "sweep.searcher=random", one])],
            stdout=log,
            stderr=log,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        )
        for one in ("sweep.scheduler=none", "sweep.scheduler=asha")
    ]
    try:
        codes = [driver.wait(timeout=600) for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()
        log.close()
    assert codes == [0, 0], (tmp_path / "log").read_text()
    study = Study.open(path, quiet=True)
    assert study.ledger.retrained() == []
    runs = study.runs()
    assert (runs.groupby("label").size() == 1).all(), "both searched the same configurations"


def flatten(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def to_driver(driver: subprocess.Popen[bytes]) -> None:
    driver.send_signal(signal.SIGINT)


def to_group(driver: subprocess.Popen[bytes]) -> None:
    """Signal the driver and then its group, as `timeout` does."""
    driver.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    os.killpg(driver.pid, signal.SIGTERM)


@pytest.mark.soak
@pytest.mark.parametrize("interrupt", [to_group, to_driver])
def test_ctrl_c_lets_the_running_trials_come_to_a_rung_and_a_rerun_continues(
    make_study: MakeStudy, interrupt: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    settings = [*QUICK, "sweep.searcher=random", "sweep.scheduler=none", "sweep.n_tokens=131072", "sweep.trials=3"]
    path = make_study()
    log = path.parent / "sweep.log"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    with log.open("w") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", "muscale", "sweep", str(path), *flatten(settings)],
            stdout=file,
            stderr=file,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            start_new_session=True,
        )
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 600  # a busy machine starts Ray in minutes
        while "at rung 0" not in log.read_text():
            assert driver.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        interrupt(driver)
        assert driver.wait(timeout=600) == 130, log.read_text()
    finally:
        driver.kill()
    study = Study.open(path, settings, quiet=True)
    record = Sweep.of(study.config, study.ledger, study.corpus).record()
    assert not any(record.last_rung(trial) == -1 for trial in record.configs), "each that was at work came to a rung"
    assert record.open
    kept = dict(record.results)
    resumed = study.sweep()
    assert kept.items() <= Sweep.of(study.config, study.ledger, study.corpus).record().results.items()
    undisturbed = Study.open(make_study("undisturbed"), settings, quiet=True).sweep()
    columns = ["trial", "status", "learning_rate", "annealed_loss"]
    pd.testing.assert_frame_equal(resumed.trials[columns], undisturbed.trials[columns])
