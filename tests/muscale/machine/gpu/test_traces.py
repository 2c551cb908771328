"""Reading a trace: only what lies between the first update and the last counts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from muscale.machine.gpu.traces import StepTrace


def event(name: str, ts: float, *, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 1.0}


def gather(ts: float, dtype: str) -> dict[str, Any]:
    arguments = {"Input Dims": [[64], [32], []], "Input type": [dtype, dtype, ""]}  # output, input, group
    return event("c10d::_allgather_base_", ts) | {"args": arguments}


def read(folder: Path, *events: dict[str, Any]) -> StepTrace:
    """A trace of three updates, at 10, 20 and 30."""
    updates = [event("Optimizer.step#AdamW.step", 10.0 * n, cat="user_annotation") for n in (1, 2, 3)]
    with gzip.open(folder / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *updates, *events]}, file)
    return StepTrace.read(folder / "trace.json.gz")


def test_what_comes_before_the_first_update_or_after_the_last_is_left_out(tmp_path: Path) -> None:
    found = read(tmp_path, *(gather(ts, "c10::BFloat16") for ts in (5.0, 15.0, 25.0, 26.0, 35.0)))
    assert found.steps == 2
    assert found.collectives == {("all-gather", 64): 1.5}
    assert read(tmp_path, gather(15.0, "float")).collectives == {("all-gather", 128): 0.5}


def test_an_update_on_the_gpu_s_own_line_is_not_a_second_one(tmp_path: Path) -> None:
    assert read(tmp_path, event("Optimizer.step#AdamW.step", 33.0, cat="gpu_user_annotation")).steps == 2


def test_attention_is_counted_by_kernel_and_only_forward(tmp_path: Path) -> None:
    names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "attention_math", "attention")
    events = [event(f"aten::_scaled_dot_product_{name}", 15.0) for name in names]
    events.append(event("aten::_scaled_dot_product_flash_attention_backward", 16.0))
    assert read(tmp_path, *events).attention == {"flash": 1.0, "efficient": 0.5, "math": 0.5}


def test_waits_are_the_runtime_s_calls_that_return_once_the_device_is_done(tmp_path: Path) -> None:
    runtime = [event(name, 15.0, cat="cuda_runtime") for name in ("cudaLaunchKernel", "cudaStreamWaitEvent")]
    assert read(tmp_path, *runtime).host_waits == (0, 0)
    waits = [event("cudaStreamSynchronize", ts, cat="cuda_runtime") for ts in (5.0, 26.0, 27.0, 35.0)]
    assert read(tmp_path, *runtime, *waits).host_waits == (0, 2)
    assert read(tmp_path, event("aten::mm", 15.0)).host_waits is None


def test_units_are_those_that_fsdp2_names(tmp_path: Path) -> None:
    names = ("FSDP::pre_forward", "FSDP::pre_forward (blocks.0)", "FSDP::post_forward (blocks.1)")
    found = read(tmp_path, *(event(name, 15.0, cat="user_annotation") for name in names))
    assert found.units == ("", "blocks.0")
