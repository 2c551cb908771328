"""The smoke test: a few steps of the real run, with its launch path and devices, in a temporary folder.

The first launch trains some steps and saves; the second resumes, evaluates and saves. This tests memory, speed, saving and resuming
before the run is paid for. The batch has its largest size, that after the ramp.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muscale import json_lines
from muscale.actors.cluster import cluster
from muscale.errors import StageError
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.launch import launch, train_worker
from muscale.full_runs.promote.planned_worker import PlannedWorker
from muscale.full_runs.promote.promotion import full_run_of
from muscale.layout import CORPUS, FULL_RUNS, METRICS, RESULT, SMOKE_TEST
from muscale.plans.plan import Plan
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics

LEAST_STEPS = 6
"""Least steps of a launch: the first is slow, the second has an evaluation, the fourth a save, the last the final evaluation."""
_PEAKS = "peaks"  # folder with a file for each rank


@dataclass(frozen=True, kw_only=True)
class SmokeTest(Recorded):
    """Measurements, and the forecast of the run's duration.

    Attributes:
        plan: Key of the plan.
        at: Time in UTC.
        world_size: Workers.
        device: Device of the first worker.
        batch_tokens: Tokens of a step.
        step_seconds: Median of the undisturbed steps.
        evaluation_seconds, save_seconds: Time that training waited for an evaluation, and for a save.
        start_seconds: Time of a resuming launch before its first step and after its last.
        resumed_from: Tokens at which the second launch resumed.
        peak_bytes: Peak memory of each rank: allocated on its GPU, or of the whole process on a CPU.
        estimated_bytes: Estimated memory of a rank, for the training alone; None if unknown.
        losses: Training loss of each step, nats per token.
        evaluations, saves: Their numbers in the whole run, at multiples of their tokens and at its end.
        save_minutes: Longest time between two saves of the whole run; None: not by time.
    """

    DERIVED = ("tokens_per_second", "counted_seconds", "wall_seconds", "goodput")

    plan: str
    at: str
    world_size: int
    device: str
    steps: int
    batch_tokens: int
    step_seconds: float
    evaluation_seconds: float
    save_seconds: float
    start_seconds: float
    resumed_from: int
    peak_bytes: tuple[int, ...]
    estimated_bytes: int | None
    losses: tuple[float, ...]
    n_tokens: int
    evaluations: int
    saves: int
    save_minutes: float | None

    @property
    def tokens_per_second(self) -> float:
        """Speed of all workers together, during steps."""
        return self.batch_tokens / self.step_seconds

    @property
    def counted_seconds(self) -> float:
        """Forecast of the duration of the run's steps alone."""
        return self.n_tokens / self.tokens_per_second

    @property
    def wall_seconds(self) -> float:
        """Forecast of the duration of the whole run, with evaluations, saves and one launch, without faults."""
        by_time = self.counted_seconds / (60 * self.save_minutes) if self.save_minutes else 0.0
        saves = max(self.saves, by_time)
        waits = self.evaluations * self.evaluation_seconds + saves * self.save_seconds
        return self.start_seconds + self.counted_seconds + waits

    @property
    def goodput(self) -> float:
        """Forecast of the share of wall time spent on steps, without faults."""
        return self.counted_seconds / self.wall_seconds

    def __str__(self) -> str:
        """Memory, speed, saving, resuming, and the forecast."""
        hours = self.wall_seconds / 3600
        duration = f"{hours:,.3g} hours" if hours >= 1 else f"{self.wall_seconds:,.3g} seconds"
        estimated = (
            "no estimate"
            if self.estimated_bytes is None
            else f"{self.estimated_bytes / 2**30:.3g} GiB estimated for training alone"
        )
        return "\n".join(
            [
                f"smoke test of plan {self.plan}: twice {self.steps} steps of {self.batch_tokens:,} tokens on {self.world_size} "
                f"workers, {self.device}",
                f"  memory    at most {max(self.peak_bytes) / 2**30:.3g} GiB on a worker, {estimated}",
                f"  speed     {self.tokens_per_second:,.4g} tokens per second, {self.step_seconds:.3g} s a step",
                f"  waits     {self.save_seconds:.3g} s for a save, {self.evaluation_seconds:.3g} s for an evaluation, "
                f"{self.start_seconds:.3g} s for a launch",
                f"  resumed   from {self.resumed_from:,} tokens, loss {self.losses[0]:.4f} → {self.losses[-1]:.4f}",
                f"  forecast  {duration} for {self.n_tokens:,} tokens, goodput {self.goodput:.1%} without faults",
            ]
        )


def smoke_test_on_cluster(
    plan: Plan, config: StudyConfig, ledger: Ledger, numerics: Numerics, *, steps: int = LEAST_STEPS
) -> SmokeTest:
    """Run the smoke test of a plan on the cluster, and record it; raise StageError if a launch fails, or the run is too short."""
    directory = ledger.directory / FULL_RUNS / plan.key / SMOKE_TEST
    run = full_run_of(plan, config, numerics, directory, ledger.directory / CORPUS)
    within = config.promote.model_copy(update={"evaluation": "sync"})  # so that only the run is measured
    memory = None
    with suppress(ValueError):  # a model that can't be traced
        memory = PlannedWorker(plan=plan, config=config).memory()
    with cluster(config.resources):
        found = smoke_test(
            run,
            lambda part: launch(part, within, config.resources, name=plan.key, worker=smoke_test_worker),
            plan=plan.key,
            steps=steps,
            estimated_bytes=memory.total if memory else None,
        )
    ledger.record_result(ResultKind.SMOKE_TEST, f"{plan.key} {found.at}", found.to_dict())
    return found


