"""What stands in memory at a time, by the profiler's record of every allocation."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that stands at a time on the CPU of what `function` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    assert profiled.profiler is not None
    changes = [(event.start_ns(), event.nbytes()) for event in profiled.profiler.kineto_results.events()]
    standing = peak = 0
    for _, change in sorted(changes):
        standing += change
        peak = max(peak, standing)
    return peak
