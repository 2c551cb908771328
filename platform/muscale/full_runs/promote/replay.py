"""Replay: the last steps before a checkpoint are trained again and compared with their record, before a run goes on elsewhere.

Other devices, versions or layouts change a run's numerics by rounding. A larger change, which no error announces, ruins a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from muscale import json_lines
from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder, manifest_hash
from muscale.full_runs.full_run import FullRun, InitialState
from muscale.full_runs.promote.launch import Launcher
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.layout import METRICS, REPLAY, RESULT
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import INCIDENTS
from proxy_models.architecture.memory import Precision

TOLERANCE: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 2e-3, "fp16": 2e-3}
"""Largest mean |Δ| of the training loss over the first `JUDGED` steps, as a share of their mean loss.

Measured here over 20 steps at depth 2 and width 32, from five checkpoints, for 2 gloo ranks against one process: at most 1e-7 in
fp32 and 6.5e-4 in bf16. A run in fp32 that goes on in bf16 deviated by 2e-4 to 7e-4, a changed `rope_theta` by 4e-4 at the end of the
cooldown and 4e-3 to 1e-2 before. fp16 is assumed to be like bf16.
"""
JUDGED = 20
"""Steps that are judged. Training amplifies rounding: over 200 steps in fp32 the same replay deviated by 3e-6 from one checkpoint and
2e-3 from another, as much as a fault does."""
NOT_REPLAYED = "replay: the run has been trained to its end, so nothing goes on and nothing is trained again"


@dataclass(frozen=True, kw_only=True)
class Replay(Recorded):
    """Steps of a run that were trained again, and how far their losses are from those recorded.

    Attributes:
        run: Key of the run.
        at: Time in UTC.
        start, end: Tokens of the run before the first and after the last of these steps.
        n_steps: Steps that have a loss in both trainings.
        deviation: Mean |Δ| of the training loss over the first `JUDGED` of these steps, as a share of their mean recorded loss.
        tolerance: Largest deviation with which the run may go on.
        over_all: Mean |Δ| over all of these steps, likewise.
        step: Number of the first step whose |Δ| is beyond the tolerance; if there is none, of the step with the largest.
        recorded, again: Training loss of this step, nats per token.
        recorded_on, again_on: Machine, versions and world size of both trainings; empty if not recorded.
    """

    DERIVED = ("passed",)

    run: str
    at: str
    start: int
    end: int
    n_steps: int
    deviation: float
    tolerance: float
    over_all: float
    step: int
    recorded: float
    again: float
    recorded_on: dict[str, Any]
    again_on: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether the deviation is within the tolerance."""
        return self.deviation <= self.tolerance

    def __str__(self) -> str:
        place = "within" if self.passed else "BEYOND"
        n_judged = min(self.n_steps, JUDGED)
        how_far = f"mean |Δ| {self.deviation:.2g} of the loss, {place} the tolerance {self.tolerance:g}"
        return "\n".join(
            [
                f"replay of run {self.run} from {self.start:,} to {self.end:,} tokens: {how_far} over {n_judged} steps",
                f"  over all {self.n_steps} steps {self.over_all:.2g}",
                f"  step {self.step}: loss {self.recorded:.6f} recorded, {self.again:.6f} trained again",
                f"  recorded on {_format(self.recorded_on)}",
                f"  trained again on {_format(self.again_on)}",
            ]
        )


