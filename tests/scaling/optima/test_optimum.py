"""The optimum of one grid: planted minima, diverged runs, walls, seeds, and real grids."""

import json
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from scaling import Optimum, ScalingError, fit_optimum
from scaling.arrays import Array

OCTAVES = np.arange(-10.0, -3.0)
RATES = 2**OCTAVES


def planted_loss(octaves: Array, at: float = -6.7, curvature: float = 0.04) -> Array:
    return np.asarray(np.exp(1.1 + curvature / 2 * (octaves - at) ** 2))


def test_planted_minimum_is_recovered() -> None:
    optimum = fit_optimum(RATES, planted_loss(OCTAVES))
    assert optimum.log2_rate == pytest.approx(-6.7, abs=1e-9)
    assert optimum.curvature == pytest.approx(0.04)
    assert optimum.loss == pytest.approx(math.exp(1.1))
    assert optimum.stderr < 1e-9
    assert (optimum.status, optimum.inside) == ("ok", True)
    assert f"{math.expm1(0.02):.2%} more an octave away" in str(optimum)


def test_regret_is_the_relative_loss_given_up() -> None:
    optimum = fit_optimum(RATES, planted_loss(OCTAVES))
    assert optimum.regret(optimum.rate) == pytest.approx(0)
    np.testing.assert_allclose(optimum.regret(RATES), planted_loss(OCTAVES) / math.exp(1.1) - 1)


def test_diverged_runs_and_the_wall_are_left_out() -> None:
    losses = planted_loss(OCTAVES)
    losses[-2:] = [7.0, np.nan]
    optimum = fit_optimum(RATES, losses)
    assert optimum.log2_rate == pytest.approx(-6.7, abs=1e-9)
    assert optimum.tested == (-10, -5)
    assert optimum.n_left_out >= 2


def test_a_rate_at_which_one_seed_diverged_is_left_out() -> None:
    """The survivor is 5 % better than the curve and would pull the minimum up."""
    octaves = np.concatenate([OCTAVES, [-5.0]])
    losses = planted_loss(octaves)
    losses[5], losses[-1] = 0.95 * losses[5], np.inf
    assert fit_optimum(2**octaves, losses).log2_rate == pytest.approx(-6.7, abs=1e-9)


def test_standard_error_is_honest() -> None:
    rng = np.random.default_rng(0)
    hits, spread, stated = 0, [], []
    for _ in range(300):
        octaves = np.repeat(np.arange(-8.5, -4.5, 0.5), 2)
        optimum = fit_optimum(2**octaves, planted_loss(octaves) * np.exp(0.004 * rng.standard_normal(octaves.size)))
        hits += abs(optimum.log2_rate + 6.7) <= stdtrit(optimum.dof, 0.95) * optimum.stderr
        spread.append(optimum.log2_rate)
        stated.append(optimum.stderr)
    assert 0.84 <= hits / 300 <= 0.95
    assert np.mean(stated) == pytest.approx(np.std(spread), rel=0.15)


def test_levels_of_seeds_do_not_count_as_noise() -> None:
    octaves, seeds = np.tile(OCTAVES, 2), np.repeat([0, 1], len(OCTAVES))
    losses = planted_loss(octaves) * np.where(seeds == 0, 1.0, 1.02)
    assert fit_optimum(2**octaves, losses, seeds=seeds.tolist()).noise == pytest.approx(0, abs=1e-9)
    assert fit_optimum(2**octaves, losses).noise > 0.005


@pytest.mark.parametrize(("at", "nearest"), [(-12.0, -10.0), (-2.0, -4.0)])
def test_minimum_outside_the_grid_is_an_edge(at: float, nearest: float) -> None:
    optimum = fit_optimum(RATES, planted_loss(OCTAVES, at))
    assert (optimum.status, optimum.inside) == ("edge", False)
    assert optimum.log2_rate == nearest
    assert optimum.stderr == math.inf
    assert math.isnan(optimum.regret(1e-3))


@pytest.mark.parametrize("losses", [3 - 0.01 * (OCTAVES + 7) ** 2, np.full(7, 3.0)])
def test_no_curvature_is_flat(losses: Array) -> None:
    assert fit_optimum(RATES, losses).status == "flat"


def test_curvature_within_the_noise_is_flat() -> None:
    noise = 0.02 * np.random.default_rng(1).standard_normal(7)
    assert fit_optimum(RATES, planted_loss(OCTAVES, curvature=0.001) * np.exp(noise)).status == "flat"


@pytest.mark.parametrize(("errors", "status"), [(1.98, "flat"), (2.02, "ok")])
def test_a_minimum_has_a_curvature_of_twice_its_standard_error(errors: float, status: str) -> None:
    """Residuals that no parabola takes up, the cubic of seven points: their variance and the curvature's are known exactly."""
    cubic, t = 0.005 * np.array([-1, 1, 1, 0, -1, -1, 1]), np.arange(-3.0, 4.0)
    stderr = math.sqrt(cubic @ cubic / (7 - 3) / np.sum((t**2 - 4) ** 2))
    assert fit_optimum(RATES, np.exp(1.1 + errors * stderr * t**2 + cubic)).status == status


