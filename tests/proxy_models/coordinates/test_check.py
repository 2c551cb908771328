"""The criteria on planted measurements: a power of the size for each module, inside and outside each bound."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

from proxy_models.coordinates.check import Axis, CoordinateCheck

SIZES = (16, 32, 64, 128)


def synthetic(kind: str, sizes: dict[tuple[str, int], float | None], axis: Axis = "width") -> CoordinateCheck:
    """A check of one module whose rms is width^exponent, or depth^exponent; None is zero at every size."""
    rows = [
        {"axis": axis, "width": 64, "depth": 2, "module": "probe", "kind": kind, "quantity": quantity, "step": step}
        | {axis: size, "rms": 0.0 if exponent is None else float(size) ** exponent}
        for (quantity, step), exponent in sizes.items()
        for size in SIZES
    ]
    return CoordinateCheck(measurements=pd.DataFrame(rows), seeds=(0, 1))


@pytest.mark.parametrize(
    ("axis", "kind", "quantity", "step", "low", "high", "fault"),
    [
        ("width", "hidden", "size", 0, -0.15, 0.15, "init"),
        ("width", "hidden", "change", 1, -0.20, 0.20, "learning-rate scaling"),
        ("width", "norm", "change", 1, -0.20, 0.20, "learning-rate scaling"),
        ("width", "hidden", "size", 3, -0.25, 0.25, "learning-rate scaling"),
        ("width", "hidden matrix", "norm of weight", 0, -0.15, 0.15, "init"),
        ("width", "hidden matrix", "update of weight", 2, -0.40, 0.30, "learning-rate scaling"),
        ("width", "readout matrix", "update of weight", 1, -0.40, 0.30, "learning-rate scaling"),
        ("width", "readout", "size", 0, -0.60, 0.15, "readout multiplier"),
        ("width", "readout", "size", 5, -0.60, 0.15, "readout multiplier"),
        ("depth", "stream", "size", 0, -0.60, 0.15, "residual scaling"),
        ("depth", "stream", "change", 1, -0.40, 0.20, "learning-rate scaling in depth"),
        ("depth", "readout", "size", 0, -0.15, 0.15, "readout multiplier"),
        ("depth", "readout", "size", 5, -0.15, 0.15, "readout multiplier"),
    ],
)
def test_bounds_are_those_of_the_criterion(
    axis: Axis, kind: str, quantity: str, step: int, low: float, high: float, fault: str
) -> None:
    for slope in (low + 0.01, high - 0.01):
        assert synthetic(kind, {(quantity, step): slope}, axis).passed
    for slope in (low - 0.01, high + 0.01):
        (finding,) = synthetic(kind, {(quantity, step): slope}, axis).findings
        assert (finding.fault, finding.step, finding.low, finding.high) == (fault, step, low, high)
        assert finding.slope == pytest.approx(slope)


@pytest.mark.parametrize(
    ("axis", "kind", "quantity", "step"),
    [
        ("width", "norm", "size", 0),
        ("width", "norm", "size", 4),
        ("width", "readout", "change", 1),
        ("width", "embedding matrix", "norm of weight", 0),
        ("width", "readout matrix", "norm of weight", 0),
        ("depth", "readout", "change", 1),
        ("depth", "stream", "size", 1),
    ],
)
def test_what_no_criterion_names_is_left_out(axis: Axis, kind: str, quantity: str, step: int) -> None:
    assert synthetic(kind, {(quantity, step): 3.0}, axis).passed


def test_a_module_that_starts_at_zero_is_judged_from_its_first_size_and_first_change() -> None:
    still = {("size", 0): None, ("size", 1): None, ("change", 1): None}
    assert synthetic("hidden", {**still, ("size", 1): 0.0, ("change", 2): 0.1, ("change", 3): 3.0}).passed
    (finding,) = synthetic("hidden", {("size", 0): 0.0, ("change", 1): None, ("change", 2): 0.5}).findings
    assert (finding.fault, finding.step) == ("learning-rate scaling", 2)
    assert synthetic("readout", {("size", 0): None, ("size", 1): -0.1}).passed
    assert not synthetic("readout", {("size", 0): None, ("size", 1): 1.0}).passed


def test_a_module_that_never_moves_or_is_not_finite_fails() -> None:
    frozen = synthetic("hidden", {("size", 0): 0.0, ("change", 1): None, ("change", 2): None})
    assert "no finite slope" in str(frozen.findings[0])
    nan = synthetic("hidden", {("size", 0): 0.0, ("size", 1): float("nan"), ("change", 1): float("nan")})
    assert not nan.passed
    assert not CoordinateCheck.from_dict(json.loads(json.dumps(nan.to_dict(), allow_nan=False))).passed


def test_consequences_of_an_earlier_fault_are_not_reported() -> None:
    result = synthetic("hidden", {("size", 0): 0.5, ("change", 1): 0.9, ("size", 1): 0.8})
    assert [finding.fault for finding in result.findings] == ["init"]


def test_a_result_is_read_without_torch_and_plotly_is_the_figure_s() -> None:
    program = "import sys, proxy_models.coordinates.check; sys.exit(bool({'torch', 'plotly'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
