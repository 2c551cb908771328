"""Support: each reason at its threshold, none from the form fitted, and none mended by one corrupted row."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import Chinchilla, Joint, Kaplan, ScalingFit, fit
from scaling.fits.support import MAX_RISE, _slopes, unsupported
from tests.scaling.conftest import PLANTED, planted_ladder

Ladder = Callable[..., pd.DataFrame]
NEAR = (3e8, 6e9)


def fitted(table: pd.DataFrame) -> ScalingFit:
    return fit(table, n_params_convention="total", n_bootstrap=2)


@pytest.fixture(scope="module")
def result() -> ScalingFit:
    return fitted(planted_ladder(0.003))


def reasons(result: ScalingFit, n_params: float, n_tokens: float) -> list[str]:
    return [*unsupported(result.rows, result.ensemble, n_params, n_tokens)]


@pytest.mark.parametrize(
    ("n_params", "n_tokens", "reason", "says"),
    [
        (1e11, 2e12, "far", "decades of compute above the second largest run: tested to 2.5"),
        (1e8, 2.5e8, "ratio", "tested within 2× of what two runs have, 10 to 80; two at 5 would bring it inside"),
        (1e8, 3.2e10, "ratio", "two at 160 would bring it inside"),
        (1e6, 2e7, "below", "below the second smallest run's"),
    ],
)
def test_unsupported_targets_say_why(
    result: ScalingFit, n_params: float, n_tokens: float, reason: str, says: str
) -> None:
    forecast = result.forecast(n_params, n_tokens)
    assert not forecast.supported
    assert reason in reasons(result, n_params, n_tokens)
    assert says in "; ".join(forecast.reasons)
    assert "unsupported: " in str(forecast)


def test_a_target_near_the_runs_is_supported(result: ScalingFit) -> None:
    assert result.forecast(*NEAR).reasons == ()
    assert "supported" in str(result.forecast(*NEAR))


@pytest.mark.parametrize(("decades", "far"), [(2.49, False), (2.51, True)])
def test_support_ends_two_and_a_half_decades_above_the_second_largest_run(
    result: ScalingFit, decades: float, far: bool
) -> None:
    second = np.sort(6 * result.rows["n_params"] * result.rows["n_tokens"])[-2]
    size = math.sqrt(second * 10**decades / 120)
    assert ("far" in reasons(result, size, 20 * size)) == far
    if far:
        assert (
            f"two runs of {second * 10**0.01:.2g} FLOPs would bring it inside"
            in result.forecast(size, 20 * size).reasons[0]
        )


def test_support_begins_at_the_second_smallest_run(result: ScalingFit) -> None:
    second = np.sort(6 * result.rows["n_params"] * result.rows["n_tokens"])[1]
    for times, below in ((1.01, False), (0.99, True)):
        size = math.sqrt(times * second / 120)
        assert ("below" in reasons(result, size, 20 * size)) == below


@pytest.mark.parametrize(("ratio", "outside"), [(4.9, True), (5.1, False), (159.0, False), (161.0, True)])
def test_support_ends_twice_beyond_the_tokens_per_parameter_of_two_runs(
    result: ScalingFit, ratio: float, outside: bool
) -> None:
    assert ("ratio" in reasons(result, 1e8, 1e8 * ratio)) == outside


@pytest.mark.parametrize("n_runs", [9, 10])
def test_ten_independent_runs_are_enough(n_runs: int) -> None:
    """Rows that share a stem are one run; what one decade of compute or the form lacks is in the interval."""
    table = planted_ladder(0.003).assign(stem=np.arange(20) % n_runs)
    found = fitted(table).forecast(*NEAR)
    assert found.reasons == (
        () if n_runs == 10 else ("9 independent runs: intervals were validated from 10 on, add 1",)
    )


def test_the_form_fitted_changes_nothing() -> None:
    """Kaplan's form has no floor and fits badly, the joint form is ill-conditioned: the forecast's fits are the same."""
    for target in (NEAR, (3e11, 6e12)):
        found = [
            fit(planted_ladder(0.003), n_params_convention="total", n_bootstrap=2, form=form).forecast(*target)
            for form in (Chinchilla(), Joint(), Kaplan())
        ]
        assert len({(forecast.loss, forecast.low, forecast.reasons) for forecast in found}) == 1
    law = replace(PLANTED, parameters={**PLANTED.parameters, "E": 3.0})
    assert replace(fitted(planted_ladder(0.003)), law=law).forecast(*NEAR).supported


def test_rows_that_scatter_by_more_than_two_percent_are_a_misfit() -> None:
    for noise, misfit in ((0.012, False), (0.05, True)):
        found = fitted(planted_ladder(noise))
        assert ("misfit" in reasons(found, *NEAR)) == misfit
    assert "losses in mid-schedule or of several recipes" in "; ".join(found.forecast(*NEAR).reasons)


def test_a_floor_far_below_the_losses_is_named() -> None:
    low = Chinchilla().law(E=0.1, A=30.0, B=50.0, alpha=0.12, beta=0.12)
    found = fitted(planted_ladder(0.0005, law=low))
    assert reasons(found, *NEAR) == ["low floor"]
    assert "of the least loss, below 0.4," in found.forecast(*NEAR).reasons[0]


UNSUPPORTED = {
    "few runs": (planted_ladder(0.003).iloc[[0, 4, 7, 9, 10, 13, 16, 19]], NEAR),
    "misfit": (planted_ladder(0.08), NEAR),
    "far": (planted_ladder(0.003), (3e11, 6e12)),
    "ratio": (planted_ladder(0.003), (1e8, 4e10)),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_each_reason_stands_alone(reason: str) -> None:
    table, target = UNSUPPORTED[reason]
    assert reasons(fitted(table), *target) == [reason]


@settings(max_examples=20, deadline=None)
@given(
    reason=st.sampled_from(sorted(UNSUPPORTED)),
    row=st.integers(0, 19),
    column=st.sampled_from(["n_params", "n_tokens", "loss"]),
    factor=st.sampled_from([1e-3, 0.1, 0.5, 0.9, 1.1, 1 / math.log(2), 10.0, 1e3]),
)
def test_one_corrupted_row_supports_nothing(reason: str, row: int, column: str, factor: float) -> None:
    """A mistyped N, D or loss of any one row leaves an unsupported forecast unsupported."""
    table, target = UNSUPPORTED[reason]
    corrupted = table.copy()
    corrupted.iloc[row % len(table), list(table.columns).index(column)] *= factor
    assert not fitted(corrupted).forecast(*target).supported


def test_bad_target(result: ScalingFit) -> None:
    with pytest.raises(ValueError, match="n_tokens .*got 0"):
        unsupported(result.rows, result.ensemble, 1e9, 0)


def test_perplexities_give_no_supported_forecast() -> None:
    table = planted_ladder(0.003)
    perplexity = table.assign(loss=np.exp(table["loss"]))
    assert "unit" in reasons(fitted(perplexity), *NEAR)
    named = fit(perplexity, n_params_convention="total", n_bootstrap=2, loss_unit="perplexity")
    assert "unit" not in reasons(named, *NEAR)
    assert "unit" not in reasons(fitted(table), *NEAR)


@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_falling_losses_at_one_ratio_do_not_rise(spread: float) -> None:
    """N and D move together but for rounding, so that neither has a slope of its own."""
    flagged = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n_params = np.geomspace(1e6, 1e9, 10)
        n_tokens = np.ceil(20 * n_params * np.exp(spread * rng.standard_normal(10)) / 65536) * 65536
        loss = (1.7 + 400 / n_params**0.34 + 410 / n_tokens**0.28) * np.exp(0.002 * rng.standard_normal(10))
        slopes = _slopes(pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss}), [])
        assert {*slopes} == {"compute"}
        flagged += max(slopes.values()) > MAX_RISE
    assert flagged == 0


def test_fewer_experts_in_larger_models_are_no_rise() -> None:
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        [
            {"n_params": n, "n_tokens": r * n, "sparsity": s}
            for n, s in ((1e7, 16.0), (1e8, 8.0), (1e9, 1.0))
            for r in (10, 20, 40)
        ]
        + [{"n_params": 1e8, "n_tokens": 2e9, "sparsity": s} for s in (1.0, 4.0)]
        + [{"n_params": 1e9, "n_tokens": 2e10, "sparsity": s} for s in (4.0, 16.0)]
    )
    total = rows["n_params"] * rows["sparsity"]
    noise = np.exp(0.003 * rng.standard_normal(len(rows)))
    rows["loss"] = (1.7 + 200 / rows["n_params"] ** 0.34 + 200 / total**0.34 + 410 / rows["n_tokens"] ** 0.28) * noise
    assert max(_slopes(rows, ["sparsity"]).values()) < MAX_RISE


@pytest.mark.parametrize("column", ["n_params", "n_tokens"])
def test_losses_of_the_larger_runs_that_rise_support_nothing(column: str) -> None:
    table = planted_ladder(0.003)
    large = np.maximum(table[column] / table[column].median(), 1.0)
    risen = fitted(table.assign(loss=table["loss"] * large**0.15))
    assert "rising" in reasons(risen, *NEAR)
    assert "rising" not in reasons(fitted(table), *NEAR)
