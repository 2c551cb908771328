"""The horizon law: planted exponents, what the prior does, and where the law ends."""

import json
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from scaling import HorizonLaw, ScalingError, fit_horizon_law
from scaling.optima.horizon import OPTIMUM_SCATTER


def sweep(
    exponent: float = 0.27,
    budgets: Sequence[float] = (1e9, 2e9, 4e9),
    offsets: Sequence[float] = (0.0,),
    noise: float = 0.0,
    seed: int = 0,
    n_rates: int = 7,
) -> pd.DataFrame:
    """Optimum at 2^(−7 + offset) for 2e9 tokens; log loss rises 2 % one octave off, as measured on small models."""
    rng = np.random.default_rng(seed)
    rows = [
        (width, n_tokens, 2.0**x, math.exp(1 + 0.02 * (x - at) ** 2 + noise * rng.standard_normal()))
        for width, offset in zip((64, 128, 256), offsets, strict=False)
        for n_tokens in budgets
        for at in [-7 + offset - exponent * math.log2(n_tokens / 2e9)]
        for x in np.linspace(-9.5, -4.5, n_rates)
    ]
    return pd.DataFrame(rows, columns=["width", "n_tokens", "rate", "loss"])


@pytest.mark.parametrize("exponent", [0.0, 0.27, 0.6])
def test_planted_exponent_is_recovered_without_prior(exponent: float) -> None:
    law = fit_horizon_law(sweep(exponent), prior=None)
    assert law.exponent == law.raw_exponent == pytest.approx(exponent, abs=1e-8)
    assert law.rate(2e9) == pytest.approx(2**-7)
    assert law.rate(2e10) == pytest.approx(2**-7 * 10**-exponent)
    assert law.curvature == pytest.approx(0.04)


def test_groups_share_the_exponent_and_keep_their_offsets() -> None:
    law = fit_horizon_law(sweep(0.3, offsets=(-0.2, 0.0, 0.2)))
    assert law.raw_exponent == pytest.approx(0.3, abs=1e-8)
    assert law.offsets == pytest.approx({"64": -0.2, "128": 0.0, "256": 0.2}, abs=1e-8)
    assert law.rate(2e9) == pytest.approx(2**-7)


def test_the_prior_steadies_noisy_small_grids() -> None:
    """7 rates, 2 budgets over 4×, noise .5 % of the loss: exponents stay sane, nearer the truth than raw ones."""
    laws = [fit_horizon_law(sweep(0.3, (1e9, 4e9), noise=0.005, seed=seed)) for seed in range(40)]
    used, raw = np.array([law.exponent for law in laws]), np.array([law.raw_exponent for law in laws])
    assert used.min() > 0.1
    assert used.max() < 0.5
    assert used.std() < raw.std()
    assert raw.std() < laws[0].raw_stderr


def test_the_prior_is_weighed_by_its_precision() -> None:
    law = fit_horizon_law(sweep(0.5), prior=(0.3, 0.15))
    data, prior = law.raw_stderr**-2, 0.15**-2
    assert law.exponent == pytest.approx((data * 0.5 + prior * 0.3) / (data + prior))
    assert law.stderr == pytest.approx((data + prior) ** -0.5)


def test_interval_covers_the_planted_rate_and_grows_with_distance() -> None:
    law = fit_horizon_law(sweep(0.27, noise=0.003))
    for n_tokens in (2e9, 1e11):
        low, high = law.interval(n_tokens)
        assert low < 2**-7 * (n_tokens / 2e9) ** -0.27 < high
    near, far = law.interval(2e9), law.interval(1e11)
    assert far[1] / far[0] > 1.5 * near[1] / near[0]


@pytest.mark.parametrize("n_tokens", [1e8, 3e9, 1e11])
def test_interval_is_that_of_a_line_through_optima_that_scatter_by_15_hundredths_of_an_octave(n_tokens: float) -> None:
    """Without noise: the straight line's own prediction interval, by least squares in log2 D itself, one level for each group."""
    law = fit_horizon_law(pd.concat([sweep(), sweep(budgets=(4e9, 1.6e10)).assign(width=128)]), prior=None)
    levels = np.repeat(np.eye(2), [3, 2], axis=0)
    design = np.column_stack([levels, np.log2([1e9, 2e9, 4e9, 4e9, 1.6e10])])
    covariance, at = np.linalg.inv(design.T @ design), np.array([0.5, 0.5, math.log2(n_tokens)])
    reach = NormalDist().inv_cdf(0.95) * 0.15 * math.sqrt(1 + at @ covariance @ at)
    best = float(law.rate(n_tokens))
    assert law.interval(n_tokens) == pytest.approx((best * 2**-reach, best * 2**reach), rel=1e-6)
    assert law.raw_stderr == pytest.approx(0.15 * math.sqrt(covariance[2, 2]), rel=1e-6)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("errors", [1.98, 2.02])
