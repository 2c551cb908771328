"""A training program's process: its rows as they come, its end judged, nothing of it left behind."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from muscale.errors import TrainerError
from muscale.machine.trainer_checks import SMALL
from muscale.programs.program_process import TrainerStatus, describe, train
from muscale.programs.protocol import TrainerJob, rows_of

PROGRAM, RANKS = (Path(__file__).parents[1] / name for name in ("training_program.py", "ranks_program.py"))
JOB = replace(SMALL, width=4)


def command(fault: str) -> tuple[str, ...]:
    return (sys.executable, "-S", str(PROGRAM), fault, "{config}", "{state}")


class InterruptedByTestError(Exception):
    pass


def test_a_training_ended_at_any_row_and_run_again_ends_at_the_same_loss_and_trains_no_row_twice(
    tmp_path: Path,
) -> None:
    whole = train(command("none"), JOB, tmp_path / "whole")
    assert whole.status is TrainerStatus.FINISHED
    assert len(whole.rows) == 16

    def interrupt(_tokens: int, _loss: float) -> None:
        raise InterruptedByTestError

    resumed: list[int] = []
    with pytest.raises(InterruptedByTestError):
        train(command("none"), JOB, tmp_path / "ended", on_row=interrupt)
    end = train(command("none"), JOB, tmp_path / "ended", on_row=lambda tokens, _: resumed.append(tokens))
    assert end.rows == whole.rows
    assert end.loss == whole.loss
    assert min(resumed, default=JOB.end) > 1024
    again = train(command("none"), JOB, tmp_path / "ended", on_row=lambda *_: pytest.fail("trained again"))
    assert again.loss == whole.loss


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    end = train(command("hangs"), JOB, tmp_path, stall_seconds=4.0)  # longer than it takes to start on a busy machine
    assert end.status is TrainerStatus.STALLED
    assert "4 s" in end.reason
    for child in json.loads((tmp_path / "state" / "children").read_text()):
        with suppress(psutil.NoSuchProcess):  # init reaps the children of a program that is gone
            psutil.Process(child).wait(timeout=5)


def torchrun(victims: str, folder: Path) -> tuple[str, ...]:
    """Two ranks of a program that is copied into the folder."""
    program = shutil.copy(RANKS, folder)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return (*launcher, str(program), victims, "{config}", "{state}")


def ranks_of(folder: Path, start: int) -> dict[int, int]:
    """The tokens from which each rank of a start went on, by its process."""
    return {int(one.suffix[1:]): int(one.read_text()) for one in folder.glob(f"ranks-*/started{start}.*")}


@pytest.mark.soak
def test_ranks_under_torchrun_all_end_when_they_are_interrupted(tmp_path: Path) -> None:
    def interrupt(_tokens: int, _loss: float) -> None:
        raise InterruptedByTestError

    with pytest.raises(InterruptedByTestError):
        train(torchrun("none", tmp_path), JOB, tmp_path / "ended", on_row=interrupt)
    ranks = ranks_of(tmp_path, 0)
    assert len(ranks) == 2
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.soak
def test_ranks_whose_torchrun_or_whose_peer_is_killed_end_and_go_on_from_their_state(tmp_path: Path) -> None:
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    for folder in (whole, killed):
        folder.mkdir()
    expected = train(torchrun("none", whole), JOB, whole / "run")
    assert expected.status is TrainerStatus.FINISHED
    assert len(expected.rows) == 16
    ends = []
    for start in range(3):
        ends.append(train(torchrun("torchrun,rank", killed), JOB, killed / "run"))
        assert not any(map(psutil.pid_exists, ranks_of(killed, start)))
    assert [end.status for end in ends] == [TrainerStatus.FAILED, TrainerStatus.FAILED, TrainerStatus.FINISHED]
    assert [{*ranks_of(killed, start).values()} for start in range(3)] == [{0}, {6144}, {11264}]
    assert ends[-1].rows == expected.rows


def test_a_program_ends_with_whoever_runs_it_and_one_that_does_not_is_ended_before_the_next(tmp_path: Path) -> None:
    """A killed caller leaves no program behind."""
    script = "import sys; from pathlib import Path; from tests.muscale.programs.test_program_process import *; "
    script += "train(command('hangs'), JOB, Path(sys.argv[1]))"
    caller = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    record = tmp_path / "process.json"
    while not record.exists() or not record.read_text():
        time.sleep(0.01)
    pid, created = json.loads(record.read_text())
    program = psutil.Process(pid)
    assert program.create_time() == created
    caller.kill()
    caller.wait()
    if sys.platform == "linux":
        with suppress(psutil.NoSuchProcess):
            program.wait(timeout=10)

    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    record.write_text(json.dumps([left.pid, psutil.Process(left.pid).create_time()]))
    train(command("none"), JOB, tmp_path)
    assert left.poll() is not None


def test_a_loss_that_is_not_finite_is_a_result_and_an_exit_code_a_failure(tmp_path: Path) -> None:
    far = replace(JOB, hyperparameters={**JOB.hyperparameters, "learning_rate": 1e9})
    assert train(command("none"), far, tmp_path / "far").status is TrainerStatus.DIVERGED
    crashed = train(command("crashes"), JOB, tmp_path / "crashed")
    assert crashed.status is TrainerStatus.FAILED
    assert crashed.reason == "exit code 1: MemoryError: out of memory"


@pytest.mark.parametrize("loss", [-1.5, 0.0, "3.2", True])
def test_a_loss_that_has_no_logarithm_or_is_no_number_is_refused_at_its_row(loss: float | str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"tokens": 1024, "loss": loss}) + "\n")
    with pytest.raises(TrainerError):
        rows_of(path, JOB)


@pytest.mark.parametrize("loss", [None, float("nan"), "NaN", "Infinity", "-Infinity"])
def test_a_loss_that_is_not_finite_is_a_divergence_as_programs_write_it(
    loss: float | str | None, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"tokens": 1024.0, "loss": loss}) + "\n")
    assert rows_of(path, JOB) == {1024: float("inf")}


@pytest.mark.parametrize("fault", ["warns", "speaks after"])
def test_lines_after_the_description_are_no_fault(fault: str) -> None:
    assert describe(command(fault), JOB) == describe(command("none"), JOB)


@pytest.mark.parametrize("inside", ["\u2028", "\x85", "\u2029"])
def test_a_row_ends_at_a_newline_alone(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"tokens": 1024, "loss": 3.0, "sample": f"a{inside}b"}, ensure_ascii=False)
    path.write_bytes(f"{row}\n{row[:-9]}\u00e9".encode()[:-1])  # then a line that is torn within a letter
    assert rows_of(path, JOB) == {1024: 3.0}


def test_rows_written_again_count_once_and_a_torn_one_not_yet(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [(1024, 3.0), (2048, 2.0), (1024, 2.5)]
    path.write_text("".join(json.dumps({"tokens": at, "loss": loss}) + "\n" for at, loss in rows) + '{"tokens": 20')
    assert rows_of(path, JOB) == {1024: 2.5}
    path.write_text('{"tokens": 99999, "loss": 1.0}\n')
    with pytest.raises(TrainerError, match="up to tokens.to = 16,384, got 99999"):
        rows_of(path, JOB)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("python", "{config}"), "must have an argument with {state}"),
        (("no-such-program", "{config}", "{state}"), "can't be started: no such program"),
    ],
)
def test_a_command_that_cannot_be_used_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=message):
        train(words, JOB, tmp_path)


def test_a_job_must_go_forward() -> None:
    with pytest.raises(TrainerError, match="below tokens.to"):
        replace(JOB, start=JOB.end)
    with pytest.raises(TrainerError, match="must ascend"):
        TrainerJob(width=1, depth=1, hyperparameters={}, schedule=((2, 1.0), (1, 1.0)), end=1)