@pytest.mark.parametrize(
    ("octaves", "curvature", "used"),
    [
        pytest.param(np.arange(-10, -3.5, 0.5), 0.04, (-8.5, -5.5), id="log losses within .05 of the best"),
        pytest.param(OCTAVES, 0.04, (-9, -5), id="five runs"),
        pytest.param(np.repeat(OCTAVES, 2), 0.04, (-9, -6), id="four rates if there are as many runs"),
        pytest.param(OCTAVES, 0.124, (-9, -6), id="fewer runs before one beyond .25"),
        pytest.param(OCTAVES, 0.184, (-8, -6), id="three rates before one beyond .25"),
        pytest.param(OCTAVES, 0.6, (-8, -6), id="three rates wherever they lie"),
    ],
)
def test_the_parabola_is_of_the_rates_near_the_best(octaves: Array, curvature: float, used: tuple[int, int]) -> None:
    optimum = fit_optimum(2**octaves, planted_loss(octaves, -7.05, curvature))
    assert optimum.used == used
    assert optimum.n_left_out == np.sum((octaves < used[0]) | (octaves > used[1]))


def test_a_rate_lies_in_the_window_by_the_mean_of_its_runs() -> None:
    """Of three at 2^−8.5 one is .06 worse, so that their mean lies beyond .05, and their median does not."""
    octaves = np.tile(np.arange(-10, -3.5, 0.5), 3)
    losses = planted_loss(octaves, -7.05)
    assert fit_optimum(2**octaves, losses).used == (-8.5, -5.5)
    losses[3] *= math.exp(0.06)
    assert fit_optimum(2**octaves, losses).used == (-8, -5.5)


def test_rates_beyond_the_window_weigh_by_the_square_of_their_excess() -> None:
    """(.05 / excess)²; numpy's weights are those of the residuals, the roots."""
    octaves = OCTAVES[1:6]
    log_loss = np.log(planted_loss(octaves, -7.05)) + np.array([0.004, -0.003, 0.002, -0.004, 0.003])
    weights = 0.05 / np.maximum(log_loss - log_loss.min(), 0.05)
    assert (weights < 0.8).sum() == 2
    parabola, covariance = np.polyfit(octaves, log_loss, 2, w=weights, cov="unscaled")
    optimum = fit_optimum(2**octaves, np.exp(log_loss))
    assert optimum.log2_rate == pytest.approx(-parabola[1] / (2 * parabola[0]), rel=1e-9)
    assert optimum.log_loss == pytest.approx(np.polyval(parabola, optimum.log2_rate), rel=1e-9)
    residual = weights * (log_loss - np.polyval(parabola, octaves))
    assert optimum.noise == pytest.approx(math.sqrt(residual @ residual / 2), rel=1e-6)
    a, b, _ = parabola
    gradient = np.array([b / (2 * a**2), -1 / (2 * a), 0])
    assert optimum.stderr == pytest.approx(optimum.noise * math.sqrt(gradient @ covariance @ gradient), rel=1e-6)


def test_three_rates_have_no_error_estimate() -> None:
    optimum = fit_optimum(RATES[2:5], planted_loss(OCTAVES)[2:5])
    assert optimum.log2_rate == pytest.approx(-6.7, abs=1e-9)
    assert (optimum.status, optimum.stderr, optimum.dof) == ("exact", math.inf, 0)


def test_bad_arguments() -> None:
    with pytest.raises(ScalingError, match="need at least 3 distinct rates with a finite loss, got 2 of 3"):
        fit_optimum([0.1, 0.2, 0.4], [3.0, np.nan, 3.1])
    with pytest.raises(ValueError, match="rate .*got 0 in row 0"):
        fit_optimum([0.0, 0.2, 0.4], [3.0, 3.0, 3.1])
    with pytest.raises(ValueError, match="one length, got"):
        fit_optimum([0.1, 0.2, 0.4], [3.0, 3.0])
    with pytest.raises(ValueError, match=r"must.*got shapes \(2, 7\)"):
        fit_optimum(np.tile(RATES, (2, 1)), np.tile(planted_loss(OCTAVES), (2, 1)))
    with pytest.raises(ValueError, match="seed .* row 3 "):
        fit_optimum(RATES, planted_loss(OCTAVES), seeds=[0, 0, 0, math.nan, 0, 0, 0])


@pytest.mark.parametrize("rates", [RATES, RATES[2:5], RATES[:3]])
def test_round_trip(rates: Array) -> None:
    optimum = fit_optimum(rates, planted_loss(np.log2(rates), at=-7.4))
    data = json.loads(json.dumps(optimum.to_dict(), allow_nan=False))
    assert str(Optimum.from_dict(data)) == str(optimum)
    assert Optimum.from_dict(data).to_dict() == data


def test_halves_of_real_grids_agree(public_table: Callable[[str], pd.DataFrame]) -> None:
    """Step Law (2503.04715): optima from the even and from the odd rates of a grid differ as their errors say."""
    table = public_table("steplaw_dense_all_lr_bs")
    scores = []
    for _, grid in table.groupby(["n_params", "n_tokens", "bs"]):
        grid = grid.groupby("lr", as_index=False)["loss"].mean()
        if len(grid) < 10:
            continue
        even, odd = (fit_optimum(grid["lr"][half::2], grid["loss"][half::2]) for half in (0, 1))
        if even.status == odd.status == "ok":
            scores.append((even.log2_rate - odd.log2_rate) / math.hypot(even.stderr, odd.stderr))
    assert len(scores) > 140
    assert 0.82 <= np.mean(np.abs(scores) < 1.645) <= 0.96


def test_one_lucky_run_does_not_hide_a_minimum_that_the_walls_show() -> None:
    """A real grid of seven rates at width 64, whose best run lies three percent below its neighbours' parabola."""
    rates = [0.002526, 0.00401, 0.006365, 0.010104, 0.01604, 0.025461, 0.040417]
    losses = [2.1740, 2.0466, 1.9694, 2.0277, 2.0647, 2.1171, 2.2775]
    optimum = fit_optimum(rates, losses)
    assert optimum.status == "ok"
    assert 0.006 < optimum.rate < 0.011
    assert optimum.used[1] - optimum.used[0] > 3