def replay(run: FullRun, steps: int, train: Launcher, ledger: Ledger, *, end: int | None = None) -> Replay | None:
    """Train the last steps of a run before a checkpoint again, in a temporary folder, and record how far their losses deviate.

    The replay begins at the newest checkpoint that has so many steps after it, or at the run's start if there are no more steps.
    Only the temporary folder in the run's folder changes.

    Args:
        run: The run, with the layout in which it is to go on.
        steps: Least number of steps.
        train: Trains a run to its end on the present devices.
        ledger: Ledger of the study; records the replay.
        end: Tokens at the checkpoint; None: the newest checkpoint, from which the run would go on.

    Returns:
        The replay; None if the run has been trained to its end, so that nothing goes on.

    Raises:
        StageError: If there is no such checkpoint, the steps have no recorded losses, or the deviation is beyond `TOLERANCE`.
    """
    if end is None and (run.directory / RESULT).exists():
        return None
    kept = CheckpointFolder(run.directory / CHECKPOINTS).kept()
    end = max(kept, default=0) if end is None else end
    start = _start(run, kept, end, steps)
    recorded = _losses(run, start, end)
    again, again_on = _train_again(run, start, end, train)
    common = sorted(recorded.keys() & again.keys())
    if not common:
        raise StageError(f"replay: run {run.directory.name} has no recorded loss from {start} to {end} tokens")
    scale = fmean(recorded[tokens] for tokens in common[:JUDGED])
    shares = {tokens: abs(again[tokens] - recorded[tokens]) / scale for tokens in common}
    tolerance = TOLERANCE[run.numerics.precision]
    shown = next((tokens for tokens in common if shares[tokens] > tolerance), max(common, key=lambda one: shares[one]))
    found = Replay(
        run=run.directory.name,
        at=now(),
        start=start,
        end=end,
        n_steps=len(common),
        deviation=fmean(shares[tokens] for tokens in common[:JUDGED]),
        tolerance=tolerance,
        over_all=fmean(shares.values()),
        step=run.n_steps(shown),
        recorded=recorded[shown],
        again=again[shown],
        recorded_on=_environment(run, end),
        again_on=again_on,
    )
    ledger.record_result(ResultKind.REPLAY, f"{found.run} {found.at}", found.to_dict())
    if not found.passed:
        raise StageError(f"{found}\n  nothing of the run has changed; without --replay it goes on")
    return found


def _train_again(run: FullRun, start: int, end: int, train: Launcher) -> tuple[dict[int, float], dict[str, Any]]:
    """Losses and environment of the run's steps from `start` to `end` tokens, trained again in a folder that is then removed."""
    directory = run.directory / REPLAY
    shutil.rmtree(directory, ignore_errors=True)  # left by a killed replay
    directory.mkdir(parents=True)
    try:
        if (incidents := run.directory / INCIDENTS).exists():  # skipped batches are skipped again
            shutil.copy(incidents, directory)
        part = replace(
            _from(run, start).up_to(end, directory),
            evaluate_every_tokens=None,
            checkpoint_every_tokens=end,
            checkpoint_every_minutes=None,
        )
        train(part)
        return _losses(part, start, end), _environment(part, end)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start(run: FullRun, kept: tuple[int, ...], end: int, steps: int) -> int:
    """Tokens from which to train so that at least `steps` steps end at `end` tokens."""
    if steps < 1:
        raise StageError(f"replay: must be at least 1 step, got {steps}")
    first = run.n_steps(end) - steps
    for tokens in kept:
        if tokens < end and run.n_steps(tokens) <= first:
            return tokens
    if end and first <= 0:
        return 0
    there = f"has checkpoints after {', '.join(map(str, reversed(kept)))} tokens" if kept else "has no checkpoint"
    least = f"{run.n_steps(end)} steps reach its start; " if end else ""
    raise StageError(
        f"replay: needs a checkpoint {steps} steps before the one after {end} tokens, but run {run.directory.name} {there}; "
        f"{least}promote.keep_last and keep_every_tokens keep more checkpoints"
    )


def _from(run: FullRun, start: int) -> FullRun:
    """The run, begun at its own checkpoint after `start` tokens; at 0 the run itself."""
    if start == 0:
        return run
    checkpoint = CheckpointFolder(run.directory / CHECKPOINTS).path(start)
    if (digest := manifest_hash(checkpoint)) is None:
        raise StageError(f"replay: {checkpoint}: does not match the hashes of its manifest")
    state = InitialState(
        checkpoint=checkpoint,
        manifest_hash=digest,
        recipe=run.recipe_before(start),
        position=run.position,
        tokens=start,
    )
    return replace(run, initial_state=state)


def _losses(run: FullRun, start: int, end: int) -> dict[int, float]:
    """Training loss of each step in (start, end], by the tokens after it."""
    rows = json_lines.read(run.directory / METRICS)
    return {row["tokens"]: row["train_loss"] for row in rows if start < row["tokens"] <= end and "train_loss" in row}


def _environment(run: FullRun, end: int) -> dict[str, Any]:
    """Machine, versions and world size of the attempt that trained the step that ends at `end` tokens."""
    starts = [
        one for one in json_lines.read(run.directory / ATTEMPTS) if one["event"] == "start" and one["tokens"] < end
    ]
    return starts[-1].get("environment", {}) if starts else {}


def _format(environment: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items()) or "a machine that was not recorded"
