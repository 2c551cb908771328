"""Budgets are the same in every unit, and prices and peaks can be changed."""

import math
from dataclasses import replace

import pytest

from scaling import ACCELERATORS, Accelerator, Budget, MemoryLimit, accelerator

H100 = accelerator("H100 SXM")


def test_every_accelerator_has_a_bf16_peak_and_names_itself() -> None:
    for name, known in ACCELERATORS.items():
        assert known.name == name
        assert known.precision == "bf16"
        assert 1e14 < known.peak_flops["bf16"] < 1e16
        assert name in str(known)
        assert known.peak_flops.get("fp8", 2 * known.peak_flops["bf16"]) == pytest.approx(
            2 * known.peak_flops["bf16"], rel=0.03
        )


def test_an_hour_of_one_device_by_hand() -> None:
    """989.5e12 FLOP/s × 40 % × 3,600 s."""
    budget = Budget.of_gpu_hours(1, "H100 SXM")
    assert budget.compute_flops == pytest.approx(1.42488e18)
    assert budget.dollars == pytest.approx(H100.dollars_per_hour)
    assert budget.days is None


def test_reading_takes_the_bytes_over_the_bandwidth_of_all_devices() -> None:
    """H100 SXM: 3.35 TB/s."""
    assert H100.read_seconds(6.7e12, n_devices=4) == pytest.approx(0.5)
    for known in ACCELERATORS.values():
        assert 0.015 < known.read_seconds(known.memory_bytes) < 0.06, "the whole memory in some 30 ms"
    with pytest.raises(ValueError, match="memory_bandwidth of H100 SXM"):
        replace(H100, memory_bandwidth=None).read_seconds(1)
    with pytest.raises(ValueError, match="memory_bandwidth.*-1"):
        replace(H100, memory_bandwidth=-1.0)


def test_budgets_go_round_through_every_unit() -> None:
    start = Budget.of_dollars(2e6, H100, n_devices=1024)
    assert start.gpu_hours == pytest.approx(2e6 / H100.dollars_per_hour)
    by_hours = Budget.of_gpu_hours(start.gpu_hours or 0, H100)
    by_days = Budget.of_days(start.days or 0, H100, 1024)
    for other in (by_hours, by_days):
        assert other.compute_flops == pytest.approx(start.compute_flops, rel=1e-12)
        assert other.dollars == pytest.approx(2e6, rel=1e-12)
    assert by_days.days == pytest.approx((start.gpu_hours or 0) / 1024 / 24)


def test_a_budget_knows_its_accelerator_by_name() -> None:
    named = Budget(compute_flops=1e22, accelerator="H100 SXM", n_devices=8)  # type: ignore[arg-type]
    assert named == Budget(compute_flops=1e22, accelerator=H100, n_devices=8)
    assert named.dollars == pytest.approx(1e22 * H100.dollars_per_flop)


def test_what_is_assumed_can_be_replaced() -> None:
    mine = replace(H100, dollars_per_hour=2 * H100.dollars_per_hour, mfu=0.5, precision="fp8")
    assert mine.flops_per_second == pytest.approx(0.5 * 1979e12)
    ratio = Budget.of_dollars(1e6, H100).compute_flops / Budget.of_dollars(1e6, mine).compute_flops
    assert ratio == pytest.approx(2 * H100.flops_per_second / mine.flops_per_second)


def test_budget_prints_every_unit_it_knows() -> None:
    assert str(Budget(compute_flops=1e24)) == "budget  1e+24 FLOPs"
    text = str(Budget.of_days(30, H100, 1024))
    assert "30 days of 1,024 × H100 SXM: 40% of 989.5 TFLOP/s (bf16)" in text
    assert "737,280" in text.replace("7.373e+05", "737,280")
    assert Budget(compute_flops=1e24).dollars is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: accelerator("H900"), "accelerator .*got 'H900'"),
        (lambda: Budget(compute_flops=float("inf")), "compute_flops .*got inf"),
        (lambda: Budget(compute_flops=1.0, n_devices=0), "n_devices .*got 0"),
        (lambda: Budget.of_days(1, H100, math.inf), "n_devices .*got inf"),  # type: ignore[arg-type]
        (lambda: Budget.of_dollars(30, H100, 2.5), "n_devices .*got 2.5"),  # type: ignore[arg-type]
        (lambda: Budget(compute_flops=1.0, accelerator="H900"), "accelerator must be one of A100 40GB"),  # type: ignore[arg-type]
        (lambda: Budget.of_gpu_hours("10", H100), "hours .*got '10'"),  # type: ignore[arg-type]
        (lambda: accelerator("h100sxm"), r"got 'h100sxm': did you mean H100 SXM"),
        (lambda: accelerator("H100"), r"got 'H100': did you mean H100 SXM or H100 PCIe\?"),
        (lambda: Budget.of_dollars(-1, H100), "dollars .*got -1"),
        (lambda: Budget.of_gpu_hours(0, H100), "hours .*got 0"),
        (lambda: Budget.of_days(1, H100, 0), "n_devices .*got 0"),
        (lambda: replace(H100, mfu=1.1), "mfu .*got 1.1"),
        (lambda: replace(H100, precision="fp4"), "precision of H100 SXM .*got 'fp4'"),
        (lambda: replace(H100, dollars_per_hour=0), "dollars_per_hour .*got 0"),
        (
            lambda: Accelerator(name="x", peak_flops={"bf16": -1}, memory_bytes=1, dollars_per_hour=1),
            r"peak_flops\['bf16'\] .*got -1",
        ),
        (lambda: MemoryLimit.serving(H100, share=0), "share .*got 0"),
        (lambda: MemoryLimit.training(H100, n_devices=0), "n_devices .*got 0"),
    ],
)
def test_errors_name_the_rule_and_the_value(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_memory_by_hand() -> None:
    """70 % of 80 GB: at 2 bytes 28e9 parameters on one device; at 16 bytes on 64 devices 224e9."""
    assert MemoryLimit.serving("H100 SXM").max_params == pytest.approx(28e9)
    training = MemoryLimit.training("H100 SXM", n_devices=64)
    assert training.max_params == pytest.approx(224e9)
    assert str(training) == "training: at most 2.24e+11 parameters at 16 bytes each in 70% of 64 × 80 GB"
