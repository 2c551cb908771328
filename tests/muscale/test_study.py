"""The whole loop on a micro-study: real Ray, two real gloo workers, and a driver killed at three stages and interrupted at one."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

from muscale import Promotion, StageError, Study
from muscale.bundles.bundle import LINEAGE, RUNS
from muscale.bundles.bundle_files import MANIFEST
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.promote.prepared import read
from muscale.layout import BUNDLES, FULL_RUNS, METRICS, REPORT
from muscale.monitoring.calibration import calibrate
from muscale.plans.plan import Plan
from muscale.plans.plan_file import path_of
from muscale.search.sweep import Sweep
from muscale.store.evaluations import score_table
from muscale.store.ledger_tables import ResultKind
from muscale.tracking.trackers import Tracking
from scaling import ScalingFit
from tests.muscale.command_lines import PROMOTED, check_that_a_promoted_study_speaks_json
from tests.muscale.event_files import scalars
from tests.muscale.planted_secrets import PLANTED, holding, leaking_processes

MakeStudy = Callable[..., Path]
OUTCOME = ["purpose", "key", "n_params", "n_tokens", "loss"]


def outcomes(study: Study) -> pd.DataFrame:
    """Runs that inform the plan, without the full run."""
    runs = study.runs()
    return runs[runs["purpose"] != "full"][OUTCOME].sort_values(["purpose", "key"]).reset_index(drop=True)


def segments(ledger: Path) -> dict[str, str]:
    with sqlite3.connect(ledger) as connection:
        return dict(connection.execute("SELECT key, created_at || loss FROM segments"))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "stages",
    [
        (),
        pytest.param(("promote",), marks=pytest.mark.soak),
        pytest.param(("sweep", "transfer", "ladder", "promote"), marks=pytest.mark.soak),
    ],
    ids=lambda stages: "+".join(stages) or "undisturbed",
)
def test_every_stage_runs_and_a_driver_killed_or_interrupted_on_the_way_changes_nothing(
    stages: tuple[str, ...],
    make_study: MakeStudy,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    killed = make_study("killed")
    if not stages:
        shutil.copytree(request.getfixturevalue("planned_study").parent, killed.parent, dirs_exist_ok=True)
    ledger = killed.parent / "ledger.sqlite"
    kept: dict[str, str] = {}
    for stage in stages:
        end_during(stage, killed, signal.SIGINT if stage == "transfer" else signal.SIGKILL)
        assert kept.items() <= segments(ledger).items(), "a recorded segment was trained again or changed"
        kept = segments(ledger)
    assert holding(killed.parent) == [], "a secret of the drivers' environment"

    request.getfixturevalue("ray_cluster")
    resumed = Study.open(killed, ["tracking.tensorboard=true"], quiet=True)
    promotion = resumed.run(force=True)
    assert isinstance(promotion, Promotion)
    assert kept.items() <= segments(ledger).items()
    check_promotion(resumed, promotion)
    assert check_that_a_promoted_study_speaks_json(capfd, killed, tmp_path) == PROMOTED
    check_tracked(resumed, promotion)

    if "ladder" in stages:
        check_that_scores_can_be_measured_later(killed, promotion)
        undisturbed = Study.open(make_study("undisturbed"), quiet=True)
        undisturbed.ladder()
        pd.testing.assert_frame_equal(outcomes(resumed), outcomes(undisturbed))
        assert undisturbed.plan().key == resumed.plan().key

    check_that_another_budget_is_another_plan(resumed, promotion)
    check_that_another_forecast_trains_no_run_again(killed, promotion)

    trained = segments(ledger)
    again = Study.open(killed, quiet=True)
    assert again.run(force=True) == promotion
    assert segments(ledger) == trained


def check_that_scores_can_be_measured_later(path: Path, promotion: Promotion) -> None:
    """Tasks that are added when everything is trained change no training, and their forecast would come too late."""
    write_task(path.parent / "tasks")
    overrides = ['scores.tasks=["words"]', "scores.checkpoints=2", "scores.quantised_bits=[4]", 'scores.prompts=["ab"]']
    before = segments(path.parent / "ledger.sqlite")
    scored = Study.open(path, overrides, quiet=True)
    found = scored.evaluate()
    assert before.items() <= segments(path.parent / "ledger.sqlite").items()
    assert found.plan == promotion.plan
    assert {score.metric for score in found.scores} >= {"accuracy", "probability", "bits_per_byte"}
    assert all(score.measured is not None and score.value is None for score in found.scores)
    table = score_table(scored.ledger)
    losses = table[(table["measure"] == "loss") & (table["metric"] == "loss") & table["anneals"]].set_index("weights")[
        "value"
    ]
    recorded = scored.runs().set_index("key")["loss"]
    assert len(losses) == (scored.runs()["purpose"] == "ladder").sum() + 1
    np.testing.assert_allclose(losses, recorded[losses.index], rtol=1e-4)
    again = Study.open(path, overrides, quiet=True).evaluate()
    assert again == found
    assert len(score_table(scored.ledger)) == len(table)
    assert scored.gallery().exists()


def write_task(folder: Path) -> None:
    """A task whose right choice is a word of the text's beginning, and whose wrong one has letters that the text lacks."""
    folder.mkdir()
    rows = [{"context": "ab ", "choices": [word, "zzyx"], "right": 0} for word in ("abc", "de", "fgh", "ca")]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "words.yaml").write_text(
        "task: words\ndataset_path: json\ndataset_kwargs: {data_files: {test: words.jsonl}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_choice: choices\ndoc_to_target: right\n'
    )


