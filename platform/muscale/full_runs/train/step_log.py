"""Figures of a run's steps: kept on the device until several are read together, then written as rows of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muscale import json_lines
from muscale.full_runs.distributed import rank
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.attempts import Attempt
from proxy_models.data.corpus import Corpus
from proxy_models.training.attended import attended_length
from proxy_models.training.device import datasheet_flops
from proxy_models.training.guard import Divergence, Verdict
from proxy_models.training.step import Stepper


@dataclass(frozen=True, kw_only=True)
class StepTaken:
    """A step whose figures are still on the device."""

    before: int  # in tokens, as `after`
    after: int
    number: int
    rate_factor: float
    loss: Tensor
    norm: Tensor
    figures: Mapping[str, Tensor]  # zero-dimensional ones of `Family.end_step`
    step_seconds: float
    seconds: float  # from the run's start to the step's end


class StepLog:
    """Steps that are not read yet, and rows that are not written yet.

    Attributes:
        rows: Rows for the file, in order.
        blocked: Seconds blocked by checkpoints since the last row.
        flops_share: FLOPs per token over the peak FLOP/s of all ranks' devices; None if the peak is not known.
    """

    def __init__(self, path: Path, attempt: Attempt) -> None:
        """Prepare to append rows of an attempt to this file."""
        self.rows: list[dict[str, Any]] = []
        self.blocked = 0.0
        self._path, self._attempt = path, attempt
        self._taken: list[StepTaken] = []
        self.flops_share: float | None = None
        self._started = 0.0

    def start_clock(self, spent: float) -> None:
        """Count seconds from now, after the seconds that earlier attempts took."""
        self._started = time.perf_counter() - spent

    def count_flops(self, run: FullRun, corpus: Corpus, device: torch.device, ranks: int) -> None:
        """Set `flops_share`, which gives rows their MFU."""
        if device.type != "cuda":
            return
        model = run.numerics.model
        if peak := datasheet_flops(torch.cuda.get_device_name(device), run.numerics.precision):
            per_token = model.train_flops_within(attended_length(model, corpus, run.n_tokens))
            self.flops_share = per_token / (peak * ranks)

    @property
    def seconds(self) -> float:
        """Seconds since the run's start, over all attempts."""
        return time.perf_counter() - self._started

    @property
    def n_unread(self) -> int:
        """Number of steps whose figures are still on the device."""
        return len(self._taken)

    def add(
        self,
        before: int,
        after: int,
        number: int,
        *,
        began: float,
        rate_factor: float,
        loss: Tensor,
        norm: Tensor,
        figures: Mapping[str, Tensor],
    ) -> None:
        """Keep the figures of a step that began at the time `began` of `time.perf_counter`."""
        ended = time.perf_counter()
        self._taken.append(
            StepTaken(
                before=before,
                after=after,
                number=number,
                rate_factor=rate_factor,
                loss=loss,
                norm=norm,
                figures={name: figure for name, figure in figures.items() if not figure.dim()},
                step_seconds=ended - began,
                seconds=ended - self._started,
            )
        )

    def read(self, stepper: Stepper) -> Iterator[tuple[StepTaken, dict[str, Any], Verdict | None]]:
        """Yield each step taken, its row, and a verdict if it failed a check; waits for the device."""
        taken, self._taken = self._taken, []
        began = time.perf_counter()
        tensors = [tensor.float() for one in taken for tensor in (one.loss, one.norm, *one.figures.values())]
        numbers = iter(torch.stack(tensors).tolist() if taken else [])
        stepper.settle()
        waited = (time.perf_counter() - began) / max(len(taken), 1)
        for count, one in enumerate(taken, start=1):
            loss, norm, *figures = islice(numbers, 2 + len(one.figures))
            verdict, seconds = stepper.verdicts.get(one.number), one.step_seconds + waited
            if not isinstance(verdict, Divergence) and not math.isfinite(loss):
                reason = f"the training loss is {loss} at step {one.number}"
                verdict = Divergence(step=one.number, reason=reason)
            rate = (one.after - one.before) / seconds
            row = {
                "tokens": one.after,
                "train_loss": loss,
                "grad_norm": norm,
                "rate_factor": one.rate_factor,
                **dict(zip(one.figures, figures, strict=True)),
                "left_out": verdict is not None,
                "step_seconds": seconds,
                "tokens_per_second": rate,
                **({"mfu": rate * self.flops_share} if self.flops_share else {}),
                "seconds": one.seconds + count * waited,
            }
            yield one, row, verdict

    def record(self, row: dict[str, Any]) -> None:
        """Add the row of a step that counts."""
        self.rows.append(row | {"blocked_seconds": self.blocked})
        self.blocked = 0.0

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the time in the block as blocked by a checkpoint."""
        began = time.perf_counter()
        yield
        self.blocked += time.perf_counter() - began

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Write the rows however the block ends: the time of their steps counts, even if the steps are repeated."""
        try:
            yield
        finally:
            self.flush()

    def flush(self) -> None:
        """Write the rows, on rank 0; raise LeaseLostError if another attempt has begun since."""
        if rank() == 0:
            self._attempt.require_last()
            if self.rows:
                json_lines.append(self._path, *self.rows)
        self.rows.clear()