def test_data_two_standard_errors_from_the_prior_contradict_it(side: int, errors: float) -> None:
    """Of the difference: the data's, .15/√2 for three budgets an octave apart, and the prior's own .2."""
    law = fit_horizon_law(sweep(0.1 + side * errors * math.hypot(0.15 / math.sqrt(2), 0.2)))
    assert ("contradicts the prior" in "; ".join(law.warnings)) == (errors > 2)


def test_regret_is_what_fit_filters_by() -> None:
    law = fit_horizon_law(sweep(0.3), prior=None)
    assert law.regret(law.rate(1e10), 1e10) == pytest.approx(0)
    np.testing.assert_allclose(law.regret(law.rate(1e10) * np.array([2, 0.5]), 1e10), math.expm1(0.02))


def test_extrapolation_is_capped_and_flagged() -> None:
    law = fit_horizon_law(sweep(0.3))
    assert law.supported_range == pytest.approx((1e7, 4e11))
    assert law.supports(4e11)
    assert not law.supports(4.1e11)
    assert law.rate(4e13) == law.rate(4e11) < law.rate(4e10)


def test_optima_outside_their_grids_are_listed_and_not_used() -> None:
    rows = sweep(0.3)
    beyond = sweep(0.3, budgets=(1e13,))
    beyond["loss"] = np.exp(1 + 0.02 * (np.log2(beyond["rate"]) + 12) ** 2)
    law = fit_horizon_law(pd.concat([rows, beyond], ignore_index=True), prior=None)
    assert law.exponent == pytest.approx(0.3, abs=1e-8)
    assert law.n_tokens_range == (1e9, 4e9)
    assert law.optima["used"].tolist() == [True, True, True, False]
    assert "1e+13 tokens: not used: edge" in "; ".join(law.warnings)


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        (sweep(budgets=(1e9, 4e9)), "2 token budgets: at least 3"),
        (sweep(budgets=(1e9, 1.5e9, 2e9)), "the token budgets span 2×: at least 4×"),
        (sweep(-0.7, budgets=(1e9, 4e9, 1.6e10)), "contradicts the prior 0.1 ± 0.2: is the batch fixed?"),
    ],
)
def test_warnings(rows: pd.DataFrame, warning: str) -> None:
    law = fit_horizon_law(rows)
    assert law.status == "doubtful"
    assert warning in "; ".join(law.warnings)


def test_groups_of_one_budget_are_not_those_that_determine_the_exponent() -> None:
    several = pd.concat([sweep(0.3), sweep(0.3, budgets=(4e9,)).assign(width=128), sweep(0.3).assign(width=256)])
    assert fit_horizon_law(several).measured_on == ("256", "64")


def test_a_good_sweep_raises_no_warning() -> None:
    assert fit_horizon_law(sweep(noise=0.003)).status == "ok"


def test_a_grid_that_diverged_is_listed_and_not_used() -> None:
    rows = sweep(0.3)
    rows.loc[rows["n_tokens"] == 4e9, "loss"] = np.nan
    law = fit_horizon_law(rows, prior=None)
    assert law.exponent == pytest.approx(0.3, abs=1e-8)
    assert "4e+09 tokens: not used: fewer than three finite rates" in "; ".join(law.warnings)
    restored = HorizonLaw.from_dict(json.loads(json.dumps(law.to_dict(), allow_nan=False)))
    pd.testing.assert_frame_equal(restored.optima, law.optima)


def test_no_usable_answer() -> None:
    with pytest.raises(ScalingError, match="tested rates at two token budgets"):
        fit_horizon_law(sweep(budgets=(1e9,)))
    with pytest.raises(ScalingError, match="add a rate or a seed"):
        fit_horizon_law(sweep(n_rates=3))


def rung_optima(exponent: float, seed: int, stderr: float = 0.1) -> pd.DataFrame:
    """A search's optima at four lengths, an octave apart and .7 octaves below the grids', with their error and their scatter."""
    rng = np.random.default_rng([seed, 1])
    octaves = np.arange(-3.0, 1.0)
    error = math.hypot(stderr, OPTIMUM_SCATTER) * rng.standard_normal(4)
    at = -7.7 - exponent * octaves + error
    return pd.DataFrame({"group": "sweep", "n_tokens": 4e9 * 2**octaves, "log2_rate": at, "stderr": stderr})


