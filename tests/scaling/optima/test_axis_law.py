"""Scales of a mixture of experts in the verdict, and the law of a scale on which the best rate does not transfer."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from scaling import AxisLaw, ScalingError, Verdict, fit_axis_law, fit_optimum, fit_verdict
from tests.scaling.optima.test_verdict import rows

SIZES = (4.0, 8.0, 16.0, 32.0)
DRIFTING = (-6.0, -6.6, -7.2, -7.8)


def optima(log2: tuple[float, ...], *, points: int = 7) -> dict[float, object]:
    values = 2.0 ** np.linspace(-9, -4, points)
    noises = np.random.default_rng(0)
    return {
        size: fit_optimum(
            values, np.exp(1 + 0.02 * (np.log2(values) - at) ** 2 + 1e-4 * noises.standard_normal(points))
        )
        for size, at in zip(SIZES, log2, strict=True)
    }


def test_a_planted_power_is_found() -> None:
    law = fit_axis_law(optima(DRIFTING), along="experts")  # type: ignore[arg-type]
    assert law.exponent == pytest.approx(0.6, abs=0.03)
    low, high = law.interval()
    assert low < 0.6 < high
    assert 2 ** (law.log2_ref - 0.6 * math.log2(8 / law.size_ref)) == pytest.approx(2**-6.6, rel=0.03)
    assert law.factor(32, 8) == pytest.approx(4**-0.6, rel=0.05)
    assert (law.supports(64), law.supports(65), law.supports(2), law.supports(1.9)) == (True, False, True, False)
    assert AxisLaw.from_dict(json.loads(json.dumps(law.to_dict()))) == law


@pytest.mark.parametrize(
    "log2",
    [(-6.5, -6.5, -6.52, -6.5), (-6.0, -6.0, -6.0, -8.5), (-6.0, -7.0, -12.0, -12.0)],
    ids=["no exponent", "no power", "two optima outside their values"],
)
def test_no_law_without_evidence(log2: tuple[float, ...]) -> None:
    with pytest.raises(ScalingError):
        fit_axis_law(optima(log2), along="experts")  # type: ignore[arg-type]


def test_no_law_of_unknown_noise() -> None:
    with pytest.raises(ScalingError, match="noise"):
        fit_axis_law(optima((-6.0, -6.5, -7.0, -7.5), points=3), along="experts")  # type: ignore[arg-type]


def test_a_scale_that_drifts_fails_the_verdict_has_a_law_and_does_not_touch_the_others() -> None:
    experts = rows(DRIFTING, along="experts", sizes=SIZES, rng=3)
    verdict = fit_verdict(pd.concat([rows(), experts]))
    assert verdict.verdict == "fail"
    assert [t.verdict for t in verdict.transfers] == ["pass", "fail"]
    law = verdict.axis_laws["experts"]
    assert isinstance(law, AxisLaw)
    assert law.exponent == pytest.approx(0.6, abs=0.1)
    assert str(law) in str(verdict)
    assert verdict.of_axes({"experts"}).verdict == "fail"
    assert verdict.of_axes(()).passed
    assert verdict.of_axes(()).table().equals(fit_verdict(rows()).table())
    restored = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict(), allow_nan=False)))
    assert restored.axis_laws == verdict.axis_laws


def test_a_dense_verdict_has_no_law_of_an_axis_and_stays_as_it_is() -> None:
    dense = fit_verdict(rows((-6.0, -7.0, -8.0)))
    assert dense.verdict == "fail"
    assert dense.axis_laws == {}
    assert str(dense.of_axes(())) == str(dense)


@pytest.mark.parametrize(("along", "expected"), [("granularity", "pass"), ("sparsity", "pass"), ("experts", "fail")])
def test_finer_and_sparser_mixtures_need_not_be_better(along: str, expected: str) -> None:
    worse = rows((-6.5, -6.5, -6.5), along=along, sizes=(1, 2, 4), gain=-0.03)
    verdict = fit_verdict(pd.concat([rows(), worse]))
    transfer = verdict.transfers[-1]
    assert verdict.wider_is_better == (expected == "pass")
    assert not fit_verdict(worse).wider_is_better
    assert not transfer.larger_is_better
    assert transfer.verdict == expected


def test_runs_that_would_decide_are_options_of_the_study_file() -> None:
    verdict = fit_verdict(rows((-6.5, -6.5), along="granularity", sizes=(2.75, 5.5)))
    assert "transfer.granularities=[2.75,5.5,11]" in verdict.options
    assert "transfer.experts=[4,8,16]" in fit_verdict(rows((-6.5, -6.5), along="experts", sizes=(4, 8))).options
