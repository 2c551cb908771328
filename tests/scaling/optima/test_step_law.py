"""The laws of rate and batch in N and D: planted exponents, intervals, and Step Law's own cells (2503.04715)."""

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingError, StepLaw, fit_step_law


def cells(noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Step Law's published laws on a grid of five sizes and four budgets, with noise in octaves."""
    rng = np.random.default_rng(seed)
    n_params, n_tokens = (x.ravel() for x in np.meshgrid(np.geomspace(5e7, 1e9, 5), np.geomspace(2e9, 1e11, 4)))
    error = 2 ** (noise * rng.standard_normal((2, len(n_params))))
    rate, batch = 1.79 * n_params**-0.713 * n_tokens**0.307, 0.58 * n_tokens**0.571
    return pd.DataFrame(
        {"n_params": n_params, "n_tokens": n_tokens, "rate": rate * error[0], "batch_tokens": batch * error[1]}
    )


def test_planted_laws_are_recovered() -> None:
    rate, batch = fit_step_law(cells()), fit_step_law(cells(), of="batch")
    assert (rate.coefficient, rate.params_exponent, rate.tokens_exponent) == pytest.approx((1.79, -0.713, 0.307))
    assert (batch.coefficient, batch.params_exponent, batch.tokens_exponent) == pytest.approx((0.58, 0.0, 0.571))
    assert rate.best(7e9, 1.4e11) == pytest.approx(1.79 * 7e9**-0.713 * 1.4e11**0.307)
    assert batch.best(7e9, [1e10, 1e11]) == pytest.approx(0.58 * np.array([1e10, 1e11]) ** 0.571)
    assert rate.supports(1e10, 1e12)
    assert not rate.supports(2e10, 1e11)


@pytest.mark.parametrize("of", ["rate", "batch"])
def test_intervals_cover(of: str) -> None:
    truth = {"coefficient": 1.79, "params_exponent": -0.713, "tokens_exponent": 0.307}
    if of == "batch":
        truth = {"coefficient": 0.58, "params_exponent": 0.0, "tokens_exponent": 0.571}
    inside, ahead = [], []
    for seed in range(60):
        law = fit_step_law(cells(0.2, seed), of=of, depends_on_params=True)  # type: ignore[arg-type]
        table = law.intervals(0.9)
        inside.append([table.loc[n, "low"] < v < table.loc[n, "high"] for n, v in truth.items()])
        low, high = law.interval(7e9, 1.4e11, 0.9)
        new = 2 ** (0.2 * np.random.default_rng(1000 + seed).standard_normal())
        expected = truth["coefficient"] * 7e9 ** truth["params_exponent"] * 1.4e11 ** truth["tokens_exponent"]
        ahead.append(low < expected * new < high)
    assert 0.8 <= np.mean(inside) <= 0.97
    assert np.mean(ahead) >= 0.8


def test_precise_cells_count_more() -> None:
    table = cells()
    table.loc[:3, "rate"] *= 4
    even = fit_step_law(table)
    weighted = fit_step_law(table.assign(stderr=np.where(np.arange(len(table)) < 4, 2.0, 0.05)))
    assert abs(weighted.params_exponent + 0.713) < 0.02 < abs(even.params_exponent + 0.713)


def test_what_can_not_be_told() -> None:
    with pytest.raises(ScalingError, match="need at least 6 cells"):
        fit_step_law(cells().iloc[:5])
    with pytest.raises(ScalingError, match="n_params is the same in every cell"):
        fit_step_law(cells().assign(n_params=1e8))
    assert fit_step_law(cells().assign(n_params=1e8), of="batch").params_exponent == 0
    with pytest.raises(ValueError, match="of must be rate or batch, got 'decay'"):
        fit_step_law(cells(), of="decay")  # type: ignore[arg-type]
    chinchilla = cells(0.1).assign(n_tokens=lambda t: 20 * t["n_params"] * 1.1 ** (np.arange(20) % 3))
    assert "log N and log D correlate by 1.00" in fit_step_law(chinchilla).warnings[0]
    exactly = cells().assign(n_tokens=lambda t: 20 * t["n_params"])
    with pytest.raises(ScalingError, match="log N and log D lie on one line over the cells"):
        fit_step_law(exactly)
    assert fit_step_law(exactly, depends_on_params=False).params_exponent == 0
    with pytest.raises(ValueError, match="n_params must be finite and above 0, got -1"):
        fit_step_law(cells(0.1)).interval(-1, 1e9)


def test_it_speaks_and_survives_json() -> None:
    law = fit_step_law(cells(0.1))
    restored = StepLaw.from_dict(json.loads(json.dumps(law.to_dict(), allow_nan=False)))
    assert restored.to_dict() == law.to_dict()
    assert str(restored) == str(law)
    assert "20, N 5e+07 to 1e+09" in str(law)


def test_step_laws_best_points_give_its_exponents(public_table: Callable[[str], pd.DataFrame]) -> None:
    """Published: 1.79 N^−.713 D^.307 and .58 D^.571. Measured on its 17 best grid points: N^−.82 ± .20 D^.29 ± .11, D^.50 ± .14."""
    table = public_table("steplaw_dense_best").rename(columns={"lr": "rate"})
    table["batch_tokens"] = 2048 * table["bs"]
    rate, batch = fit_step_law(table), fit_step_law(table, of="batch")
    expected = [(rate, "params_exponent", -0.713), (rate, "tokens_exponent", 0.307), (batch, "tokens_exponent", 0.571)]
    for law, name, published in expected:
        low, high = law.intervals(0.9).loc[name, ["low", "high"]]
        assert low < published < high
    low, high = batch.interval(1e9, 1e11)
    assert low < 0.58 * 1e11**0.571 < high
    low, high = rate.interval(1e9, 1e11)
    assert low < 1.79 * 1e9**-0.713 * 1e11**0.307 < high