def check_that_another_forecast_trains_no_run_again(path: Path, promotion: Promotion) -> None:
    later = Study.open(path, ["plan.level=0.8"], quiet=True)
    plan = later.plan()
    assert plan.key != promotion.plan
    assert later.promote(plan) == promotion
    assert later.ledger.forecast(plan.key) is None, "its loss is known"


def check_promotion(study: Study, promotion: Promotion) -> None:
    assert promotion.world_size == 2
    assert datetime.fromisoformat(promotion.registered_at) < datetime.fromisoformat(promotion.started_at)
    forecast = study.ledger.forecast(promotion.plan)
    assert forecast is not None
    assert promotion.residual == promotion.loss - forecast["loss"]
    plan = study.plan()
    metrics = pd.read_json(study.directory / FULL_RUNS / plan.key / METRICS, lines=True)
    assert metrics["tokens"].is_monotonic_increasing, "a resumed run repeats no step in its record"
    assert metrics["tokens"].iloc[-1] == plan.n_tokens
    assert metrics["seconds"].is_monotonic_increasing, "the time of all attempts counts"
    assert promotion.seconds == pytest.approx(metrics["seconds"].iloc[-1])
    (full,) = study.runs().query("purpose == 'full'").to_dict("records")
    assert (full["loss"], full["environment"]["world_size"]) == (promotion.loss, 2)
    assert len(study.sweep().trials) == study.config.sweep.trials
    check_what_repetitions_take_of_a_budget(study)
    check_watch(study, promotion)
    check_bundle(study, promotion)
    place = "inside" if promotion.inside else "OUTSIDE"
    assert f"measured   {promotion.loss:.4f}, {place} the interval" in str(study)
    page = (study.directory / REPORT).read_text()
    assert f"{promotion.loss:.4f}" in page
    assert all(f"{source.n_tokens:,}" in page for source in study.corpus.sources.values())
    check_gate(study, promotion)


def check_what_repetitions_take_of_a_budget(study: Study) -> None:
    """Those of the leaders that are known count, as others may lead after more trials."""
    limited = Study.open(study.directory / "study.toml", ["sweep.max_flops=1e12"], quiet=True)
    sweep = Sweep.of(limited.config, limited.ledger, limited.corpus)
    allowed = sweep.engine(sweep.record(), lambda result: None, lambda *run: None).budget
    assert allowed.repeated_tokens == allowed.n_finalists * allowed.repeat_tokens > 0


