"""The laws of rate and batch in N and D: planted exponents, intervals, and Step Law's own cells (2503.04715)."""

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy import stats

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


def test_three_sizes_at_two_budgets_are_enough() -> None:
    law = fit_step_law(cells().iloc[[0, 1, 2, 5, 6, 7]])
    assert (law.coefficient, law.params_exponent, law.tokens_exponent) == pytest.approx((1.79, -0.713, 0.307))


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


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_are_students_of_a_plane_in_logarithms(level: float) -> None:
    """Of 17 cells whose log N and log D correlate: of the plane's numbers by least squares, and of a new cell with its own scatter."""
    table = cells(0.1).drop(index=[3, 4, 9])
    law = fit_step_law(table)
    design = np.column_stack([np.ones(17), np.log2(table["n_params"]), np.log2(table["n_tokens"])])
    covariance, quantile = np.linalg.inv(design.T @ design), stats.t.ppf((1 + level) / 2, 17 - 3)
    assert law.scatter == pytest.approx(np.sqrt((law.cells["off"] ** 2).sum() / (17 - 3)))
    at = np.array([1, np.log2(7e9), np.log2(1.4e11)])
    reach = quantile * law.scatter * np.sqrt(1 + at @ covariance @ at)
    best = float(law.best(7e9, 1.4e11))
    assert law.interval(7e9, 1.4e11, level) == pytest.approx((best * 2**-reach, best * 2**reach), rel=1e-6)
    own = law.intervals(level)
    own.loc["coefficient"] = np.log2(own.loc["coefficient"])
    errors = quantile * law.scatter * np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(own["high"] - own["estimate"], errors, rtol=1e-6)
    np.testing.assert_allclose(own["estimate"] - own["low"], errors, rtol=1e-6)


def test_of_the_cells_errors_their_ratios_alone_count() -> None:
    """A law of cells that are all as sure is the one of cells of which nothing is said: the scatter is measured about it."""
    silent, alike = fit_step_law(cells(0.1)), fit_step_law(cells(0.1).assign(stderr=0.5))
    assert alike.scatter == pytest.approx(silent.scatter)
    assert alike.interval(7e9, 1.4e11) == pytest.approx(silent.interval(7e9, 1.4e11))


@pytest.mark.parametrize(("n_params", "n_tokens"), [(5e6, 1e10), (1e10, 1e10), (1e8, 2e8), (1e8, 1e12)])
def test_the_law_is_supported_to_ten_times_beyond_its_cells(n_params: float, n_tokens: float) -> None:
    """From the grid's middle, (2e8, 1e10), towards each of the four ends and past it."""
    law = fit_step_law(cells())
    for beyond, supported in ((0.99, True), (1.01, False)):
        assert law.supports(2e8 * (n_params / 2e8) ** beyond, 1e10 * (n_tokens / 1e10) ** beyond) == supported


def test_precise_cells_count_more() -> None:
    table = cells()
    table.loc[:3, "rate"] *= 4
    even = fit_step_law(table)
    weighted = fit_step_law(table.assign(stderr=np.where(np.arange(len(table)) < 4, 2.0, 0.05)))
    assert abs(weighted.params_exponent + 0.713) < 0.02 < abs(even.params_exponent + 0.713)


def test_unidentified_fits_are_refused() -> None:
    with pytest.raises(ScalingError, match="need at least 6 cells"):
        fit_step_law(cells().iloc[:5])
    with pytest.raises(ScalingError, match="n_params .*got one value"):
        fit_step_law(cells().assign(n_params=1e8))
    assert fit_step_law(cells().assign(n_params=1e8), of="batch").params_exponent == 0
    with pytest.raises(ScalingError, match="n_tokens .*got one value"):
        fit_step_law(cells().assign(n_tokens=1e10), of="batch")
    with pytest.raises(ValueError, match="of .*got 'decay'"):
        fit_step_law(cells(), of="decay")  # type: ignore[arg-type]
    chinchilla = cells(0.1).assign(n_tokens=lambda t: 20 * t["n_params"] * 1.1 ** (np.arange(20) % 3))
    assert "log N and log D correlate by 1.00" in fit_step_law(chinchilla).warnings[0]
    exactly = cells().assign(n_tokens=lambda t: 20 * t["n_params"])
    with pytest.raises(ScalingError, match="log N and log D"):
        fit_step_law(exactly)
    assert fit_step_law(exactly, depends_on_params=False).params_exponent == 0
    with pytest.raises(ValueError, match="n_params .*got -1"):
        fit_step_law(cells(0.1)).interval(-1, 1e9)
    for level in (0, 1):
        with pytest.raises(ValueError, match=f"level .*got {level}"):
            fit_step_law(cells(0.1)).intervals(level)


def test_its_str_is_readable_and_it_survives_json() -> None:
    law = fit_step_law(cells(0.1))
    restored = StepLaw.from_dict(json.loads(json.dumps(law.to_dict(), allow_nan=False)))
    assert restored.to_dict() == law.to_dict()
    assert str(restored) == str(law)
    assert "20, N 5e+07 to 1e+09" in str(law)
    assert str(law).startswith(
        f"rate = {law.coefficient:.4g}·N^{law.params_exponent:.3f}·D^{law.tokens_exponent:.3f}\n"
    )
    assert str(fit_step_law(cells(), of="batch")).startswith("batch = 0.58·D^0.571 tokens\n")


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
