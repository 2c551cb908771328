"""A run trained elsewhere: a growing file, bad input, and that it is never taken for a promoted run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from muscale import StageError, Study
from muscale.findings import Findings
from muscale.layout import EXTERNAL_RUNS
from muscale.monitoring.calibration import calibrate
from muscale.monitoring.external_run import ExternalRun
from muscale.monitoring.losses import LossSource
from muscale.monitoring.monitor import Monitor
from muscale.monitoring.run_status import RunStatus
from muscale.store.ledger_tables import ResultKind
from proxy_models.recipes.batch_ramp import BatchRamp
from tests.muscale.command_lines import muscale
from tests.muscale.planted_ladder import OFFSET, PlantedPlan, log_ratio, registered_plan

MakeStudy = Callable[..., Path]


class Elsewhere(PlantedPlan):
    """A registered plan with its band, and a table that somebody else writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.table = path.parent / "losses.csv"

    def watch(self, **columns: Any) -> RunStatus:
        """The status after one look at the table."""
        return Monitor(self.ledger, losses=LossSource(losses=self.table, **columns), alarm_after=3).look()

    def write(self, *shares: float, off: float = 1.0, header: bool = False, newline: bool = True) -> None:
        tokens = [round(share * self.plan.n_tokens) for share in shares]
        losses = [self.band.loss * math.exp(float(log_ratio(np.array(share)))) * off for share in shares]
        lines = [f"{at},{loss}" for at, loss in zip(tokens, losses, strict=True)]
        with self.table.open("a") as file:
            file.write("\n".join([*(["tokens,loss"] if header else []), *lines]) + ("\n" if newline else ""))


@pytest.fixture
def elsewhere(make_study: MakeStudy) -> Iterator[Elsewhere]:
    elsewhere = Elsewhere(make_study())
    yield elsewhere
    elsewhere.ledger.close()


def test_a_table_is_watched_and_its_end_is_recorded_as_asserted(elsewhere: Elsewhere) -> None:
    elsewhere.write(0.2, 0.5, header=True)
    status = elsewhere.watch()
    assert list(status.evaluations["place"]) == ["inside", "inside"]
    assert status.asserted
    assert "external run of plan" in str(status)
    elsewhere.write(0.9999)
    status = elsewhere.watch()
    assert status.promotion is not None
    assert status.promotion.asserted
    assert status.promotion.inside
    assert status.promotion.residual == pytest.approx(0, abs=2e-3)
    assert "elsewhere" in str(status)
    assert elsewhere.ledger.result(ResultKind.PROMOTION, elsewhere.plan.key) is None, "it is none of ours"
    elsewhere.write(1.0, off=2)
    assert elsewhere.watch().promotion == status.promotion, "the residual is final"
    assert Monitor(elsewhere.ledger, alarm_after=3).look().promotion == status.promotion, "without the table, too"


def test_what_was_seen_first_is_kept(elsewhere: Elsewhere) -> None:
    elsewhere.write(0.2, 0.9, header=True)
    elsewhere.watch()
    started = elsewhere.ledger.result(ResultKind.EXTERNAL_RUN_STARTED, elsewhere.plan.key) or {}
    assert started["share"] == pytest.approx(0.9, abs=0.01)
    assert started["source"] == str(elsewhere.table)


def test_a_line_that_is_half_written_waits(elsewhere: Elsewhere) -> None:
    elsewhere.write(0.2, 0.5, header=True, newline=False)
    assert len(LossSource(losses=elsewhere.table, growing=True).read()) == 1
    assert len(LossSource(losses=elsewhere.table).read()) == 2


def test_a_null_is_no_divergence_where_the_row_has_another_loss(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"tokens": 256, "train_loss": 3.0, "val_loss": null}\n'
        '{"tokens": 512, "train_loss": null, "val_loss": 2.5}\n'
        '{"tokens": 768, "train_loss": null, "val_loss": null}\n'
    )
    first, second, third = LossSource(losses=path).read()
    assert (first["train_loss"], second["val_loss"]) == (3.0, 2.5)
    assert "val_loss" not in first
    assert "train_loss" not in second
    assert math.isnan(third["val_loss"])
    (own,) = LossSource(losses=path, loss_column="val_loss").read()[1:2]
    assert own["val_loss"] == 2.5
    path.write_text('{"tokens": 512, "train_loss": 3.0, "lm_loss": null}\n')
    (row,) = LossSource(losses=path, loss_column="lm_loss").read()
    assert math.isnan(row["val_loss"])