def test_optima_fitted_elsewhere_sharpen_the_exponent_and_not_the_level() -> None:
    """40 planted sets: two budgets over 4×, noise .3 % of the loss, every optimum with its scatter."""
    grids = [
        pd.concat(
            sweep(
                0.3, (n,), [OPTIMUM_SCATTER * np.random.default_rng([seed, i]).standard_normal()], 0.003, 2 * seed + i
            )
            for i, n in enumerate((1e9, 4e9))
        )
        for seed in range(40)
    ]
    alone = [fit_horizon_law(rows, prior=None) for rows in grids]
    both = [fit_horizon_law(rows, prior=None, optima=rung_optima(0.3, seed)) for seed, rows in enumerate(grids)]
    assert all(b.raw_stderr < 0.8 * a.raw_stderr for a, b in zip(alone, both, strict=True))
    found = np.array([law.raw_exponent for law in both])
    assert found.std() < np.std([law.raw_exponent for law in alone])
    assert found.mean() == pytest.approx(0.3, abs=3 * found.std() / math.sqrt(40))
    z = [(law.raw_exponent - 0.3) / law.raw_stderr for law in both]
    assert np.sqrt(np.mean(np.square(z))) < 1.2
    levels = np.log2([float(law.rate(2e9)) for law in both])
    assert levels.mean() == pytest.approx(-7, abs=0.1), "the search's optima lie .7 octaves lower"
    assert np.mean([law.offsets["sweep"] for law in both]) == pytest.approx(-0.4, abs=0.1)  # .7 less .3 at 2e9 tokens


def test_a_grid_of_one_budget_gives_the_level_and_the_search_the_exponent() -> None:
    law = fit_horizon_law(sweep(0.3, budgets=(4e9,), noise=0.001), optima=rung_optima(0.3, 0, stderr=0.01))
    assert law.exponent == pytest.approx(0.3, abs=0.15)
    assert law.rate(4e9) == pytest.approx(2**-7.3, rel=0.05)
    assert law.optima["status"].tolist() == ["ok"] + 4 * ["given"]
    restored = HorizonLaw.from_dict(json.loads(json.dumps(law.to_dict(), allow_nan=False)))
    pd.testing.assert_frame_equal(restored.optima, law.optima)


def test_an_optimum_weighs_by_its_own_error_and_by_its_scatter() -> None:
    """.2 and .15 octaves make .25; of four budgets an octave apart, whose squares from their mean sum to 5."""
    law = fit_horizon_law(sweep(0.3, budgets=(4e9,)), prior=None, optima=rung_optima(0.3, 0, stderr=0.2))
    assert law.raw_stderr == pytest.approx(0.25 / math.sqrt(5))


def test_optima_fitted_elsewhere_are_held_to_their_rules() -> None:
    given = rung_optima(0.3, 0)
    with pytest.raises(ValueError, match="stderr .*got inf"):
        fit_horizon_law(sweep(), optima=given.assign(stderr=math.inf))
    with pytest.raises(ValueError, match="missing column stderr"):
        fit_horizon_law(sweep(), optima=given.drop(columns="stderr"))
    with pytest.raises(ValueError, match="got 64"):
        fit_horizon_law(sweep(), optima=given.assign(group=64))
    rising = sweep().assign(loss=lambda rows: rows["rate"] ** 0.1)
    with pytest.raises(ScalingError, match="tested rates, .*level"):
        fit_horizon_law(rising, optima=given)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="n_tokens .*got -1"):
        fit_horizon_law(sweep().assign(n_tokens=-1.0))
    with pytest.raises(ValueError, match="n_tokens .*got 0"):
        fit_horizon_law(sweep()).rate(0)
    with pytest.raises(ValueError, match="level .*got 2"):
        fit_horizon_law(sweep()).interval(1e9, 2)
    once = sweep().assign(seed=0)
    with pytest.raises(ValueError, match="row 0 is another of"):
        fit_horizon_law(pd.concat([once, once.iloc[[0]]]))
    with pytest.raises(ValueError, match="the prior's standard deviation .*got 0"):
        fit_horizon_law(sweep(), prior=(0.3, 0))
    with pytest.raises(ValueError, match="the prior's mean .*got nan"):
        fit_horizon_law(sweep(), prior=(math.nan, 0.1))
    with pytest.raises(ValueError, match="width .* row 0 "):
        fit_horizon_law(sweep().assign(width=math.nan))


def test_round_trip_and_str() -> None:
    law = fit_horizon_law(pd.concat([sweep(noise=0.003), sweep(budgets=(8e9,), n_rates=3)]))
    restored = HorizonLaw.from_dict(json.loads(json.dumps(law.to_dict(), allow_nan=False)))
    assert restored.to_dict() == law.to_dict()
    pd.testing.assert_frame_equal(restored.optima, law.optima)
    assert restored.interval(1e11) == law.interval(1e11)
    assert "data alone" in str(law)
