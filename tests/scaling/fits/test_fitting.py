"""What `fit` recovers, refuses, leaves out and warns about."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Joint, Law, ScalingFit, decide, fit
from scaling.errors import TooFewRunsError
from tests.scaling.conftest import PLANTED

Ladder = Callable[..., pd.DataFrame]


def fitted(runs: pd.DataFrame, n_bootstrap: int = 100, **options: float) -> ScalingFit:
    return fit(runs, n_params_convention="total", n_bootstrap=n_bootstrap, **options)  # type: ignore[arg-type]


def values(fit: ScalingFit) -> list[float]:
    return list(fit.law.parameters.values())


@pytest.mark.parametrize(
    "surface",
    [
        Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37),
        Chinchilla().law(E=0.5, A=30.0, B=90000.0, alpha=0.2, beta=0.6),
        Chinchilla().law(E=2.6, A=3e5, B=4000.0, alpha=0.69, beta=0.4),
    ],
)
def test_planted_parameters_are_recovered_without_noise(ladder: Ladder, surface: Law) -> None:
    runs = ladder()
    runs["loss"] = surface.loss(runs["n_params"], runs["n_tokens"])
    result = fitted(runs)
    np.testing.assert_allclose(values(result), list(surface.parameters.values()), rtol=1e-6)
    assert result.objective < 1e-20
    assert result.status == "ok"


def test_planted_parameters_lie_within_their_intervals(ladder: Ladder, planted: Law) -> None:
    """Over 40 noisy ladders of 20 runs the 90 % intervals cover the truth about as often as they say."""
    covered = []
    for seed in range(40):
        table = fitted(ladder(noise=0.003, seed=seed)).intervals(0.9).loc[["E", "alpha", "beta"]]
        truth = np.array([planted["E"], planted["alpha"], planted["beta"]])
        covered.append((table["low"] <= truth) & (truth <= table["high"]))
    assert 0.86 <= np.mean(covered) <= 0.99


def test_outliers_hardly_move_the_fit(ladder: Ladder, planted: Law) -> None:
    runs = ladder(noise=0.001)
    runs.loc[[3, 11], "loss"] *= 1.3
    result = fitted(runs)
    target = 1e10, 2e11
    assert float(result.predict(*target)) == pytest.approx(float(planted.loss(*target)), rel=0.01)


def test_order_of_rows_does_not_matter(ladder: Ladder) -> None:
    runs = ladder(noise=0.005).assign(stem=[f"run {i // 2}" for i in range(20)])
    first, second = fitted(runs), fitted(runs.sample(frac=1, random_state=1))
    assert values(first) == values(second)
    np.testing.assert_array_equal(first.draws, second.draws)


def test_same_seed_same_draws(ladder: Ladder) -> None:
    runs = ladder(noise=0.005)
    np.testing.assert_array_equal(fitted(runs, seed=3).draws, fitted(runs, seed=3).draws)
    assert (fitted(runs, seed=3).draws != fitted(runs, seed=4).draws).any()


def test_rows_of_one_stem_are_resampled_together(ladder: Ladder) -> None:
    """Runs repeated four times under one stem are no better than once; taken as independent they seem to be."""
    runs = ladder(noise=0.005)
    repeated = pd.concat([runs.assign(stem=np.arange(20))] * 4, ignore_index=True)
    once = fitted(runs, 400)
    clustered = fitted(repeated, 400)
    naive = fitted(repeated.assign(stem=np.arange(80)), 400)
    assert (clustered.n_rows, clustered.n_stems, naive.n_stems) == (80, 20, 80)
    spread = [result.draws[:, 3].std() for result in (once, clustered, naive)]
    assert spread[1] == pytest.approx(spread[0], rel=0.2)
    assert spread[2] < 0.65 * spread[1]


def test_untuned_and_unannealed_rows_are_left_out_with_the_reason(ladder: Ladder, planted: Law) -> None:
    runs = ladder().assign(regret=0.0, annealed=True)
    runs.loc[2, ["loss", "regret"]] = [9.0, 0.02]
    runs.loc[5, "loss"] = 9.5
    runs.loc[5, "annealed"] = False
    result = fitted(runs)
    np.testing.assert_allclose(values(result), list(planted.parameters.values()), rtol=1e-6)
    assert list(result.left_out.index) == [2, 5]
    assert result.left_out.loc[2, "reason"] == "predicted regret 2.000% is above 0.250%"
    assert "not annealed" in result.left_out.loc[5, "reason"]
    assert fitted(runs, max_regret=0.05).left_out.index.tolist() == [5]


def test_a_table_of_unannealed_rows_is_refused(ladder: Ladder) -> None:
    with pytest.raises(ValueError, match="20 rows .*not annealed"):
        fitted(ladder().assign(annealed=False))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("loss", -float("inf"), r"loss .*got -inf in row 4 \(1 of 20 rows"),
        ("loss", 1.17e-230, r"loss .*got 1.17e-230 in row 4"),
        ("n_params", 0.0, r"n_params .*got 0 in row 4"),
        ("n_tokens", float("inf"), r"n_tokens .*got inf in row 4"),
        ("regret", -0.1, r"regret .*got -0.1 in row 4"),
        ("annealed", "yes", r"annealed must be True or False in every row"),
        ("stem", None, r"stem .* row 4 "),
        ("loss", "high", r"loss must hold numbers"),
    ],
)
def test_bad_values_are_named(ladder: Ladder, column: str, value: object, message: str) -> None:
    runs = ladder().assign(regret=0.0, annealed=True, stem="a").astype(object)
    runs.loc[4, column] = value
    with pytest.raises(ValueError, match=message):
        fitted(runs)


def test_missing_column(ladder: Ladder) -> None:
    with pytest.raises(ValueError, match="missing column n_tokens.*got n_params, loss"):
        fitted(ladder().drop(columns="n_tokens"))


def test_too_few_points(ladder: Ladder) -> None:
    five = ladder().iloc[[0, 1, 7, 13, 19]]
    with pytest.raises(ValueError, match=r"need at least 7 distinct \(n_params, n_tokens\) .* got 5"):
        fitted(pd.concat([five, five]))
    with pytest.raises(ValueError, match=r"need at least 3 distinct values of n_params .* got 2"):
        fitted(ladder().query("n_params < 3e7"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta .*got 0.0"),
        ({"max_regret": -1.0}, "max_regret .*got -1.0"),
        ({"n_bootstrap": 1}, "n_bootstrap .*got 1"),
        ({"n_params_convention": " "}, "n_params_convention must say what n_params counts"),
        ({"n_params_convention": None}, "n_params_convention must say what n_params counts, .* got None"),
        ({"delta": "squares"}, "delta .*got 'squares'"),
        ({"n_bootstrap": "many"}, "n_bootstrap .*got 'many'"),
    ],
)
def test_bad_options(ladder: Ladder, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(ladder(), **({"n_params_convention": "total"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [Joint, "joint", {"E": 1.8}])
def test_a_form_is_a_value(ladder: Ladder, form: object) -> None:
    meant = r"form .*got .*" + ("" if isinstance(form, dict) else r": Joint\(\) is meant")
    with pytest.raises(TypeError, match=meant):
        fit(ladder(), n_params_convention="total", form=form)  # type: ignore[arg-type]


def warnings_of(runs: pd.DataFrame) -> str:
    result = fitted(runs)
    assert result.status == "doubtful"
    return "; ".join(result.warnings)


def test_n_and_d_in_proportion_raise_a_warning(planted: Law) -> None:
    n_params = np.geomspace(1e7, 1e9, 16)
    runs = pd.DataFrame(
        {"n_params": n_params, "n_tokens": 20 * n_params, "loss": planted.loss(n_params, 20 * n_params)}
    )
    assert "ill-conditioned" in warnings_of(runs)


def test_a_parameter_on_its_bound_raises_a_warning(ladder: Ladder) -> None:
    runs = ladder()
    runs["loss"] = 20 * runs["n_params"] ** -0.05 + 300 * runs["n_tokens"] ** -0.3 - 1
    assert "E lies on its bound: the runs do not determine it" in warnings_of(runs)


def test_an_irreducible_loss_above_a_run_raises_a_warning(ladder: Ladder) -> None:
    """Where all but the smallest runs lie on the floor, noise takes some below the floor that fits best."""
    floor = Chinchilla().law(E=3.0, A=1e12, B=1e16, alpha=1.8, beta=1.8)
    runs = ladder(noise=0.01)
    runs["loss"] *= floor.loss(runs["n_params"], runs["n_tokens"]) / PLANTED.loss(runs["n_params"], runs["n_tokens"])
    result = fitted(runs)
    assert result.law["E"] > runs["loss"].min()
    assert "of the least loss: larger runs cannot be forecast" in "; ".join(result.warnings)


def test_a_floor_far_below_every_run_raises_a_warning(ladder: Ladder) -> None:
    low = Chinchilla().law(E=0.3, A=30.0, B=50.0, alpha=0.15, beta=0.15)
    runs = ladder(noise=0.001)
    runs["loss"] *= low.loss(runs["n_params"], runs["n_tokens"]) / PLANTED.loss(runs["n_params"], runs["n_tokens"])
    assert "of the least loss, below 0.3" in "; ".join(fitted(runs).warnings)


@pytest.mark.parametrize("n_points", [6, 7])
def test_a_law_is_fitted_to_as_many_points_as_its_decision_needs(ladder: Ladder, n_points: int) -> None:
    rows = ladder().iloc[[0, 1, 6, 7, 13, 14, 19][:n_points]]
    if n_points < 7:
        with pytest.raises(TooFewRunsError):
            fitted(rows)
    else:
        assert decide(fitted(rows), 1e20).total_flops == pytest.approx(1e20)


def test_one_length_is_named_with_the_losses_that_rise_along_it() -> None:
    n_params = np.array([1e7, 2e7, 4e7, 8e7, 1.6e8])
    for loss, rises in ((3 + 0.1 * np.arange(5), True), (3 - 0.1 * np.arange(5), False)):
        with pytest.raises(TooFewRunsError) as raised:
            fitted(pd.DataFrame({"n_params": n_params, "n_tokens": 1e9, "loss": loss}))
        assert "n_tokens" in str(raised.value)
        assert ("rises" in str(raised.value)) == rises