def test_a_run_that_was_set_back_counts_as_it_went_on(elsewhere: Elsewhere) -> None:
    elsewhere.write(0.2, 0.5, 0.6, header=True)
    elsewhere.write(0.4, 0.5)
    status = elsewhere.watch()
    assert status.evaluations["share"].to_numpy() == pytest.approx([0.2, 0.4, 0.5], abs=0.01)


@pytest.mark.parametrize("order", ["newest first", "held-out losses, then training losses", "the reverse"])
def test_no_loss_is_dropped_for_the_order_of_a_table_s_rows(elsewhere: Elsewhere, order: str) -> None:
    n_tokens = elsewhere.plan.n_tokens
    held_out = [f"{n_tokens * n // 4},{1 + 1 / n}," for n in (1, 2, 3, 4)]
    training = [f"{n_tokens * n // 16},,{1.1 + 1 / n}" for n in range(1, 17)]
    rows = held_out[::-1] if order == "newest first" else held_out + training
    elsewhere.table.write_text(
        "\n".join(["tokens,val_loss,train_loss", *(training + held_out if order == "the reverse" else rows)]) + "\n"
    )
    status = elsewhere.watch()
    assert status.evaluations["loss"].to_list() == [2.0, 1.5, pytest.approx(4 / 3), 1.25]
    assert len(status.curve) == (0 if order == "newest first" else 16)
    assert status.promotion is not None
    assert status.promotion.loss == 1.25


def test_training_losses_that_go_back_set_the_held_out_ones_back_too(elsewhere: Elsewhere) -> None:
    quarter = elsewhere.plan.n_tokens // 4
    rows = [f"{quarter},,3.0", f"{quarter},2.9,", f"{2 * quarter},,2.5", f"{2 * quarter},2.4,", f"{quarter},,3.1"]
    elsewhere.table.write_text("\n".join(["tokens,val_loss,train_loss", *rows]) + "\n")
    status = elsewhere.watch()
    assert status.evaluations["loss"].to_list() == [2.9]
    assert status.curve["train_loss"].to_list() == [3.1]


def test_steps_are_the_plan_s_batches(elsewhere: Elsewhere) -> None:
    batch, n_tokens = elsewhere.plan.hyperparameters.batch_tokens, elsewhere.plan.n_tokens
    elsewhere.table.write_text(f"global_step,nll\n{n_tokens // batch // 2},3.0\n")
    (row,) = elsewhere.watch(tokens_column="global_step", loss_column="nll").evaluations.to_dict("records")
    assert row["tokens"] == n_tokens // batch // 2 * batch


