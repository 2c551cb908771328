"""Reads the trace of a few steps: units of FSDP2, collectives of weights and gradients, attention's kernels, waits of the host.

The trace is that of `promote.profile`: torch's profiler (Kineto) writes operators with their shapes on any device, and on a GPU
the calls of CUDA's runtime if it can reach CUPTI.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

_COLLECTIVES = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?:(flash|efficient|cudnn)_attention(?:_for_cpu)?|attention_(math))$"
)
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of CUDA's runtime that return only once the device is done; calls that queue work and return have other names."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The steps between the first update of weights in a trace and the last.

    Attributes:
        units: Modules that FSDP2 shards separately; "" is the rest of the model.
        collectives: Calls per step by (kind, bytes that a rank contributes), for weights and gradients.
        attention: Calls per step by kernel name.
        host_waits: Calls in each step in which the host waited for the device; None if no calls of CUDA's runtime were traced.
    """

    steps: int
    units: tuple[str, ...]
    collectives: Mapping[tuple[str, int], float]
    attention: Mapping[str, float]
    host_waits: tuple[int, ...] | None

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a trace of at least two steps."""
        with gzip.open(file) as opened:
            events = [event for event in json.load(opened)["traceEvents"] if event.get("ph") == "X"]
        updates = sorted(_end(event) for event in events if _is_update(event))
        steps = len(updates) - 1
        within = [event for event in events if updates[0] <= event["ts"] < updates[-1]]
        has_runtime = any(event.get("cat") == "cuda_runtime" for event in events)
        return cls(
            steps=steps,
            units=tuple(sorted({unit for event in within if (unit := _unit(event["name"])) is not None})),
            collectives=_a_step((_collective(e) for e in within if e["name"] in _COLLECTIVES), steps),
            attention=_a_step((m[1] or m[2] for e in within if (m := _ATTENTION.match(e["name"]))), steps),
            host_waits=tuple(
                sum(event["name"] in _WAITS and start <= event["ts"] < end for event in within)
                for start, end in pairwise(updates)
            )
            if has_runtime
            else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; collectives as a list."""
        collectives = [
            {"kind": kind, "bytes": size, "calls": calls} for (kind, size), calls in sorted(self.collectives.items())
        ]
        return {
            "steps": self.steps,
            "units": list(self.units),
            "collectives": collectives,
            "attention": dict(self.attention),
            "host_waits": self.host_waits,
        }


def _is_update(event: Mapping[str, Any]) -> bool:
    """Whether the event is the optimizer's step on the host's timeline; a GPU's timeline repeats that step."""
    return event.get("cat") == "user_annotation" and event["name"].startswith("Optimizer.step")


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _unit(name: str) -> str | None:
    """The unit that an FSDP2 annotation names before the unit's forward pass."""
    found = re.fullmatch(r"FSDP::pre_forward(?: \((.*)\))?", name)
    return (found[1] or "") if found else None


def _collective(event: Mapping[str, Any]) -> tuple[str, int]:
    """Kind and bytes of a call with arguments (output, input, …)."""
    arguments = event["args"]
    return _COLLECTIVES[event["name"]], math.prod(arguments["Input Dims"][1]) * _BYTES[arguments["Input type"][1]]


def _a_step(calls: Any, steps: int) -> dict[Any, float]:
    return {what: count / steps for what, count in Counter(calls).items()}
