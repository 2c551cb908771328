"""What is tried again and what is not; what incidents mean for the steps to come; where the wall time went."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muscale import json_lines
from muscale.errors import DivergedError, PreemptedError, StageError
from muscale.full_runs.records import attempts, goodput
from muscale.full_runs.records.goodput import Goodput, measure, record_attempt
from muscale.full_runs.records.preemption import OBEYED
from muscale.full_runs.records.retries import Failure, describe, failures, is_retryable, kind_of, train_with_retries
from muscale.full_runs.train.interventions import Interventions
from muscale.layout import EVALUATIONS, METRICS
from muscale.settings.promote import PromoteSettings, SpikePolicy
from muscale.store.spike_handling import Incident, read_incidents, record_incident
from proxy_models.recipes.batch_ramp import BatchRamp


class RayActorError(Exception):
    """Named as Ray's."""


class WorkerGroupError(Exception):
    """Shaped as Ray Train's."""

    def __init__(self, **of_ranks: Exception) -> None:
        super().__init__("training failed")
        self.worker_failures = dict(enumerate(of_ranks.values()))


GONE = RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PreemptedError("asked to leave"), "preempted"),
        (RayActorError("the actor died"), "lost"),
        (GONE, "lost"),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), "lost"),
        (RuntimeError("Watchdog caught collective operation timeout"), "lost"),
        (ConnectionResetError("reset"), "lost"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
        (torch.OutOfMemoryError("CUDA out of memory"), "device"),
        (OSError(28, "No space left on device"), "device"),
        (DivergedError("promote: the run diverged: the training loss is nan at step 3"), "diverged"),
        (StageError("promote: precision fp16 can't be trained here"), "program"),
        (ValueError("promote.workers must be positive"), "program"),
        (FileNotFoundError("no corpus"), "program"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "unknown"),
    ],
)
def test_errors_are_classified_and_only_the_program_s_own_is_not_retried(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
    assert is_retryable(error) == (kind not in ("diverged", "program"))


def test_of_a_group_of_workers_the_one_that_failed_first_decides_and_not_those_that_lost_it() -> None:
    assert is_retryable(WorkerGroupError(first=RayActorError("killed"), second=GONE))
    assert not is_retryable(WorkerGroupError(first=GONE, second=ValueError("a shape"), third=GONE))


def test_the_same_error_at_the_same_step_twice_comes_again_but_a_peer_may_be_lost_anywhere() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")

    def at(*steps: int, kind: str = "device") -> list[Failure]:
        return [
            Failure(attempt=number, step=step, kind=kind, error="RuntimeError: CUDA error")  # type: ignore[arg-type]
            for number, step in enumerate(steps)
        ]

    assert is_retryable(error, at(7))
    assert is_retryable(error, at(7, 9))
    assert not is_retryable(error, at(7, 7))
    assert not is_retryable(error, at(7, 9, 7))
    assert is_retryable(GONE, at(7, 7, kind="lost"))
    two_ranks = [*at(7), *at(7)]
    assert is_retryable(error, two_ranks), "two ranks of one attempt are one failure"


def ending(directory: Path, *ends: tuple[int, Exception] | None) -> Callable[[], str]:
    """An attempt that ends at a step with an error, each time with the next one, and records it as a rank does."""
    left = iter(ends)

    def attempt() -> str:
        from muscale.full_runs.records import retries

        record_attempt(directory, "start", tokens=0, world_size=1)
        if end := next(left):
            step, error = end
            record_attempt(directory, "stop", rank=0, step=step, **retries.describe(error))
            raise error
        return "done"

    return attempt


def test_retries_continue_while_attempts_make_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muscale.full_runs.records.retries.time.sleep", lambda seconds: None)

    def outcome(name: str, *ends: tuple[int, Exception] | None) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return train_with_retries(ending(tmp_path / name, *ends), tmp_path / name, max_failures=2, failed=Exception)

    cuda, leave = RuntimeError("CUDA error: 719"), PreemptedError("asked to leave")
    assert outcome("lost", (3, GONE), (3, GONE), None) == "done"
    with pytest.raises(StageError, match=r"failed 3 times, promote.max_failures = 2: RuntimeError: .*closed by peer"):
        outcome("often lost", (3, GONE), (3, GONE), (3, GONE))
    with pytest.raises(StageError, match="RuntimeError: CUDA error: 720"):
        outcome("device", (5, cuda), (5, RuntimeError("CUDA error: 720")))
    assert outcome("device", (5, cuda), None) == "done", "the user may have repaired it since"
    assert outcome("preempted", (1, leave), (2, leave), (3, leave), (4, leave), None) == "done"
    with pytest.raises(StageError, match="failed 3 times"):
        outcome("nowhere", (1, leave), (1, leave), (1, leave), (1, leave))
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / OBEYED).touch()  # it has saved, so the next attempt says that it was asked to end
    assert outcome("asked", (1, GONE), (1, leave), (1, leave), (1, leave), None) == "done"
    assert [failure.attempt for failure in failures(tmp_path / "lost")] == [1, 2]
    full = [(step, OSError(errno.ENOSPC, "No space left on device", "run.json")) for step in (3, 5, 7)]
    with pytest.raises(StageError, match=r"run.json:"):
        outcome("disk", *full)


