"""Steps of the full run: the host waits for the device at every k-th only, and a spike is left out on the device."""

from __future__ import annotations

import gc
import gzip
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.full_runs.train import rank_flags
from muscale.full_runs.train.attempt import train
from muscale.full_runs.train.module import FullRunModule
from muscale.full_runs.train.operations import Garbage, finishes
from muscale.full_runs.train.rank_flags import RankFlags
from muscale.full_runs.train.step_log import StepLog
from muscale.layout import PROFILE
from muscale.settings.promote import PromoteSettings, SpikePolicy
from muscale.store.spike_handling import read_incidents
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.step import Stepper
from tests.muscale.forked_ranks import BATCH, STEPS, ended, losses, result, rows, start, train_on
from tests.quick import quick_and_soak

READS = ("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "new_tensor")
BOUNDARIES = {0, 1, 6, 12, 16}  # before the first step, after it, the checkpoints, the end
SPIKE = 9
Patch = Callable[[Any, str, Any], None]


def skipping(run: FullRun, **policy: Any) -> FullRun:
    numerics = replace(run.numerics, guard=GuardSettings(window=8, threshold=20.0))
    return replace(run, numerics=numerics, on_spike=SpikePolicy(action="skip", **policy))


def with_spike(patch: Patch, factor: float = 100.0, *, at: int = SPIKE) -> None:
    """Scale the loss of one step."""
    step = Stepper.step

    def scaled(self: Stepper, sequences: Tensor, *, number: int, **given: Any) -> tuple[Tensor, Tensor]:
        loss, usual = self._loss, factor if number == at else 1.0
        self._loss = lambda module, batch: loss(module, batch) * usual
        try:
            return step(self, sequences, number=number, **given)
        finally:
            self._loss = loss

    patch(Stepper, "step", scaled)


def count_reads(patch: Patch, written: Path) -> None:
    """Write after how many steps the host read a tensor, for each of its reads from the first step to the last."""
    steps: list[int] = []
    reads: list[tuple[int, str]] = []
    taken, flush = FullRunModule.take_step, FullRunModule.on_train_end
    patch(rank_flags, "MOST_SECONDS", float("inf"))  # however slow the machine is

    def take_step(self: FullRunModule) -> None:
        steps.append(len(steps))
        taken(self)

    def counted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if steps and threading.current_thread() is threading.main_thread():  # others write a checkpoint
                reads.append((len(steps), name))
            return read(self, *args, **kwargs)

        return method

    def on_train_end(self: FullRunModule) -> None:
        written.write_text(json.dumps(reads))
        steps.clear()
        flush(self)

    for name in READS:
        patch(Tensor, name, counted(name, getattr(Tensor, name)))
    patch(FullRunModule, "take_step", take_step)
    patch(FullRunModule, "on_train_end", on_train_end)


def on_rank(folder: Path, rank: int) -> None:
    """As a fault of a forked rank: a spike, and its reads counted."""
    with_spike(setattr)
    count_reads(setattr, folder / f"{rank}.json")


def read_after(path: Path) -> set[int]:
    return {after for after, _ in json.loads(path.read_text())}


@pytest.mark.parametrize("guarded", [False, True])
def test_no_step_reads_a_tensor_but_before_a_checkpoint_or_an_evaluation(
    run: FullRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    count_reads(monkeypatch.setattr, tmp_path / "reads.json")
    train(skipping(run) if guarded else run)
    assert len(losses(run)) == STEPS
    assert read_after(tmp_path / "reads.json") <= BOUNDARIES


def test_two_ranks_leave_out_a_spike_as_one_process_does_and_read_no_tensor_in_between(
    run: FullRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = skipping(run)
    assert ended(start(run, 2, fault=partial(on_rank, tmp_path))) == [0, 0]
    assert [incident.step for incident in read_incidents(run.directory)] == [SPIKE]
    for rank in range(2):
        assert read_after(tmp_path / f"{rank}.json") <= BOUNDARIES
    alone = replace(run, directory=tmp_path / "alone")
    with_spike(monkeypatch.setattr)
    train(alone)
    assert [row["tokens"] // BATCH for row in rows(alone)] == [n for n in range(1, STEPS + 1) if n != SPIKE + 1]
    np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-3)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_divergence_noticed_late_ends_the_run_at_its_step_before_anything_of_later_ones_is_kept(
    run: FullRun, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    with_spike(monkeypatch.setattr, float("nan"), at=8)
    if guarded:
        run = skipping(run, max_interventions=0)
    with pytest.raises(StageError, match="diverged:.*8"):
        train(run)
    assert [row["tokens"] // BATCH for row in rows(run)] == list(range(1, 9))
    saved = [path.name.removesuffix(".unfinished") for path in (run.directory / CHECKPOINTS).iterdir()]
    assert saved == [f"tokens={6 * BATCH}"]
    attempts = (run.directory / "attempts.jsonl").read_text().splitlines()
    assert json.loads(attempts[-1])["step"] == 8


def is_killed(lost: int, at: int, saves: Path | None, rank: int) -> None:
    """As a fault of a forked rank: rank `lost` is killed where its step `at` begins; steps are read as seldom as they may be.

    If `saves` is given, a checkpoint below it is complete by then.
    """
    rank_flags.MOST_SECONDS = float("inf")
    if rank == lost:
        step = Stepper.step

        def faulty(self: Stepper, sequences: Tensor, *, number: int, **given: Any) -> tuple[Tensor, Tensor]:
            if number == at:
                while saves and not [*saves.glob("*/manifest.json")]:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, sequences, number=number, **given)

        Stepper.step = faulty  # type: ignore[method-assign]


def test_a_rank_that_loses_its_peer_keeps_the_rows_of_the_steps_they_took(run: FullRun) -> None:
    # No step is read between the checkpoint after six and that after twelve.
    assert ended(start(run, 2, fault=partial(is_killed, 1, SPIKE, None))) == [1, -signal.SIGKILL]
    assert [row["tokens"] // BATCH for row in rows(run)] == list(range(1, SPIKE + 1))
    (stop,) = (line for line in map(json.loads, (run.directory / ATTEMPTS).read_text().splitlines()) if "error" in line)
    assert (stop["rank"], stop["step"]) == (0, SPIKE)


@pytest.mark.parametrize(
    ("saved", "written"), quick_and_soak([(20, 20), (100, 17)], (20, 20)), ids=["after a checkpoint", "without one"]
)
def test_rank_0_killed_costs_the_rows_since_the_last_read_and_they_are_written_as_its_steps_are_taken_again(
    run: FullRun, tmp_path: Path, saved: int, written: int
) -> None:
    steps, at = 40, 30
    run = replace(
        run,
        segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * steps),
        checkpoint_every_tokens=BATCH * saved,
    )
    whole = replace(run, directory=tmp_path / "whole")
    train(whole)
    saves = run.directory / CHECKPOINTS if saved < at else None
    assert ended(start(run, 2, fault=partial(is_killed, 0, at, saves))) == [-signal.SIGKILL, 1]
    kept = [row["tokens"] // BATCH for row in rows(run)]
    assert kept == list(range(1, len(kept) + 1))
    assert written <= len(kept) <= at, "more where a read was due because five seconds had passed"
    assert at - written <= rank_flags.MOST_STEPS
    train_on(run, 2)
    assert result(run)["resumed_from"] == (BATCH * saved if saved < at else 0)
    assert [row["tokens"] // BATCH for row in rows(run)] == list(range(1, steps + 1))
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-3)


def test_a_gpu_that_waits_for_a_lost_rank_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = iter([False, True, *[False] * 1000])
    stream = SimpleNamespace(query=lambda: next(queries))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    assert finishes(torch.device("cpu"), within=0)
    assert finishes(torch.device("cuda:0"), within=10)
    assert not finishes(torch.device("cuda:0"), within=0.05)


def test_ranks_agree_every_sixteen_steps_or_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notified = [0.0], [False]
    monkeypatch.setattr("muscale.full_runs.train.rank_flags.time.monotonic", lambda: clock[0])
    flags = RankFlags(every_seconds=100.0, notice=lambda: notified[0], timeout=timedelta(minutes=1))
    assert flags.steps == 1

    def after(seconds: float, steps: int) -> int:
        clock[0] += seconds
        flags.agree(steps)
        return flags.steps

    assert after(30.0, 1) == 1, "the first step compiles"
    assert after(0.05, 1) == 16
    assert after(16.0, 16) == 5
    assert after(60.0, 5) == 1
    assert not flags.ends
    assert flags.saves
    flags.saved()
    notified[0] = True
    after(1.0, 1)
    assert (flags.saves, flags.ends) == (False, True)


@pytest.mark.parametrize("name", ["weight_decay", "no decay"])
def test_a_step_masked_on_the_device_leaves_weights_moments_and_count_of_steps(name: str) -> None:
    # What `Stepper` relies on in torch: the fused kernel obeys `found_inf`.
    weight = torch.nn.Parameter(torch.randn(7, 5))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1 if name == "weight_decay" else 0.0, fused=True)
    for _ in range(3):
        weight.grad = torch.randn(7, 5)
        optimizer.step()
    before = [weight.detach().clone(), *(tensor.clone() for tensor in optimizer.state[weight].values())]
    weight.grad = torch.full((7, 5), float("nan"))
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    after = [weight.detach(), *optimizer.state[weight].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


class Cycle:
    itself: Cycle


@pytest.mark.parametrize("is_frozen", [False, True])
def test_garbage_is_collected_at_agreed_steps_and_as_before_afterwards(is_frozen: bool) -> None:
    """Also by a caller that has frozen what there is."""
    (gc.freeze if is_frozen else gc.unfreeze)()
    garbage, frozen = Garbage(), gc.get_freeze_count()
    with garbage.controlled():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen
        cycle = Cycle()
        cycle.itself, alive = cycle, weakref.ref(cycle)
        del cycle
        garbage.after(49)
        assert alive() is not None
        garbage.after(1)
        assert alive() is None
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) is is_frozen


def test_a_trace_is_written_of_the_steps_asked_for_and_of_no_others(run: FullRun) -> None:
    train(replace(run, profile=(3, 5)))
    (trace,) = (run.directory / PROFILE).iterdir()
    assert trace.name == "trace-rank0.json.gz"
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    updates = [event for event in events if event.get("name", "").startswith("Optimizer.step#AdamW")]
    assert len(updates) == 3


def test_rows_have_the_rate_of_each_step_and_on_a_known_device_its_share_of_the_peak(
    run: FullRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepLog, "count_flops", lambda log, *_: setattr(log, "flops_share", 1e-6))
    train(run)
    for row in rows(run):
        assert row["tokens_per_second"] == pytest.approx(BATCH / row["step_seconds"])
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 1e-6)
    seconds = [row["seconds"] for row in rows(run)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("wrong", ["5:3", "5", "a:b", "-1:3"])
def test_a_profile_names_a_first_and_a_last_step(wrong: str) -> None:
    assert PromoteSettings(profile="20:25").profiled_steps == (20, 25)
    assert PromoteSettings().profiled_steps is None
    with pytest.raises(ValueError, match="profile"):
        PromoteSettings(profile=wrong)
