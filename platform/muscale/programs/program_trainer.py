"""The trainer of a study whose [trainer] is a program; replaces the lean loop and trains one segment from state to state."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muscale.errors import TrainingFailedError, WorkerLostError
from muscale.layout import PROGRAM_RUNS
from muscale.programs.job import job_of
from muscale.programs.program_family import Program
from muscale.programs.program_process import OUTPUT, TrainerEnd, TrainerStatus, train
from muscale.programs.protocol import ROWS
from proxy_models.architecture.families import import_family
from proxy_models.data.corpus import Corpus
from proxy_models.files import atomic_directory
from proxy_models.hashing import content_key
from proxy_models.recipes.segments import Segment
from proxy_models.training.device import CPU
from proxy_models.training.guard import Divergence
from proxy_models.training.metrics import Curve
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState
from proxy_models.training.trainer import SegmentResult


class ProgramTrainer:
    """Trains segments with the program that their models name; the program chooses its devices.

    Args:
        directory: The study's folder, in which the program runs and keeps unfinished states.
        stall_seconds: Longest time between two rows.
    """

    device = CPU  # device of this process, not of the program

    def __init__(self, corpus: Corpus, directory: Path, stall_seconds: float = math.inf) -> None:
        self.corpus, self._directory, self._stall_seconds = corpus, directory, stall_seconds

    def train(
        self,
        numerics: Numerics,
        segment: Segment,
        state: TrainState | None = None,
        *,
        averaged: bool = False,
        on_step: Callable[[int, float], None] | None = None,
        moves: Callable[[], None] | None = None,
    ) -> SegmentResult:
        """Train one segment from `state`; the arguments are those of `Trainer.train`, and no average is evaluated.

        A training that was interrupted on this host continues from the program's own state.

        Raises:
            TrainerError: If the program can't be started, or its files differ from those that the study names.
            TrainingFailedError: If the program exits with an error, breaks the protocol, or writes no row for too long.
            ValueError: If the model does not belong to a program.
            WorkerLostError: If a signal ended the program; another attempt continues from its state.
        """
        program = import_family(numerics.model)
        if not isinstance(program, Program):
            raise ValueError(f"a study with [trainer] trains models of its program, got {numerics.model}")
        program.allow(self._directory)
        job = job_of(numerics, [segment])
        folder = self._folder(numerics, segment, state)
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            with atomic_directory(folder) as unfinished:
                write_files(state, unfinished / "state")
        begun = time.monotonic()
        seen: dict[int, float] = {}

        def on_row(tokens: int, loss: float) -> None:
            seen[tokens] = time.monotonic() - begun
            if moves:
                moves()
            if on_step:
                on_step(tokens, loss)

        end = train(program.words, job, folder, stall_seconds=self._stall_seconds, on_row=on_row, cwd=program.directory)
        _require_result(end, f"trainer at width {job.width}, depth {job.depth}", folder / OUTPUT)
        rows = {tokens: loss for tokens, loss in sorted(end.rows.items()) if tokens > segment.start}
        diverged = end.status is TrainerStatus.DIVERGED
        lost = [tokens for tokens, loss in rows.items() if not math.isfinite(loss)] or [*rows][-1:] or [segment.start]
        step = lost[0] // segment.recipe.batch_tokens
        result = SegmentResult(
            state=None if diverged else self._state(folder / "state", numerics, segment),
            loss=end.loss,
            averaged_loss=None,
            curve=_curve(segment, rows, seen),
            divergence=Divergence(step=step, reason=end.reason) if diverged else None,
            seconds=time.monotonic() - begun,
        )
        shutil.rmtree(folder)
        return result

    def _folder(self, numerics: Numerics, segment: Segment, state: TrainState | None) -> Path:
        """Folder named by all that determines the training, and by the host: elsewhere a leftover program may still write to it."""
        files = state.tensors if state else {}
        start = {name: hashlib.sha256(content.numpy().data).hexdigest() for name, content in files.items()}
        key = content_key([numerics.to_dict(), segment.to_dict(), start])
        return self._directory / PROGRAM_RUNS / f"{key}@{platform.node()}"

    def _state(self, folder: Path, numerics: Numerics, segment: Segment) -> TrainState:
        return TrainState(
            tokens=segment.end,
            parametrization=numerics.parametrization(segment.recipe.optimizer),
            tensors=read_files(folder),
        )


def _require_result(end: TrainerEnd, who: str, log: Path) -> None:
    """Raise the fault of a training that gave no result, with the path of its output."""
    if end.status in (TrainerStatus.FINISHED, TrainerStatus.DIVERGED):
        return
    message = f"{who}: {end.reason}; its output is in {log}"
    raise WorkerLostError(message) if end.was_killed else TrainingFailedError(message)


def read_files(folder: Path) -> dict[str, Tensor]:
    """The files of a program's state as bytes, by path in its folder, without the rows, which belong to one segment."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: torch.from_numpy(np.fromfile(path, np.uint8)) for name, path in paths.items() if name != ROWS}


def write_files(state: TrainState | None, folder: Path) -> None:
    """Write the files of a state, if any, into a new folder; raise ValueError if a file lies outside the folder."""
    folder.mkdir()
    for name, content in (state.tensors if state else {}).items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"a program's state must lie in its folder, got {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        content.numpy().tofile(path)


def _curve(segment: Segment, rows: Mapping[int, float], seconds: Mapping[int, float]) -> Curve:
    """The program's rows as a curve; times of rows written before this process began are unknown."""
    return Curve(
        start=segment.start,
        tokens=np.array([*rows], dtype=np.int64),
        train_loss=np.array([*rows.values()], dtype=np.float32),
        grad_norm=np.full(len(rows), np.nan, np.float32),
        rate_factor=np.array([segment.rate_factor(at) for at in rows]),
        seconds=np.array([seconds.get(at, np.nan) for at in rows]),
    )
