"""Repeated data: planted numbers, derivatives, what further epochs buy, and the runs of Muennighoff et al. (2305.16264)."""

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Limits, RepeatedData, ScalingError, ScalingFit, decide, fit
from scaling.forms.repeated import RepeatedTokens

NUMBERS = {"E": 1.8, "A": 700.0, "B": 2000.0, "alpha": 0.37, "beta": 0.36}
PLANTED = RepeatedData().law(**NUMBERS, rd_star=15.4, rn_star=5.3)


def ladder(noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Five sizes, three amounts of unique tokens, one to 64 epochs: models of a tenth to fifty times the useful size."""
    grid = np.meshgrid(np.geomspace(2e7, 2e9, 5), [2e8, 1e9, 5e9], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    n_params, unique, epochs = (x.ravel() for x in grid)
    rows = pd.DataFrame({"n_params": n_params, "n_tokens": unique * epochs, "unique_tokens": unique})
    error = noise * np.random.default_rng(seed).standard_normal(len(rows))
    return rows.assign(loss=PLANTED.loss(**{c: rows[c] for c in rows}) * np.exp(error))


def test_planted_numbers_are_recovered() -> None:
    result = fit(ladder(), n_params_convention="total", form=RepeatedData(), n_bootstrap=2)
    assert result.objective < 1e-16
    np.testing.assert_allclose([*result.law.parameters.values()], [*PLANTED.parameters.values()], rtol=1e-3)


def test_unique_tokens_in_billions_are_refused() -> None:
    with pytest.raises(ValueError, match="unique_tokens .*got"):
        fit(ladder().assign(unique_tokens=0.5), n_params_convention="total", form=RepeatedData())


def test_intervals_cover_the_planted_numbers_at_the_noise_of_runs() -> None:
    result = fit(ladder(0.003), n_params_convention="total", form=RepeatedData(), n_bootstrap=60)
    table = result.intervals(0.99)
    for name, value in PLANTED.parameters.items():
        assert table.loc[name, "low"] < value < table.loc[name, "high"]
    assert table.loc["rd_star", "high"] < 30
    restored = ScalingFit.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert str(restored) == str(result)
    with pytest.raises(ScalingError, match="repeated depends on n_params, n_tokens, unique_tokens"):
        result.forecast(1e9, 2e10)


def test_jacobian_is_exact_also_where_a_bound_of_the_form_binds() -> None:
    rows = ladder(0.01)
    log_loss = np.log(rows["loss"].to_numpy())
    problem = RepeatedData().problem({c: rows[c].to_numpy() for c in RepeatedData.columns}, log_loss)
    theta = problem.starts(log_loss)[[40, 900, 3000]] * 0.95
    value, jacobian = problem.linearise(theta)
    steps = 1e-6 * np.eye(7)
    differences = [(problem.log_loss(theta + s) - problem.log_loss(theta - s)) / 2e-6 for s in steps]
    np.testing.assert_allclose(jacobian, np.stack(differences, axis=-1), atol=2e-8)
    values = dict(zip(RepeatedData.parameters, problem.natural(theta).T[:, :, None], strict=True))
    own = RepeatedData().loss(values, {c: rows[c].to_numpy() for c in RepeatedData.columns})
    np.testing.assert_allclose(np.log(own), value, rtol=1e-12)


def test_the_worth_of_repeats_is_sought_from_a_tenth_to_ten_thousand() -> None:
    rows = ladder()
    problem = RepeatedData().problem({c: rows[c].to_numpy() for c in RepeatedData.columns}, np.log(rows["loss"]))
    np.testing.assert_allclose(np.exp([problem.lower[5:], problem.upper[5:]]), [[0.1, 0.1], [1e4, 1e4]])


def test_new_data_at_the_best_size_is_chinchillas_surface() -> None:
    plain = Chinchilla().law(**NUMBERS)
    best = plain.allocate(1e21)
    here = best.n_params, best.n_tokens
    assert PLANTED.loss(*here, unique_tokens=best.n_tokens) == pytest.approx(plain.loss(*here), rel=1e-12)
    assert PLANTED.allocate(1e21, unique_tokens=1e13).n_params == pytest.approx(best.n_params, rel=1e-3)


def test_epochs_are_worth_less_and_less() -> None:
    """Four epochs are nearly new data (2305.16264, abstract); forty are worth under half of it."""
    unique = 1e10
    worth = {
        epochs: RepeatedData().effective(
            PLANTED.parameters, {"n_params": 1e8, "n_tokens": epochs * unique, "unique_tokens": unique}
        )[1]
        / (epochs * unique)
        for epochs in (1, 4, 40)
    }
    assert worth[1] == 1
    assert worth[4] > 0.9
    assert worth[40] < 0.5
    assert PLANTED.loss(1e8, 2e10, unique_tokens=3e10) == PLANTED.loss(1e8, 2e10, unique_tokens=2e10)


def test_any_form_counts_repeated_tokens_as_the_fitted_law_does() -> None:
    rows = {"n_params": 1e8, "n_tokens": 4e10, "unique_tokens": 1e10}
    law = RepeatedTokens(Chinchilla()).law(**NUMBERS, rd_star=15.4)
    tokens = RepeatedData().effective(PLANTED.parameters, rows)[1]
    assert tokens == pytest.approx(1e10 * (1 + 15.4 * (1 - np.exp(-3 / 15.4))))
    assert law.loss(**rows) == Chinchilla().law(**NUMBERS).loss(1e8, tokens)
    assert law.loss(1e8, 1e10, unique_tokens=1e10) == Chinchilla().law(**NUMBERS).loss(1e8, 1e10)


def test_with_little_data_more_compute_goes_to_epochs_and_the_loss_has_a_floor() -> None:
    enough, little = (PLANTED.allocate(1e22, unique_tokens=u) for u in (1e13, 1e10))
    assert little.loss > enough.loss
    assert little.n_tokens > enough.n_tokens
    with pytest.raises(ScalingError, match="never reach"):
        decide(PLANTED, loss=enough.loss, limits=Limits(unique_tokens=1e9))


def test_the_public_runs_give_the_published_decay(public_table: Callable[[str], pd.DataFrame]) -> None:
    """R*_D 15.4 and R*_N 5.3 (2305.16264, app. A) lie in our intervals: 12.0 [7, 27] and 4.1 [1.3, 22] measured here.

    Left out: a row that is mis-parsed at the source; more than 100 epochs, where losses rise again (up to 11 nats); and
    models on .1 B unique tokens, nearly all of which overfit: with them R*_D runs to its bound.
    """
    table = public_table("datablations_notebook")
    rows = table[(table["name"] != "4b284b12b2") & (table["epochs"] <= 100) & (table["unique_tokens"] >= 4e8)]
    result = fit(rows, n_params_convention="total", form=RepeatedData(), n_bootstrap=60)
    assert result.n_rows == 175
    interval = result.intervals(0.9)
    assert interval.loc["rd_star", "low"] < 15.4 < interval.loc["rd_star", "high"] < 40
    assert interval.loc["rn_star", "low"] < 5.3 < interval.loc["rn_star", "high"]
    assert result.law["rd_star"] == pytest.approx(12.05, rel=0.01)
