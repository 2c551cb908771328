"""A study whose [trainer] is a program: every stage runs it, its law is found, readers never run it, and a kill changes nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from muscale import StageError, Study, StudyConfig, StudyDirectoryError, StudyFileError
from muscale.actors.trial_retries import MOST_FAILED
from muscale.actors.worker import Worker
from muscale.cli import entry
from muscale.findings import findings
from muscale.layout import EXTERNAL_RUNS, MEMBERS
from muscale.plans.plan_file import path_of
from muscale.programs import program_family
from muscale.programs.program_process import train
from muscale.programs.protocol import TrainerJob
from muscale.proxies.variants import variants
from muscale.search.prior_runs import runs_of
from muscale.store.ledger_tables import ResultKind
from proxy_models.architecture import counted

ROOT = Path(__file__).parents[2]
STUDY = f"""
name = "regression"

[trainer]
command = ["{sys.executable}", "train.py", "--config", "{{config}}", "--state", "{{state}}"]
width_step = 8

[model]
d_model = 64
n_layers = 1

[hyperparameters]
learning_rate = 0.5
batch_tokens = 8

[sweep]
trials = 4
n_tokens = 8192
rungs = 1
searcher = "grid"
grid_points = 4
scheduler = "none"
n_finalists = 1
n_seeds = 1

[sweep.space]
learning_rate = {{ distribution = "log_uniform", low = 0.15, high = 1.2 }}

[transfer]
widths = [32, 64, 128]
n_tokens = 8192
rates = 5
octaves = 3.0
horizons = [1.0, 2.0]

[ladder]
stems = [
    {{ width = 32, n_tokens = 8192 }},
    {{ width = 32, n_tokens = 32768 }},
    {{ width = 64, n_tokens = 16384 }},
    {{ width = 128, n_tokens = 8192 }},
    {{ width = 128, n_tokens = 32768 }},
    {{ width = 192, n_tokens = 16384 }},
]

[fit]
max_regret = 0.01
n_bootstrap = 100

[plan]
compute_flops = 4e9
shapes = [{{ width = 256 }}]  # so that few are described
"""
STARTS = """from pathlib import Path
with Path("starts.log").open("a") as log:
    log.write("start\\n")
