"""Operation of the step loop: garbage collection at agreed steps, waiting for queued work, and a trace of a few steps on request."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from muscale.full_runs.distributed import rank
from proxy_models.training.device import wait

COLLECT_EVERY = 50
"""Least steps between two collections; torchtitan's default for `gc_freq`."""


class Garbage:
    """Collects garbage on all ranks after the same step, since a rank that pauses alone makes all others wait."""

    def __init__(self) -> None:
        self._steps = 0

    @contextmanager
    def controlled(self) -> Iterator[None]:
        """Freeze existing objects, and collect in the block only through `after`; objects that the caller has frozen stay frozen."""
        enabled, is_frozen = gc.isenabled(), gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            if not is_frozen:
                gc.unfreeze()
            if enabled:
                gc.enable()

    def after(self, steps: int) -> None:
        """Collect young objects if `COLLECT_EVERY` steps have passed, including these."""
        self._steps += steps
        if self._steps >= COLLECT_EVERY:
            self._steps = 0
            gc.collect(1)


def finishes(device: torch.device, *, within: float) -> bool:
    """Whether a GPU ends its queued work within this many seconds; it does not while a collective waits for a lost rank."""
    ends = time.monotonic() + within
    while device.type == "cuda" and not torch.cuda.current_stream(device).query():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


class StepProfile:
    """A trace of some steps for chrome://tracing or Perfetto, and of a GPU's memory for pytorch.org/memory_viz."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, device: torch.device) -> None:
        """Prepare; writes nothing before the first of the steps.

        Args:
            steps: First and last step, counted from the run's start; None: no trace.
            folder: Folder for each rank's `trace-rank0.json.gz` and, on a GPU, `memory-rank0.pickle` (here of rank 0).
        """
        self._steps, self._folder, self._device = steps, folder, device
        self._profiler: profile | None = None

    def before(self, number: int) -> None:
        """Start the trace if step `number` is one of the steps."""
        if not self._steps or self._profiler or not self._steps[0] <= number <= self._steps[1]:
            return
        wait(self._device)  # for earlier steps
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def after(self, number: int) -> None:
        """Stop and write the trace after the last of the steps."""
        if self._steps and number >= self._steps[1]:
            self.stop()

    def stop(self) -> None:
        """Stop and write the trace, if it was started."""
        if not self._profiler:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / f"trace-rank{rank()}.json.gz"))
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank{rank()}.pickle"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = self._steps = None