def test_steps_of_a_growing_batch_are_counted_once_for_all_rows(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = elsewhere.plan.hyperparameters
    ramped = replace(h, batch_tokens=2 * h.batch_tokens, batch_doublings=1, batch_ramp_tokens=4 * h.batch_tokens)
    asked: list[int] = []
    steps = BatchRamp.steps

    def counted(ramp: BatchRamp, start: int, end: int) -> Iterator[tuple[int, int]]:
        asked.append(end)
        return steps(ramp, start, end)

    monkeypatch.setattr(BatchRamp, "steps", counted)
    n_tokens = ramped.whole_batches(elsewhere.plan.n_tokens)
    plan = replace(elsewhere.plan, hyperparameters=ramped, n_tokens=n_tokens)
    run = ExternalRun(elsewhere.ledger, LossSource(losses=pd.DataFrame()))
    run.plan = plan
    records = run.records([{"step": float(step), "val_loss": 3.0} for step in range(1, 9)])
    assert len(asked) == 1
    assert [record["tokens"] for record in records] == [h.batch_tokens * n for n in (1, 2, 3, 4, 6, 8, 10, 12)]


def test_training_losses_alone_are_held_against_the_band_by_the_ladder_s_offset(elsewhere: Elsewhere) -> None:
    generator = np.random.default_rng(0)
    n_steps = elsewhere.plan.n_tokens // 256
    share = np.arange(1, n_steps + 1) / n_steps
    losses = elsewhere.band.loss * np.exp(log_ratio(share) - OFFSET + 0.01 * generator.standard_normal(n_steps))
    lines = [f"{n},{loss}" for n, loss in enumerate(losses, start=1)]
    elsewhere.table.write_text("\n".join(["step,train_loss", *lines]) + "\n")
    status = elsewhere.watch()
    held = status.evaluations[status.evaluations["place"] != "before the band"]
    assert len(held) >= 15
    assert (held["place"] == "inside").all()
    off = np.log(held["loss"] / (elsewhere.band.loss * np.exp(log_ratio(held["share"].to_numpy()))))
    assert off.abs().max() < 0.02
    assert len(status.curve) == n_steps
    assert not status.ended, "the end wants a held-out loss"


def test_a_loss_that_is_not_finite_is_a_failure_until_the_run_resumes(elsewhere: Elsewhere) -> None:
    elsewhere.write(0.2, header=True)
    elsewhere.write(0.3, off=math.nan)
    status = elsewhere.watch()
    assert "not finite after" in (status.failure or "")
    assert status.alarming
    elsewhere.write(0.25, 0.3)
    assert elsewhere.watch().failure is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,loss\n1,2\n", "no column tokens or step; the columns are time, loss"),
        ("tokens,perplexity\n1,2\n", "no column loss, val_loss or train_loss"),
        ("tokens,loss\n1,2\n2,many\n", "line 3, loss: must be a number, got 'many'"),
        ("tokens,loss\n,2\n", "line 2, tokens: must be a number"),
        ("tokens,loss\n-5,2\n", "must be finite and not negative, got -5"),
        ("", "the columns are none"),
    ],
)
def test_a_table_that_can_t_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "losses.csv"
    path.write_text(text)
    with pytest.raises(StageError, match=message):
        LossSource(losses=path).read()


def test_a_table_of_another_run_is_refused(elsewhere: Elsewhere) -> None:
    elsewhere.write(0.2, 1.2, header=True)
    with pytest.raises(StageError, match="must be a run of the .* tokens of plan"):
        elsewhere.watch()
    with pytest.raises(StageError, match="is a directory, not a file"):
        LossSource(losses=elsewhere.table.parent).read()


def test_rows_without_a_loss_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    path.write_text("tokens,val_loss,train_loss\n1,,3\n2,2.5,2.9\n3,,\n")
    assert LossSource(losses=path).read() == [
        {"tokens": 1, "train_loss": 3.0},
        {"tokens": 2, "val_loss": 2.5, "train_loss": 2.9},
    ]


def test_weights_and_biases_wants_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(StageError, match="WANDB_API_KEY is not set"):
        LossSource(losses="wandb:entity/project/run").read()


