"""The fits behind a forecast: exact where the law is true, stable against single rows, and steady under another order."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Joint, Law, ScalingError, decide, fit
from scaling.fits.ensemble import fit_ensemble

Ladder = Callable[..., pd.DataFrame]
TARGET = (1e9, 2e10)


def with_stems(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.assign(stem=range(len(runs)))


def test_without_noise_every_variant_recovers_the_truth(ladder: Ladder, planted: Law) -> None:
    found = fit_ensemble(with_stems(ladder()))
    truth = float(planted.loss(*TARGET))
    for name, law in found.variants.items():
        assert law.loss(*TARGET) == pytest.approx(truth, rel=3e-4), name
    assert len(found.variants) == 6
    assert found.residual < 1e-4


def test_moves_are_of_every_fit_with_every_draw(ladder: Ladder) -> None:
    """Moves are a fit against the mean of fits, and a draw against the first fit: here by laws, one by one."""
    found = fit_ensemble(with_stems(ladder(noise=0.003)))
    n, d = TARGET
    rows = Joint().columns_of({"n_params": np.array([n]), "n_tokens": np.array([d])})
    moves = found.moves(lambda values, _: np.log(Joint().loss(values, rows)))[:, 0]
    fits = [math.log(float(law.loss(n, d))) for law in found.variants.values()]
    draws = [
        math.log(float(Joint().law(**dict(zip(Joint.parameters, draw, strict=True))).loss(n, d)))
        for draw in found.draws
    ]
    expected = [fit - np.mean(fits) + found.widening * (draw - fits[0]) for fit in fits for draw in draws]
    assert 1.3 < found.widening < 1.7, "twenty runs, six parameters"
    np.testing.assert_allclose(moves, expected, atol=1e-12)


def test_the_numbers_of_one_ladder_stay_what_they_were(planted: Law) -> None:
    """Weighted rows, two of a stem, one wild, some of unusual ratios: what each fit said of the target when this was written."""
    sizes, ratios = np.meshgrid(np.geomspace(1e7, 2e8, 5), [3.0, 10.0, 30.0, 80.0, 250.0])
    n, d = sizes.ravel(), (sizes * ratios).ravel()
    loss = planted.loss(n, d) * np.exp(0.004 * np.random.default_rng(11).standard_normal(25))
    loss[7] *= 1.04
    noise = np.where(n < 2e7, 0.008, 0.004)
    found = fit_ensemble(
        pd.DataFrame({"n_params": n, "n_tokens": d, "loss": loss, "noise": noise, "stem": np.arange(25) // 2})
    )
    losses = {name: math.log(float(law.loss(*TARGET))) for name, law in found.variants.items()}
    assert losses == pytest.approx(
        {
            "adaptive Huber": 0.884616,
            "least absolute residuals": 0.880710,
            "rows of 5 to 200 tokens per parameter": 0.889704,
            "adaptive Huber, weighed by compute": 0.896744,
            "least absolute residuals, weighed by compute": 0.910217,
            "rows of 5 to 200 tokens per parameter, weighed by compute": 0.898059,
        },
        abs=2e-5,
    )
    assert float(found.draw_spread(*TARGET)) == pytest.approx(0.00690652, rel=1e-3)
    assert found.residual == pytest.approx(0.0049454, rel=1e-3)
    assert found.widening == pytest.approx(1.82506, rel=1e-3)
    assert found.n_runs == 13


def test_two_wild_rows_hardly_move_it(ladder: Ladder, planted: Law) -> None:
    runs = with_stems(ladder(noise=0.002))
    calm = fit_ensemble(runs)
    runs.loc[[3, 11], "loss"] *= 1.2
    wild = fit_ensemble(runs)
    assert abs(float(wild.log_loss(*TARGET) - calm.log_loss(*TARGET))) < 0.01
    assert wild.residual > 5 * calm.residual, "that the rows disagree is not hidden"


def test_shape_is_that_of_the_targets(ladder: Ladder) -> None:
    found = fit_ensemble(with_stems(ladder(noise=0.003)))
    sizes = np.array([[1e8], [1e9]]), np.array([1e10, 2e10, 4e10])
    for of in (found.log_loss, found.draw_spread):
        assert of(*sizes).shape == (2, 3)
        assert of(*sizes)[1, 1] == pytest.approx(float(of(1e9, 2e10)), rel=1e-12)


def test_far_from_usual_ratios_there_are_two_variants_less(ladder: Ladder) -> None:
    runs = with_stems(ladder(noise=0.003)).assign(n_tokens=lambda t: 40 * t["n_tokens"])
    assert len(fit_ensemble(runs).variants) == 4


def test_a_forecast_is_the_same_whatever_form_the_law_has(ladder: Ladder) -> None:
    runs = ladder(noise=0.003)
    one, other = (fit(runs, n_params_convention="total", n_bootstrap=2, form=form) for form in (None, Joint()))
    intervals = [(f.loss, f.low, f.high) for f in (one.forecast(*TARGET), other.forecast(*TARGET))]
    assert intervals[0] == intervals[1]
    assert one.forecast(*TARGET).law_loss == one.predict(*TARGET) != other.predict(*TARGET)


def test_a_law_of_more_than_n_and_d_has_no_tested_forecast(ladder: Ladder) -> None:
    from tests.scaling.forms.test_forms import Own

    class WithUnique(Own):
        columns = ("n_params", "n_tokens", "unique_tokens")

    runs = ladder(noise=0.003).assign(unique_tokens=1e12)
    result = fit(runs, n_params_convention="total", n_bootstrap=2, form=WithUnique())
    with pytest.raises(ScalingError, match="own depends on n_params, n_tokens, unique_tokens"):
        result.forecast(*TARGET)


def test_noisy_rows_weigh_less_where_their_noise_is_given(ladder: Ladder, planted: Law) -> None:
    """Half of the runs at .1 %, half at 5 %: with the noise given, the forecast is nearer the truth and narrower."""
    given, not_given, widths = [], [], []
    truth = float(planted.loss(*TARGET))
    for seed in range(6):
        rng = np.random.default_rng(seed)
        runs = ladder().assign(noise=np.where(rng.permutation(20) < 10, 0.05, 0.001))
        runs["loss"] *= np.exp(runs["noise"] * rng.standard_normal(20))
        with_, without = (
            fit(rows, n_params_convention="total", n_bootstrap=2).forecast(*TARGET)
            for rows in (runs, runs.drop(columns="noise"))
        )
        given.append(abs(np.log(with_.loss / truth)))
        not_given.append(abs(np.log(without.loss / truth)))
        widths.append(with_.log_scale / without.log_scale)
    assert np.mean(given) < 0.5 * np.mean(not_given)
    assert max(widths) < 1


def test_too_few_rows_for_its_fits_are_refused(ladder: Ladder) -> None:
    runs = ladder().iloc[[0, 3, 5, 10, 12, 19]]
    with pytest.raises(ScalingError, match=r"need at least 7 distinct .*got 6"):
        fit_ensemble(with_stems(runs))


def test_the_mean_is_a_law_of_its_own(ladder: Ladder) -> None:
    found = fit_ensemble(with_stems(ladder(noise=0.003)))
    best = found.law.allocate(1e21)
    assert best.loss == pytest.approx(np.exp(float(found.log_loss(best.n_params, best.n_tokens))), rel=1e-12)
    assert decide(found.law, loss=best.loss).total_flops == pytest.approx(1e21, rel=1e-6)