def test_positions_left_out_join_and_lie_at_whole_batches_of_a_ramp() -> None:
    ramp = BatchRamp(batch_tokens=64, doublings=1, ramp_tokens=128)  # batches of 32 up to 128 tokens
    interventions = Interventions(SpikePolicy(action="rollback", max_interventions=3, rewarm_tokens=128), ramp, [])
    assert interventions.around(64) == (64, 96)
    assert interventions.around(96, margin=33) == (32, 192)
    assert interventions.around(0, margin=10) == (0, 64)
    assert interventions.around(192, margin=64) == (128, 320)
    for left_out, back_to in (((64, 96), 0), ((96, 192), 64)):
        incident = Incident(step=1, reason="", action="rollback", left_out=left_out, back_to=back_to, at="")
        interventions.incidents.append(incident)
    assert [interventions.position(tokens) for tokens in (32, 64, 96, 128, 192)] == [32, 192, 192, 192, 192]
    assert [interventions.rewarmth(tokens, 32) for tokens in (0, 64, 128, 192)] == [0.25, 0.25, 0.75, 1.0]
    assert not interventions.is_spent
    interventions.incidents.append(Incident(step=9, reason="", action="restart", back_to=0, at=""))
    assert not interventions.is_spent, "a restart is no intervention"
    interventions.incidents.append(Incident(step=9, reason="", action="skip", left_out=(0, 1), at=""))
    assert interventions.is_spent


def test_incidents_are_read_back_and_a_torn_line_is_none(tmp_path: Path) -> None:
    one = Incident(step=4, reason="a spike", action="rollback", left_out=(1024, 1280), back_to=512, at="now")
    record_incident(tmp_path, one)
    with (tmp_path / "incidents.jsonl").open("a") as file:
        file.write('{"step": 5, "rea')
    assert read_incidents(tmp_path) == [one]
    assert str(one) == "step 4: rollback, back to 512 tokens: a spike"


def test_goodput_is_the_share_of_steps_that_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("muscale.full_runs.records.goodput.time.time", lambda: clock[0])
    record_attempt(tmp_path, "start", tokens=0, world_size=2)
    clock[0] += 50
    record_attempt(tmp_path, "back", tokens=512, repeated_seconds=10.0)
    record_attempt(tmp_path, "start", tokens=512, world_size=1)
    kept = {"step_seconds": 3.0, "evaluation_seconds": 0.5, "blocked_seconds": 0.25}
    json_lines.append(tmp_path / METRICS, *[{**kept, "tokens": 256 * number} for number in range(20)])
    assert goodput.seconds_of(json_lines.read(tmp_path / METRICS)) == 75
    clock[0] += 50
    found = measure(tmp_path, blocked_at_end=1.0)
    assert found == Goodput(wall=100, steps=60, evaluation=10, blocked=6, repeated=10)
    assert (found.share, found.rest) == (0.6, 14)
    message = (
        "goodput 60.0% of 100 s (evaluation 10.0%, checkpoints 6.0%, steps trained again 10.0%, starts and waits 14.0%)"
    )
    assert str(found) == message
    assert Goodput.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert PromoteSettings().spike_policy is None
    assert PromoteSettings().guard is None
    mended = PromoteSettings(on_spike="rollback", rewarm_tokens=512, max_interventions=5)
    assert mended.spike_policy == SpikePolicy(action="rollback", rewarm_tokens=512, max_interventions=5)
    assert mended.guard is not None
    assert mended.guard.action == "skip"
    unmended = PromoteSettings(on_spike="rollback", rewarm_tokens=512)
    assert mended.spike_policy is not None
    assert unmended.spike_policy is not None
    assert (mended.guard, mended.spike_policy.identity) == (unmended.guard, unmended.spike_policy.identity), (
        "the same run"
    )
    with pytest.raises(ValueError, match=r"promote.workers_min must.*promote.workers = 2, got 3"):
        PromoteSettings(workers_min=3)
    with pytest.raises(ValueError, match='promote.rewarm_tokens .*got 9 with "skip"'):
        PromoteSettings(on_spike="skip", rewarm_tokens=9)


def test_evaluations_of_what_is_trained_again_are_forgotten_with_its_steps(tmp_path: Path) -> None:
    json_lines.append(tmp_path / METRICS, *({"tokens": tokens, "seconds": tokens / 100} for tokens in (100, 200, 300)))
    json_lines.append(tmp_path / EVALUATIONS, *({"tokens": tokens, "val_loss": 2.0} for tokens in (100, 200, 300)))
    assert attempts.go_back(tmp_path, 200) == 2.0
    for name in (METRICS, EVALUATIONS):
        assert [row["tokens"] for row in json_lines.read(tmp_path / name)] == [100, 200]


def test_a_restart_names_the_rank_that_failed_and_not_the_peers_that_lost_it(tmp_path: Path) -> None:
    def stop(rank: int, error: Exception) -> None:
        record_attempt(tmp_path, "stop", rank=rank, step=3, **describe(error))

    attempts.Attempt.new(tmp_path).begin(tokens=0, step=0)
    stop(1, torch.OutOfMemoryError("CUDA out of memory"))
    stop(0, GONE)
    _, (first,) = attempts.Attempt.new(tmp_path).begin(tokens=256, step=1)
    assert first.reason == "OutOfMemoryError: CUDA out of memory"
    stop(0, GONE)
    _, (_, second) = attempts.Attempt.new(tmp_path).begin(tokens=256, step=1)
    assert "Connection closed by peer" in second.reason, "where no better reason is known"
    _, (*_, third) = attempts.Attempt.new(tmp_path).begin(tokens=256, step=1)
    assert third.reason == "killed, or the machine was lost"
