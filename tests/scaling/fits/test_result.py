"""The fitted law has a readable str, and survives JSON."""

import json
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingFit, fit


@pytest.fixture
def result(ladder: Callable[..., pd.DataFrame]) -> ScalingFit:
    runs = ladder(noise=0.005).assign(stem=[f"run {i // 2}" for i in range(20)], regret=0.0)
    runs.loc[7, "regret"] = 0.1
    return fit(runs, n_params_convention="without embeddings", n_bootstrap=60)


def test_json_round_trip_is_exact(result: ScalingFit) -> None:
    restored = ScalingFit.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert restored.to_dict() == result.to_dict()
    np.testing.assert_array_equal(restored.draws, result.draws)
    pd.testing.assert_frame_equal(restored.rows, result.rows)
    pd.testing.assert_frame_equal(restored.left_out, result.left_out)
    assert restored.forecast(1e9, 2e10) == result.forecast(1e9, 2e10)


def test_round_trip_with_nothing_left_out(ladder: Callable[..., pd.DataFrame]) -> None:
    result = fit(ladder(), n_params_convention="total", n_bootstrap=2)
    restored = ScalingFit.from_dict(json.loads(json.dumps(result.to_dict())))
    assert restored.left_out.empty
    assert restored.left_out["loss"].dtype == np.float64


def test_ranges_and_counts(result: ScalingFit) -> None:
    assert (result.n_rows, result.n_stems, len(result.left_out)) == (19, 10, 1)
    assert result.n_params_range == pytest.approx((1e7, 2e8))
    assert result.tokens_per_param_range == pytest.approx((10, 80))
    assert result.compute_range == pytest.approx((6 * 1e7 * 1e8, 6 * 2e8 * 1.6e10))
    assert 0.003 < result.residual_std < 0.008
    squares = (result.residuals()["log_residual"] ** 2).sum()
    assert result.residual_std == pytest.approx(math.sqrt(squares / (19 - 5)))


def test_residuals_are_of_the_log_loss(result: ScalingFit) -> None:
    table = result.residuals()
    np.testing.assert_allclose(table["predicted"] * np.exp(table["log_residual"]), table["loss"])
    np.testing.assert_allclose(table["predicted"], result.predict(table["n_params"], table["n_tokens"]))


def test_intervals(result: ScalingFit) -> None:
    wide, narrow = result.intervals(0.95), result.intervals(0.5)
    assert list(wide.index) == ["E", "A", "B", "alpha", "beta", "params_exponent"]
    assert (wide["low"] < narrow["low"]).all()
    assert (narrow["low"] < narrow["high"]).all()
    assert wide.loc["alpha", "low"] < wide.loc["alpha", "estimate"] < wide.loc["alpha", "high"]
    ends = np.quantile(result.draws[:, 3], [0.025, 0.975])
    np.testing.assert_allclose(wide.loc["alpha", ["low", "high"]].astype(float), ends)
    with pytest.raises(ValueError, match="level .*got 90"):
        result.intervals(90)


def test_str_contains_what_a_reader_must_know(result: ScalingFit) -> None:
    text = str(result)
    for part in (
        "nats per token",
        "alpha",
        "19 fitted, 1 left out",
        "without embeddings",
        "over 10 runs",
    ):
        assert part in text
    assert "draws" not in repr(result)
    assert result._repr_html_().startswith("<pre>L(N, D) = E")
