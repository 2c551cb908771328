"""Operation of the step loop: garbage collected at agreed steps, the end of queued work, a trace of a few steps on request."""

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
"""Steps between two collections, at least; torchtitan's default for `gc_freq`."""


class Garbage:
    """Collection on all ranks after the same step: a rank that pauses by itself makes all others wait."""

    def __init__(self) -> None:
        self._steps = 0

    @contextmanager
    def controlled(self) -> Iterator[None]:
        """Freeze what exists, and collect nothing in the block but by `after`; what the caller has frozen stays so."""
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
        """Collect the young objects if `COLLECT_EVERY` steps have passed with these."""
        self._steps += steps
        if self._steps >= COLLECT_EVERY:
            self._steps = 0
            gc.collect(1)


def finishes(device: torch.device, *, within: float) -> bool:
    """Whether a GPU ends its queued work within so many seconds; it does not while a collective waits for a lost rank."""
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
            steps: The first and the last, counted from the run's start; None: no trace.
            folder: For `trace-rank0.json.gz` and, on a GPU, `memory-rank0.pickle`, and those of every other rank.
        """
        self._steps, self._folder, self._device = steps, folder, device
        self._profiler: profile | None = None

    def before(self, number: int) -> None:
        """Start if step `number` is one of the steps."""
        if not self._steps or self._profiler or not self._steps[0] <= number <= self._steps[1]:
            return
        wait(self._device)  # for the steps before
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def after(self, number: int) -> None:
        """Stop and write after the last of the steps."""
        if self._steps and number >= self._steps[1]:
            self.stop()

    def stop(self) -> None:
        """Stop and write, if it was started."""
        if not self._profiler:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._folder / f"trace-rank{rank()}.json.gz"))
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank{rank()}.pickle"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = self._steps = None
