"""The start of an attempt claims the run's folder: earlier attempts write no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from muscale import json_lines
from muscale.errors import LeaseLostError
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.records.attempts import Attempt
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.full_runs.train.step_log import StepLog
from muscale.layout import METRICS, RESULT


def two_attempts(directory: Path) -> tuple[Attempt, Attempt]:
    old, new = Attempt.new(directory), Attempt.new(directory)
    old.begin(tokens=0, step=0)
    old.require_last()
    new.begin(tokens=0, step=0)
    return old, new


def test_only_the_last_attempt_writes_steps_and_the_result(tmp_path: Path) -> None:
    old, new = two_attempts(tmp_path)
    row = {"tokens": 256, "val_loss": 2.0, "source_losses": {}, "seconds": 1.0}
    late, log = StepLog(tmp_path / METRICS, old), StepLog(tmp_path / METRICS, new)
    late.record(row)
    with pytest.raises(LeaseLostError):
        late.flush()
    assert not (tmp_path / METRICS).exists()
    log.record(row)
    log.flush()
    assert [written["tokens"] for written in json_lines.read(tmp_path / METRICS)] == [256]
    with pytest.raises(LeaseLostError):
        old.conclude(blocked=0.0)
    assert not (tmp_path / RESULT).exists()
    assert new.conclude(blocked=0.0)["loss"] == 2.0
    assert (tmp_path / RESULT).exists()


def test_the_end_of_an_earlier_attempt_is_not_recorded_as_the_later_one_s(tmp_path: Path) -> None:
    old, new = two_attempts(tmp_path)
    for attempt, n_stops in ((old, 0), (new, 1)):
        with pytest.raises(RuntimeError), attempt.recorded(lambda: 3):
            raise RuntimeError("planted")
        events = [record["event"] for record in json_lines.read(tmp_path / ATTEMPTS)]
        assert events.count("stop") == n_stops


def test_a_checkpoint_of_an_earlier_attempt_changes_no_file(tmp_path: Path) -> None:
    old, _ = two_attempts(tmp_path)
    unfinished = tmp_path / "tokens=256.unfinished"
    unfinished.mkdir()
    (unfinished / "shard").write_text("the later attempt's")
    with pytest.raises(LeaseLostError):
        Checkpoints(tmp_path, before_write=old.require_last).save(None, 256)  # type: ignore[arg-type]
    assert (unfinished / "shard").exists()