class LoggedRun:
    """A run of Weights & Biases, with W&B's own step count in each row."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def scan_history(self) -> list[dict[str, Any]]:
        return [{"_step": at, "_timestamp": 1.0, **row} for at, row in enumerate(self._rows)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"train_loss": 3.0}, {"val_loss": 2.5}], [{"step": 0, "train_loss": 3.0}, {"step": 1, "val_loss": 2.5}]),
        (
            [{"train_loss": 3.0, "tokens": 64, "lr": 1}, {"lr": 2}, {"val_loss": "NaN", "tokens": 128}],
            [{"tokens": 64, "train_loss": 3.0}, {"tokens": 128, "val_loss": math.nan}],
        ),
        (
            [{"train_loss": 3.0, "tokens": 64}, {"val_loss": 2.5}],
            [{"step": 0, "train_loss": 3.0}, {"step": 1, "val_loss": 2.5}],
        ),
    ],
)
def test_the_usual_keys_of_weights_and_biases_are_read(
    rows: list[dict[str, Any]], expected: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    class Api:
        def run(self, path: str) -> LoggedRun:
            assert path == "entity/project/run"
            return LoggedRun(rows)

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(wandb, "Api", Api)
    found = LossSource(losses="wandb:entity/project/run").read()
    assert [pytest.approx(row, nan_ok=True) for row in expected] == found
    with pytest.raises(StageError, match="perplexity"):
        LossSource(losses="wandb:entity/project/run", loss_column="perplexity").read()


def test_a_column_of_steps_counts_steps_whatever_its_capitals(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    path.write_text("Step,loss\n10,2.5\n")
    assert LossSource(losses=path, tokens_column="Step").read() == [{"step": 10.0, "val_loss": 2.5}]


def test_the_command_follows_a_growing_file_to_its_end(
    elsewhere: Elsewhere, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere.write(0.2, header=True)
    done = muscale(capsys, "watch", elsewhere.study, "--losses", elsewhere.table, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["asserted"] is True
    command = [
        sys.executable,
        "-m",
        "muscale",
        "watch",
        elsewhere.study,
        "--losses",
        elsewhere.table,
        "--follow",
        "--every",
        "0.2",
    ]
    process = subprocess.Popen([*map(str, command)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        for share in (0.5, 0.8, 1.0):
            time.sleep(1.5)
            elsewhere.write(share)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "inside the interval" in output
    assert muscale(capsys, "watch", elsewhere.study).code == 0
    history = muscale(capsys, "calibration", elsewhere.study)
    assert "1 of 1 runs trained elsewhere inside, nominal 90%: 100%" in history.out


def test_exit_codes_report_alarms_and_missing_runs(elsewhere: Elsewhere, capsys: pytest.CaptureFixture[str]) -> None:
    assert muscale(capsys, "watch", elsewhere.study).code == 2
    elsewhere.write(0.2, header=True)
    elsewhere.write(0.3, 0.4, 0.5, off=2)
    done = muscale(capsys, "watch", elsewhere.study, "--losses", elsewhere.table)
    assert done.code == 1, done.err
    assert "alarm: the loss of plan" in done.out
    assert muscale(capsys, "watch", elsewhere.study, "--until", "alarm").code == 1
    assert muscale(capsys, "watch", elsewhere.study, "--until", "now", "--plan", "nothing").code == 2


def test_a_dataframe_is_watched_like_a_file(elsewhere: Elsewhere) -> None:
    study = Study.open(elsewhere.study, quiet=True)
    tokens = [elsewhere.plan.n_tokens / 4, elsewhere.plan.n_tokens / 2]
    frame = pd.DataFrame({"tokens": tokens, "val_loss": [math.nan, elsewhere.band.loss * 1.1]})
    status = study.watch(frame)
    assert len(status.evaluations) == 1, "NaN was not logged"
    assert status.asserted
    assert study.watch().tokens == status.tokens
    assert calibrate(study.ledger).table.empty
    study.ledger.close()


def test_losses_go_to_the_plan_that_is_named_and_never_to_the_one_registered_last(
    elsewhere: Elsewhere, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere.write(0.2, header=True)
    other = registered_plan(elsewhere.study, elsewhere.ledger, "plan.compute_flops=4e10")
    folder = elsewhere.ledger.directory / EXTERNAL_RUNS
    command = ("watch", elsewhere.study, "--losses", elsewhere.table)
    assert muscale(capsys, *command).code == 2, "two are registered, and without a ladder the settings name none"
    assert not folder.exists()

    study = Study.open(elsewhere.study, quiet=True)
    study._stages.known = Findings(plan=elsewhere.plan)
    assert study.watch(elsewhere.table).plan == elsewhere.plan.key
    study._stages.known = Findings(plan=replace(other, key="fedcba9876543210"))
    with pytest.raises(StageError):
        study.watch(elsewhere.table)
    assert [path.name for path in folder.iterdir()] == [elsewhere.plan.key]
    assert study.ledger.result(ResultKind.EXTERNAL_RUN_STARTED, other.key) is None
    assert muscale(capsys, *command, "--plan", other.key).code == 0
    assert {path.name for path in folder.iterdir()} == {elsewhere.plan.key, other.key}
    study.ledger.close()


def test_a_plan_that_was_promoted_here_has_its_own_run(elsewhere: Elsewhere) -> None:
    elsewhere.ledger.record_result(
        ResultKind.PROMOTION_STARTED, elsewhere.plan.key, {"at": "2026-01-02T03:04:05+00:00"}
    )
    study = Study.open(elsewhere.study, quiet=True)
    with pytest.raises(StageError, match=f"plan {elsewhere.plan.key}"):
        study.watch(pd.DataFrame({"tokens": [1], "val_loss": [1.0]}))
    assert not (elsewhere.ledger.directory / EXTERNAL_RUNS).exists()
    study.ledger.close()