def smoke_test(
    run: FullRun, train: Callable[[FullRun], object], *, plan: str, steps: int, estimated_bytes: int | None
) -> SmokeTest:
    """Train the first steps of a run in two launches and measure them; its directory is emptied first and removed at the end.

    Args:
        run: The whole run, in a separate directory.
        train: Function that trains a run to its end, in ranks that each call `measured`.

    Raises:
        StageError: If the run is too short, or the second launch did not resume from the first.
    """
    if steps < LEAST_STEPS:
        raise StageError(f"smoke test: steps must be at least {LEAST_STEPS}, got {steps}")
    batch = run.segments[0].recipe.batch_tokens
    if 2 * steps * batch > run.n_tokens:
        raise StageError(f"smoke test: the run has {run.n_tokens // batch} steps, too few for twice {steps}")
    shutil.rmtree(run.directory, ignore_errors=True)
    run.directory.mkdir(parents=True)
    wall = 0.0
    for end in (steps * batch, 2 * steps * batch):
        (run.directory / RESULT).unlink(missing_ok=True)
        part = replace(
            run,
            segments=beginning(run.segments, end),
            evaluate_every_tokens=(steps + 2) * batch,  # this and the save only in the second launch
            checkpoint_every_tokens=(steps + 3) * batch,
            checkpoint_every_minutes=None,
        )
        began = time.perf_counter()
        train(part)
        wall = time.perf_counter() - began  # of the second launch
    found = SmokeTest(
        plan=plan,
        steps=steps,
        batch_tokens=batch,
        estimated_bytes=estimated_bytes,
        n_tokens=run.n_tokens,
        evaluations=-(-run.n_tokens // (run.evaluate_every_tokens or run.n_tokens)),
        saves=-(-run.n_tokens // run.checkpoint_every_tokens),
        save_minutes=run.checkpoint_every_minutes,
        **_measured(run.directory, steps=steps, batch=batch, wall=wall),
    )
    shutil.rmtree(run.directory)
    return found


def beginning(segments: Sequence[Segment], end: int) -> tuple[Segment, ...]:
    """The segments up to `end` tokens, at the full batch from the first step on."""
    whole = [
        replace(
            segment, recipe=replace(segment.recipe, batch_doublings=0, batch_ramp_tokens=0), end=min(segment.end, end)
        )
        for segment in segments
        if segment.start < end
    ]
    return tuple(whole)


def measured(directory: Path, rank: int, train: Callable[[], object]) -> None:
    """Train on this rank, and write its peak memory to the run's directory."""
    import torch

    train()
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    peak = allocated or _process_peak()  # the CPU may be chosen on a machine with a GPU
    folder = directory / _PEAKS
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).write_text(str(peak))


def smoke_test_worker(config: dict[str, Any]) -> None:
    """Run one worker of a smoke test in Ray Train."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    measured(config["run"].directory, rank, lambda: train_worker(config))


def _process_peak() -> int:
    """Peak memory of this process in bytes; Linux counts kibibytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _measured(directory: Path, *, steps: int, batch: int, wall: float) -> dict[str, Any]:
    """The measured fields of `SmokeTest`, from the files of both launches; the second launch took `wall` seconds."""
    if not (directory / RESULT).exists():
        raise StageError(f"smoke test: the run ended without a result; its records are in {directory}")
    result = json.loads((directory / RESULT).read_text())
    rows = json_lines.read(directory / METRICS)
    if result["resumed_from"] != steps * batch or [row["tokens"] for row in rows] != [
        batch * (step + 1) for step in range(2 * steps)
    ]:
        raise StageError(
            f"smoke test: the second launch resumed from {result['resumed_from']} tokens, the first saved after "
            f"{steps * batch}; the records are in {directory}"
        )
    stamps = [row["seconds"] for row in rows]
    took = {step + 1: stamps[step] - stamps[step - 1] for step in range(1, 2 * steps)}  # by step number, from 1
    evaluated, saved = (steps + 2, steps + 3), steps + 4  # the evaluated step itself may wait, or the next
    slow = {steps, steps + 1, *evaluated, saved, 2 * steps}
    step_seconds = statistics.median(seconds for step, seconds in took.items() if step not in slow)
    evaluation = max(0.0, sum(took[step] for step in evaluated) - 2 * step_seconds)
    save = max(0.0, took[saved] - step_seconds)
    trained = stamps[-1] - stamps[steps]  # in the second launch, without its first step, with the final evaluation
    return {
        "at": now(),
        "world_size": int(result["environment"]["world_size"]),
        "device": str(result["environment"]["device"]),
        "step_seconds": step_seconds,
        "evaluation_seconds": evaluation,
        "save_seconds": save,
        "start_seconds": max(0.0, wall - trained - step_seconds - save),
        "resumed_from": int(result["resumed_from"]),
        "peak_bytes": tuple(int(path.read_text()) for path in sorted((directory / _PEAKS).iterdir())),
        "losses": tuple(row["train_loss"] for row in rows),
    }