def check_tracked(study: Study, promotion: Promotion) -> None:
    """Every trial, the full run with its forecast and the study as a whole, though drivers before this one were killed."""
    folder = study.directory / "tracking" / "tensorboard"
    assert len(list((folder / "trial").iterdir())) == study.config.sweep.trials
    (full,) = (folder / "full").iterdir()
    found = scalars(full)
    end = study.plan().n_tokens
    assert found["val_loss", end] == [pytest.approx(promotion.loss)]
    assert found["forecast/loss", end] == pytest.approx([promotion.forecast] * 2), (
        "beside the training and the evaluation"
    )
    curve = sorted(at for name, at in found if name == "train_loss")
    assert curve[-1] == end
    assert all(len(found["train_loss", at]) == 1 for at in curve)
    (whole,) = (folder / "study").iterdir()
    assert (whole / REPORT).exists()
    assert (whole / "plan.toml").exists()
    assert Tracking(study.config, study.ledger).sync().updated.keys() == {"tensorboard"}


def check_gate(study: Study, promotion: Promotion) -> None:
    """Shown again, what it let through, and by the plan's file the same promotion."""
    seen = study.dry_run().gate
    assert promotion.gate is not None
    kept = {line["name"]: line["status"] for line in promotion.gate["lines"]}
    assert kept == {line.name: line.status for line in seen.lines}
    assert {kept[name] for name in ("coordinate check", "data", "hyperparameters", "layout", "disk")} == {"passed"}
    assert promotion.forced_lines == seen.failed
    assert promotion.forced is not seen.passed
    path = path_of(study.directory, promotion.plan)
    assert study.promote(path) == study.promote(promotion.plan) == promotion


def check_watch(study: Study, promotion: Promotion) -> None:
    """The run that the workers trained, compared with a band that was registered before it began."""
    watch = study.watch()
    assert (watch.promotion, watch.measured, watch.asserted) == (promotion, promotion.loss, False)
    assert watch.evaluations["tokens"].iloc[-1] == watch.n_tokens == study.plan().n_tokens
    assert watch.inside is promotion.inside
    assert "at least 100 steps under the plan's schedule" in watch.band.reason, "the micro-study's ladder is too short"
    begun = {
        kind: (study.ledger.latest_result(kind) or {})["created_at"]
        for kind in (ResultKind.BAND, ResultKind.PROMOTION_STARTED)
    }
    assert begun[ResultKind.BAND] < begun[ResultKind.PROMOTION_STARTED]
    assert list(calibrate(study.ledger).table["plan"]) == [promotion.plan]


def check_bundle(study: Study, promotion: Promotion) -> None:
    """Of a run that two ranks trained: written in one process, with the lineage from the sweep to the residual."""
    with pytest.raises(StageError, match=r"\b9\b.*\b2;"):
        study.bundle(average=9)
    assert (study.directory / BUNDLES / promotion.plan).is_dir(), "the run's end is a bundle"
    bundle = study.bundle()
    written = (bundle.path / MANIFEST).stat().st_mtime_ns
    assert bundle.path.parent == study.directory / BUNDLES
    assert study.bundle().path == bundle.path
    assert (bundle.path / MANIFEST).stat().st_mtime_ns == written, "it is written once"
    lineage = bundle.read(LINEAGE)
    assert lineage["caveats"] == []
    assert lineage["sweep"]["winner"] == study.sweep().winner
    assert lineage["transfer"]["verdict"] == promotion.verdict
    assert lineage["plan"]["key"] == promotion.plan
    assert lineage["promotion"]["residual"] == promotion.residual
    forecast = ScalingFit.from_dict(lineage["fit"]).forecast(study.plan().n_params, study.plan().n_tokens)
    assert forecast.loss == pytest.approx(promotion.forecast)
    assert set(pd.read_csv(bundle.path / RUNS)["key"]) == set(study.runs()["key"])
    loss = evaluate_unsharded(bundle.decoder(), study.corpus, bundle.numerics)["val_loss"]
    assert loss == pytest.approx(promotion.loss, rel=1e-4)


def test_a_study_without_a_promoted_run_has_no_bundle(make_study: MakeStudy) -> None:
    with pytest.raises(StageError, match="`muscale promote` first"):
        Study.open(make_study(), quiet=True).bundle()


