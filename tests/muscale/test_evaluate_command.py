"""muscale evaluate refuses options that do not fit, before it reads weights or trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.muscale.command_lines import muscale

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tokens", "5"), ("--device", "cpu"), ("--workers", "1"), ("--items", "0"), ("--task", "x"), ("--prompt", "x")],
)
def test_an_option_for_weights_does_not_fit_a_study(
    make_study: Callable[[], Path], capsys: Capture, option: str, value: str
) -> None:
    study = make_study()
    done = muscale(capsys, "evaluate", study, option, value)
    assert (done.code, done.out) == (2, "")
    assert option in done.err
    assert not (study.parent / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--items", "0"), "--items"),
        (("--task", "sums"), "--tasks"),
        (("--tokens", "0"), "--prompt"),
        (("--prompt", "a", "--tokens", "0"), "n_tokens"),
        (("--tasks", "nowhere"), "nowhere"),
        (("--quantised-bits", "16"), "16"),
        (("--workers", "0"), "workers"),
        (("--set", "name=x"), "--set"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, capsys: Capture, given: tuple[str, ...], named: str) -> None:
    done = muscale(capsys, "evaluate", tmp_path, *given)
    assert (done.code, done.out) == (2, "")
    assert named in done.err
