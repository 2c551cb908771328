"""The checks of `muscale doctor --gpu`: the same code on CPU ranks, and each check fails on what it is there for."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muscale.machine.gpu import gpu_checks
from muscale.machine.gpu.gpu_checks import (
    GPT_350M,
    check_gpus,
    collective_checks,
    large_case,
    loss_checks,
    mfu_check,
    small_case,
    speed_checks,
    step_checks,
)
from muscale.machine.gpu.gpu_report import Check, GpuReport
from muscale.machine.gpu.traces import StepTrace
from muscale.machine.gpu.training import Case, Measurement
from muscale.plans.step_time import StepTime
from proxy_models.architecture.memory import MEMORY_SHARE
from tests.muscale.command_lines import muscale
from tests.muscale.conftest import write_text
from tests.muscale.fake_gpus import H100
from tests.muscale.gloo_ranks import processes

SECRET = "s3cret-of-the-tests"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> GpuReport:
    """Of two CPU ranks, where Ray is not installed."""
    folder = tmp_path_factory.mktemp("doctor")
    write_text(folder / "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muscale.machine.gpu.training._processes", processes)  # which have imported Lightning
        patch.setattr(gpu_checks, "find_spec", lambda _name: None)
        patch.setattr(gpu_checks, "LOSS_TOLERANCE", {"bf16": 2e-2})  # in fp32 the run is the golden one
        return check_gpus("cpu", ranks=(2,), source=str(folder / "text"))


def status(found: list[Check]) -> list[str]:
    return [check.status for check in found]


def test_on_two_cpu_ranks_all_that_needs_no_gpu_passes(report: GpuReport) -> None:
    assert report.passed
    by_name = {check.what: check for check in report.checks}
    passed = {name for name, check in by_name.items() if check.status == "pass"}
    ours = ("losses", "units of FSDP2", "attention", "all-gathers", "reduce-scatters")
    assert passed == {f"2 ranks, small, bf16: {what}" for what in ours}
    skipped = {name: check.found for name, check in by_name.items() if check.status == "skipped"}
    waits = "2 ranks, small, bf16: waits of the host"
    assert skipped == {waits: "a CPU does not run ahead", "packing": "Ray is not installed"}
    assert len(passed) + len(skipped) == len(by_name)
    assert (by_name["2 ranks, small, bf16: losses"].value or 0.0) > 1e-6, "it was trained in bf16"


def test_the_file_has_every_number_and_neither_host_nor_home(report: GpuReport, tmp_path: Path) -> None:
    report.write(tmp_path / "gpu.json")
    text = (tmp_path / "gpu.json").read_text()
    written = json.loads(text)
    assert written["passed"] is True
    assert [check["what"] for check in written["checks"]] == [check.what for check in report.checks]
    assert [len(training["losses"]) for training in written["trainings"]] == [10] * 2
    assert written["trainings"][1]["trace"]["steps"] == 2
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert "muscale-doctor-" not in text


def measured(case: Case | None = None, **facts: Any) -> Measurement:
    """Of one rank on a GPU, within all bounds."""
    case = case or small_case("fp32-1", "cuda", 1, "fp32")
    trace = StepTrace(
        steps=2,
        units=("", "blocks.0", "blocks.1", "embedding", "readout"),
        collectives={("all-gather", 1000): 2.0, ("reduce-scatter", 2000): 1.0},
        attention={"flash": 4.0},
        host_waits=(0, 0),
    )
    given: dict[str, Any] = {
        "losses": (5.0,) * case.steps,
        "step_seconds": (0.1,) * case.steps,
        "mfu": (0.4,) * case.steps,
        "peak_bytes": case.estimate.total,
        "compiled": True,
        "trace": trace,
    }
    return Measurement(case=case, seconds=1.0, **(given | facts))


def test_a_loss_that_is_off_at_one_step_fails() -> None:
    golden = measured()
    assert status(list(loss_checks(measured(losses=(*golden.losses[:-1], 5.004)), golden))) == ["pass"]
    assert status(list(loss_checks(measured(losses=(*golden.losses[:-1], 5.006)), golden))) == ["fail"]
    bf16 = measured(small_case("bf16-1", "cuda", 1, "bf16"), losses=(*golden.losses[:-1], 5.09))
    assert status(list(loss_checks(bf16, golden))) == ["pass"]
    (lost,) = loss_checks(Measurement(case=golden.case, seconds=1.0, failure="rank 0: no kernel image"), golden)
    assert (lost.status, lost.found) == ("fail", "rank 0: no kernel image")


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"units": ()}, ["units of FSDP2"]),
        ({"attention": {"flash": 2.0, "math": 2.0}}, ["attention"]),
        ({"attention": {}}, ["attention"]),
        ({"host_waits": (0, 4)}, []),
        ({"host_waits": (1, 1)}, ["waits of the host"]),
    ],
    ids=["all well", "not sharded", "some math", "no attention", "waits at a read", "waits between"],
)
def test_what_a_trace_shows_fails_by_its_name(change: dict[str, Any], failed: list[str]) -> None:
    found = measured()
    assert found.trace is not None
    found = replace(found, trace=replace(found.trace, **change))
    assert [check.what.partition(": ")[2] for check in step_checks(found) if check.status == "fail"] == failed


def test_a_trace_without_calls_of_the_runtime_tells_no_waits() -> None:
    found = measured()
    assert found.trace is not None
    *_, waits = step_checks(replace(found, trace=replace(found.trace, host_waits=None)))
    assert (waits.status, waits.found) == ("skipped", "the profiler could not see CUDA's runtime")


def test_collectives_are_those_of_the_cpu_with_weights_in_half_the_bytes_in_bf16() -> None:
    golden = measured(small_case("golden-2", "cpu", 2, "fp32"))
    fp32, bf16 = (measured(small_case("", "cuda", 2, precision)) for precision in ("fp32", "bf16"))
    assert bf16.trace is not None
    assert status(list(collective_checks(fp32, golden))) == ["pass", "pass"]
    assert status(list(collective_checks(bf16, golden))) == ["fail", "pass"]
    halved = replace(bf16.trace, collectives={("all-gather", 500): 2.0, ("reduce-scatter", 2000): 1.0})
    assert status(list(collective_checks(replace(bf16, trace=halved), golden))) == ["pass", "pass"]
    assert not list(collective_checks(measured(), golden)), "one rank sends nothing"


def test_peak_memory_is_held_against_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "device_name", lambda _device: "NVIDIA L4")
    found = measured()
    for off, expected in ((0.91, "pass"), (1.09, "pass"), (0.89, "fail"), (1.11, "fail")):
        peak = int(off * found.case.estimate.total)
        memory, mfu = speed_checks(replace(found, peak_bytes=peak))
        assert (memory.status, mfu.status) == (expected, "skipped")


def test_mfu_is_held_against_the_predicted_step_of_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: H100)
    case = large_case(1)
    assert (case.model, case.sequences % case.micro_batch) == (GPT_350M, 0)
    assert case.estimate.total <= MEMORY_SHARE * H100.total_memory
    predicted = StepTime(
        GPT_350M,
        case.parallelism,
        workers=1,
        micro_batch=case.micro_batch,
        batch_tokens=case.batch_tokens,
        device="H100 SXM",
    ).mfu
    first, last = case.profile or (0, 0)
    slow = {*range(1, 5), *range(first, last + 2)}  # warming up, or traced
    for share, expected in ((0.8, "pass"), (0.7, "fail"), (1.2, "pass"), (1.3, "fail")):
        mfu = tuple(0.01 if step in slow else share * predicted for step in range(1, case.steps + 1))
        check = mfu_check("MFU", measured(case, mfu=mfu), "NVIDIA H100 80GB HBM3")
        assert check.status == expected
        assert check.value == pytest.approx(abs(share - 1))
    assert mfu_check("MFU", measured(case), "NVIDIA H100 PCIe").status == "skipped"


def test_without_a_gpu_the_command_refuses(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = muscale(capfd, "doctor", "--gpu", "--out", tmp_path / "gpu.json")
    assert done.code == 2
    assert "torch must see a GPU" in done.err
    assert not (tmp_path / "gpu.json").exists()


def test_neither_the_command_nor_its_checks_need_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from muscale.machine.gpu import gpu_checks\n"
        "from muscale.cli.entry import run\n"
        "print(gpu_checks.packing('cpu', None)[0][0].found, run(['doctor', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "Ray is not installed 0", done.stderr


@pytest.mark.gpu
def test_a_gpu_passes_all_checks() -> None:
    report = check_gpus()
    assert report.passed, str(report)