def check_that_another_budget_is_another_plan(study: Study, promotion: Promotion) -> None:
    """Registered next to the study file's, which the report still shows, with runs for a narrower forecast."""
    trained = len(study.runs())
    further = study.next_runs()
    assert further.result.now.n_params == study.plan().n_params
    other = study.plan(compute_flops=4e10)
    assert study.ledger.forecast(other.key) is None
    assert not path_of(study.directory, other.key).exists()
    other = study.register(other)
    assert study.plan(compute_flops=4e10) == study.register(other) == other
    for spent in (1e5, 1e99):
        with pytest.raises((StageError, ValueError), match="FLOPs"):
            study.plan(compute_flops=spent)
    assert 2.5e10 < other.compute_flops <= 4e10 * 1.01
    assert other.key != promotion.plan
    assert study.next_runs(other).share == pytest.approx(further.affordable_flops / other.compute_flops, rel=0.5)
    assert study.ledger.latest_forecast()["plan"] == other.key  # type: ignore[index]
    page = study.report().read_text()
    assert f"measured {promotion.loss:.4f}" in page
    assert "What to run next" in page
    assert len(study.runs()) == trained
    assert study.promote(study.plan()) == promotion
    check_that_a_run_may_be_prepared(study, other)


def check_that_a_run_may_be_prepared(study: Study, other: Plan) -> None:
    """Its beginning is entered, after its forecast, and what ranks without Ray take is written; an ended run is not."""
    prepared = study.prepare(other, force=True)
    begun = study.ledger.result(ResultKind.PROMOTION_STARTED, other.key)
    assert begun is not None
    assert other.registered_at is not None
    assert datetime.fromisoformat(other.registered_at) < datetime.fromisoformat(begun["at"])
    assert read(Path(prepared.path)).segments == other.segments
    with pytest.raises(StageError, match="has already been trained to its end"):
        study.prepare(study.plan())


def end_during(stage: str, study: Path, how: signal.Signals) -> None:
    """Run the study in a process of its own and send it the signal once the stage is under way."""
    reached = {
        "sweep": lambda: count(study, "SELECT count(*) FROM rungs") > 0,
        "transfer": lambda: count(study, "SELECT count(*) FROM runs WHERE purpose = 'transfer'") > 0,
        "ladder": lambda: count(study, "SELECT count(*) FROM runs WHERE purpose = 'ladder'") > 0,
        "promote": lambda: any(study.parent.glob(f"{FULL_RUNS}/*/checkpoints/tokens=*/manifest.json")),
    }[stage]
    log = (study.parent / f"{stage}.log").open("w")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # A shell's background job ignores SIGINT, which children inherit; a handler they do not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    driver = subprocess.Popen(
        [sys.executable, "-m", "muscale", "run", str(study), "--force"],
        stdout=log,
        stderr=log,
        env=environment | PLANTED,
    )
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 600
    try:
        while not reached():  # type: ignore[no-untyped-call]
            log.flush()
            output = (study.parent / f"{stage}.log").read_text()
            assert driver.poll() is None, f"the study ended before its {stage} could be killed:\n{output}"
            assert time.monotonic() < deadline, f"{stage} was not reached:\n{output}"
            time.sleep(0.02)
        assert leaking_processes() == [], "while a driver, its Ray and its workers run"
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(how)
        code = driver.wait(timeout=600)
    finally:
        driver.kill()  # nothing, if it has ended
        driver.wait()
        log.close()
    if how == signal.SIGINT:
        assert code == 130
        assert "run the same command again to resume" in (study.parent / f"{stage}.log").read_text()
    _, alive = psutil.wait_procs(family, timeout=10)
    for process in alive:  # what Ray left behind, ended by id
        process.kill()
    psutil.wait_procs(alive, timeout=10)


def count(study: Path, query: str) -> int:
    try:
        with sqlite3.connect(f"file:{study.parent / 'ledger.sqlite'}?mode=ro", uri=True) as connection:
            return int(connection.execute(query).fetchone()[0])
    except sqlite3.OperationalError:  # not there yet
        return 0