"""
READERS = (
    ["report", "STUDY"],
    ["runs", "STUDY"],
    ["calibration", "STUDY", "STUDY"],
    ["sync", "STUDY"],
    ["gc", "STUDY", "--dry-run"],
)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a study of the documented regression, whose program notes each of its starts; nothing of it is known yet."""
    monkeypatch.setattr(counted, "_counted", {})
    program_family.described.cache_clear()

    def write(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        text = (ROOT / "docs" / "own_metric.py").read_text()
        text = text.replace('{"n_params": n_params,', '{"metric": "error", "unit": "m²", "n_params": n_params,')
        (folder / "train.py").write_text(text.replace("import argparse\n", f"{STARTS}import argparse\n", 1))
        (folder / "study.toml").write_text(STUDY)
        return folder / "study.toml"

    return write


def starts(study: Path) -> int:
    """How often the program was started."""
    log = study.parent / "starts.log"
    return log.read_text().count("\n") if log.exists() else 0


def check_that_another_budget_is_tried_and_registered_beside(
    path: Path, opened: Study, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dry run shows the plan of another budget, with its use-case card, and registers nothing; without it that is the latest."""
    first, runs = opened.plan(), len(opened.runs())
    budget = ("--set", f"plan.compute_flops={3 * first.compute_flops:g}")
    capfd.readouterr()
    use_case = ("--set", f"use_case.targets.loss={first.forecast.high}")
    assert entry.run(["plan", str(path), *budget, *use_case, "--dry-run", "--json"]) == 0
    other = json.loads(capfd.readouterr().out)
    (size,) = other["use_case"]["sizes"]
    assert size["n_params"] == other["n_params"]
    assert size["meets_all"] == (size["P(loss)"] >= 0.9)
    assert other["key"] != first.key
    assert opened.ledger.forecast(other["key"]) is None
    assert not path_of(path.parent, other["key"]).exists()
    assert entry.run(["plan", str(path), *budget, *use_case]) == 0
    assert "P(loss)" in capfd.readouterr().out
    assert len(opened.runs()) == runs
    latest = opened.ledger.latest_forecast()
    assert latest is not None
    assert latest["plan"] == other["key"]


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_every_stage_runs_the_program_its_law_is_found_and_readers_never_run_it(
    make: Callable[[str], Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("study")
    assert entry.run(["run", str(path)]) == 0
    shown = capfd.readouterr()
    assert f"running the trainer {sys.executable} train.py" in shown.err
    opened = Study.open(path, quiet=True)
    runs, before = opened.runs(), starts(path)
    assert set(runs["purpose"]) == {"sweep", "transfer", "ladder"}
    assert entry.run(["run", str(path)]) == 0
    assert starts(path) == before, "started again"

    law, plan = opened.fit(), opened.plan()
    fitted = law.law.parameters
    assert fitted["E"] == pytest.approx(0.2, abs=0.05)
    assert fitted["alpha"] == pytest.approx(0.5, abs=0.1)
    assert fitted["beta"] == pytest.approx(0.5 / 1.2, abs=0.15)
    verdict = opened.transfer()
    assert verdict.passed, "the best rate does not depend on the width"
    assert opened.sweep().best.learning_rate == pytest.approx(0.6), "of 0.15, 0.3, 0.6 and 1.2; the minimum is at 0.62"

    assert entry.run(["plan", str(path), "--export", str(path.parent / "full")]) == 0
    job = TrainerJob.read(path.parent / "full" / "job.json")
    assert (job.width, job.end) == (plan.model.d_model, plan.n_tokens)
    end = train(opened.config.trainer.command, job, path.parent / "full", cwd=path.parent)  # type: ignore[union-attr]
    assert end.loss == pytest.approx(plan.forecast.loss, rel=0.02)
    check_that_another_budget_is_tried_and_registered_beside(path, opened, capfd)
    before = starts(path)
    assert entry.run(["watch", str(path), "--losses", str(path.parent / "full" / "state" / "rows.jsonl")]) in (0, 1)
    assert f"{end.loss:.4f}" in capfd.readouterr().out
    assert [folder.name for folder in (path.parent / EXTERNAL_RUNS).iterdir()] == [plan.key], (
        "not the one registered last"
    )

    monkeypatch.setattr(program_family, "_allowed", {})
    monkeypatch.setattr(counted, "_counted", {})
    for command in READERS:
        assert entry.run([word.replace("STUDY", str(path)) for word in command]) in (0, 1), command
    assert len(runs_of(path.parent)) == len(runs)
    again = Study.open(path, quiet=True)
    found = findings(again.contents)
    assert found.plan is not None
    assert found.plan.key == plan.key
    texts = (str(found.plan), str(found.fit), (path.parent / "report.html").read_text())
    assert all("m² of error" in text for text in texts)
    assert not any("nats" in text for text in (str(found.plan), str(found.fit)))
    assert starts(path) == before, "a reader ran it"


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_population_continues_from_the_states_of_its_donors(make: Callable[[str], Path]) -> None:
    path = make("population")
    settings = {
        "sweep.scheduler": "pbt",
        "sweep.searcher": "random",
        "sweep.trials": 6,
        "sweep.rungs": 4,
        "sweep.n_tokens": 32768,
        "hyperparameters.schedule": "wsd",
    }
    found = Study.open(path, settings, quiet=True, trains=True).sweep()
    assert len(found.copies)
    before = starts(path)
    assert Study.open(path, settings, quiet=True, trains=True).sweep().best == found.best
    assert starts(path) == before, "started again"


@pytest.mark.soak
@pytest.mark.cluster
def test_a_sweep_killed_in_the_middle_and_run_again_gives_the_same_table(
    make: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    killed, whole = make("killed"), make("whole")
    driver = subprocess.Popen(
        [sys.executable, "-m", "muscale", "sweep", str(killed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "platform"), str(ROOT)))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 600
        while starts(killed) < 6 and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert driver.poll() is None, "it ended before it could be killed"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    request.getfixturevalue("ray_cluster")
    tables = [Study.open(path, quiet=True, trains=True).sweep().trials for path in (killed, whole)]
    columns = ["trial", "learning_rate", "annealed_loss"]
    first, second = (table[columns].sort_values("trial", ignore_index=True) for table in tables)
    pd.testing.assert_frame_equal(first, second)


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_sweep_in_which_each_torchrun_is_killed_once_gives_the_same_table(make: Callable[[str], Path]) -> None:
    tables = []
    for victims in ("torchrun", "none"):
        path = make(victims)
        shutil.copy(ROOT / "tests" / "muscale" / "ranks_program.py", path.parent)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        settings = {
            "trainer.command": [*launcher, "ranks_program.py", victims, "{config}", "{state}"],
            "hyperparameters.batch_tokens": 512,
            "sweep.trials": 2,
            "sweep.grid_points": 2,
            "sweep.rungs": 1,
        }
        tables.append(Study.open(path, settings, quiet=True, trains=True).sweep().trials)
        kills, segments = (len([*path.parent.glob(found)]) for found in ("ranks-*/killed*", "ranks-*"))
        assert kills == (segments if victims != "none" else 0)
    columns = ["trial", "learning_rate", "annealed_loss"]
    first, second = (table[columns].sort_values("trial", ignore_index=True) for table in tables)
    assert first["annealed_loss"].notna().all()
    pd.testing.assert_frame_equal(first, second)


@pytest.mark.soak
@pytest.mark.cluster
def test_a_variant_s_program_is_tuned_and_trained_by_workers_of_ray(
    make: Callable[[str], Path], ray_cluster: None
) -> None:
    path = make("study")
    better = (path.parent / "train.py").read_text().replace("1.5, 0.2, 6.0", "1.5, 0.1, 6.0")
    (path.parent / "better.py").write_text(better)
    table = {
        "compare.stems": [{"width": w, "n_tokens": n} for w, n in ((32, 8192), (64, 16384), (128, 32768))],
        "variants.better.trainer": {
            "command": [sys.executable, "better.py", "--config", "{config}", "--state", "{state}"]
        },
        "variants.same": {},
    }
    found = Study.open(path, table, quiet=True, trains=True).compare()
    assert found.tuned.set_index("variant").loc["better", "rates"] >= 3
    assert {name: found.outcome.verdict(name) for name in ("better", "same")} == {
        "better": "promote",
        "same": "undecided",
    }
    before, starts_before = len(runs_of(path.parent)), starts(path)
    assert Study.open(path, table, quiet=True, trains=True).compare().to_dict() == found.to_dict()
    assert (len(runs_of(path.parent)), starts(path)) == (before, starts_before), "a program ran again"
    assert 'id="variants"' in Study.open(path, table, quiet=True).report().read_text()


def test_what_a_program_cannot_do_is_refused_in_a_sentence(make: Callable[[str], Path]) -> None:
    study = Study.open(make("study"), quiet=True, trains=True)
    refused: dict[str, Callable[[], object]] = {
        "check": study.check,
        "promote": study.promote,
        "continue": lambda: study.continue_run("more.toml"),
        "amend": lambda: study.amend(reason="a test"),
    }
    for stage, call in refused.items():
        with pytest.raises(StageError, match=rf"^{stage}:.*\[trainer\] program; "):
            call()


def test_another_file_wants_another_directory_and_readers_say_what_is_not_described(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("study")
    with pytest.raises(StudyFileError, match=rf"{MEMBERS} is missing"):
        StudyConfig.read(path)
    assert not starts(path)
    Study.open(path, quiet=True, trains=True)
    n = starts(path)
    assert n
    monkeypatch.setattr(counted, "_counted", {})
    study = Study.open(path, quiet=True, trains=True)
    assert starts(path) == n, "described again"
    study.ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    assert json.loads((path.parent / MEMBERS).read_text())["model"]["args"]["step"] == 8
    shutil.copytree(path.parent, moved := path.parent.with_name("moved"))
    Study.open(moved / "study.toml", quiet=True)
    (path.parent / "train.py").write_text("print('{}')\n")
    with pytest.raises(StudyFileError, match="n_params"):
        Study.open(path, quiet=True, trains=True)
    (path.parent / "train.py").write_text((moved / "train.py").read_text() + "# changed\n")
    with pytest.raises(StudyDirectoryError) as refused:
        Study.open(path, quiet=True, trains=True)
    for named in ("model.arguments.digest", "train.py", "sweep.learn_from"):
        assert named in str(refused.value)
    assert "model.arguments.step" not in str(refused.value), "it is the same"


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "fault", ["exits", *(pytest.param(fault, marks=pytest.mark.soak) for fault in ("diverges", "bad row"))]
)
def test_a_sweep_of_trials_that_all_diverge_or_fail_says_so(make: Callable[[str], Path], fault: str) -> None:
    path = make("study")
    row = {"diverges": '{"tokens": 8, "loss": null}', "exits": "", "bad row": "loss: 3"}[fault]
    end = (
        "raise SystemExit('no such thing')"
        if fault == "exits"
        else f"(args.state / 'rows.jsonl').write_text('{row}\\n')"
    )
    program = f"""from pathlib import Path
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--state", type=Path)
parser.add_argument("--describe", action="store_true")
args = parser.parse_args()
width = json.loads(Path(args.config).read_text())["shape"]["width"]
if args.describe:
    print(json.dumps({{"n_params": 1000 * width, "flops_per_token": 1.0}}))
else:
    {STARTS.splitlines()[1]}
        log.write("start\\n")
    {end}
"""
    (path.parent / "train.py").write_text(program)
    study = Study.open(
        path, {"sweep.trials": 3, "sweep.searcher": "random", "plan.compute_flops": 1e12}, quiet=True, trains=True
    )
    named = {"diverges": "3 of 3 trials diverged", "exits": "no such thing", "bad row": "rows.jsonl, line 1"}[fault]
    with pytest.raises(StageError, match=named):
        study.sweep()
    attempts = MOST_FAILED if fault == "exits" else 1  # a bad row stays, and is found before the program starts again
    assert starts(path) == 3 * attempts
    assert len(study.runs()) == (3 if fault == "diverges" else 0)


def test_a_variant_is_trained_by_a_program_of_its_own(make: Callable[[str], Path]) -> None:
    path = make("study")
    better = (path.parent / "train.py").read_text().replace("1.5, 0.2, 6.0", "1.5, 0.1, 6.0")
    (path.parent / "better.py").write_text(better)
    stems = [{"width": 32, "n_tokens": 8192, "branches": 1}]
    command = [sys.executable, "better.py", "--config", "{config}", "--state", "{state}"]
    table = {"compare.stems": stems, "compare.widths": [32, 64], "variants.better.trainer": {"command": command}}
    study = Study.open(path, table, quiet=True, trains=True)
    config, numerics = study.config, study.config.shared_numerics(study.corpus, study.directory)
    worker = Worker(study.ledger, compiled=False)
    own, other = [
        worker.reach(variant.grid_job(config, 32, 0.0).chain).loss or math.nan
        for variant in variants(config, numerics, config.hyperparameters)
    ]
    assert own - other == pytest.approx(0.1, abs=0.01), "what the variant's target lacks of noise"
    with pytest.raises(StudyFileError, match=r"variants\.better\.trainer\.data: .* got 'b'"):
        StudyConfig.read(path, {"variants.better.trainer": {"data": "b"}}, trains=True)
    with pytest.raises(StudyFileError, match=r"variants\.better\.model: .* got n_layers"):
        StudyConfig.read(path, {"variants.better.model": {"n_layers": 2}}, trains=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"{config}", ', "", r"trainer.command: .*an argument with \{config\}"),
        ('"--config"', "3", "trainer.command.2: "),
        (
            "width_step = 8",
            "width_step = 48",
            "trainer.command: d_model must be a multiple of trainer.width_step = 48, got 64",
        ),
        ("width_step = 8", "step = 8", "trainer.step: unknown key"),
        ("d_model = 64", "d_model = 64\ncontext_length = 32", "model.context_length: unknown key"),
        ("[sweep]", "[corpus]\n\n[sweep]", "corpus: the .trainer. program reads its own data"),
        ("[sweep]", "[resources]\nranks_per_trial = 2\n\n[sweep]", "resources.ranks_per_trial: must be 1"),
        ('"train.py"', '"no.py"', "trainer.command: --describe: must exit with 0, got 2"),
    ],
)
def test_each_fault_is_named(make: Callable[[str], Path], old: str, new: str, message: str) -> None:
    path = make("study")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(path, trains=True)
    assert not (path.parent / MEMBERS).exists()
