"""Minima against scipy's."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize as scipy_minimize

from scaling.arrays import Array
from scaling.forms.powers import SumOfPowers
from scaling.minimizers.newton import NormalPrior, huber, minimize, objective

DELTA = 1e-3


@pytest.fixture
def points(ladder: Callable[..., pd.DataFrame]) -> tuple[SumOfPowers, Array]:
    runs = ladder(noise=0.01)
    log_loss = np.log(runs["loss"].to_numpy())
    return SumOfPowers.at(runs["n_params"].to_numpy(), runs["n_tokens"].to_numpy(), log_loss), log_loss


THETA = np.array([[0.6, -0.4, 0.2, 0.3, 0.4], [0.2, 0.1, -0.3, 0.5, 0.25]])


def test_huber_is_a_parabola_that_becomes_a_line() -> None:
    np.testing.assert_allclose(huber(np.array([-0.5, 0.0, 3.0, -3.0]), 1.0), [0.125, 0.0, 2.5, 2.5])


def test_no_start_of_lbfgs_finds_a_lower_minimum(points: tuple[SumOfPowers, Array]) -> None:
    form, log_loss = points
    lower, upper = form.lower, form.upper
    ones = np.ones((1, log_loss.size))
    theta, value, converged = minimize(form, log_loss, ones, THETA[:1], (10 * DELTA, 3 * DELTA, DELTA))
    assert converged.all()
    rng = np.random.default_rng(0)
    starts = theta[0] + rng.uniform(-0.3, 0.3, (10, 5))
    found = [
        scipy_minimize(
            lambda t: 1e3 * float(objective(form, log_loss, ones, t[None], DELTA)[0]),
            start,
            method="L-BFGS-B",
            bounds=np.stack([lower, upper], axis=1),
            options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 2000},
        ).fun
        for start in np.clip(starts, lower, upper)
    ]
    assert 1e3 * value[0] <= min(found) * (1 + 1e-9)


def test_members_of_a_batch_do_not_influence_each_other(points: tuple[SumOfPowers, Array]) -> None:
    form, log_loss = points
    weights = np.random.default_rng(1).dirichlet(np.ones(log_loss.size), size=2) * log_loss.size
    together, values, _ = minimize(form, log_loss, weights, THETA, (DELTA,))
    for i in range(2):
        alone, value, _ = minimize(form, log_loss, weights[i : i + 1], THETA[i : i + 1], (DELTA,))
        np.testing.assert_allclose(together[i], alone[0], rtol=1e-6)
        assert values[i] == pytest.approx(value[0], rel=1e-10)


def test_a_prior_weighs_as_a_normal_one(points: tuple[SumOfPowers, Array]) -> None:
    """The objective written out once more, and minimised by scipy: its minimum lies between the runs' and the prior's."""
    form, log_loss = points
    precision = np.diag([0.0, 0.0, 0.0, 0.2, 0.05])
    precision[3, 4] = precision[4, 3] = -0.06
    prior = NormalPrior(mean=THETA[0], precision=precision)

    def written_out(theta: Array, precision: Array) -> float:
        residual = np.abs(form.log_loss(theta[None])[0] - log_loss)
        runs = np.where(residual <= DELTA, residual**2 / 2, DELTA * (residual - DELTA / 2)).sum()
        off = theta - THETA[0]
        return float(runs + sum(precision[i, j] * off[i] * off[j] for i in range(5) for j in range(5)) / 2)

    one = np.ones((1, log_loss.size))
    assert objective(form, log_loss, one, THETA[1:], DELTA, prior)[0] == pytest.approx(
        written_out(THETA[1], prior.precision)
    )
    theta, value, converged = minimize(form, log_loss, one, THETA[:1], (10 * DELTA, DELTA), prior)
    assert converged.all()
    found = scipy_minimize(
        lambda t: 1e3 * written_out(t, prior.precision),
        theta[0],
        method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-13},
    )
    assert 1e3 * value[0] <= found.fun * (1 + 1e-7)
    free, _, _ = minimize(form, log_loss, one, THETA[:1], (10 * DELTA, DELTA))
    for i in (3, 4):
        low, high = sorted((free[0, i], prior.mean[i]))
        assert low < theta[0, i] < high


def test_members_of_a_batch_may_have_priors_of_their_own(points: tuple[SumOfPowers, Array]) -> None:
    form, log_loss = points
    means, precision = THETA[0] + np.outer([0.0, 0.3], np.ones(5)), np.eye(5)
    starts, weights = THETA[[0, 0]], np.ones((2, log_loss.size))
    together, _, _ = minimize(form, log_loss, weights, starts, (DELTA,), NormalPrior(mean=means, precision=precision))
    for i in range(2):
        prior = NormalPrior(mean=means[i], precision=precision)
        alone, _, _ = minimize(form, log_loss, weights[:1], starts[:1], (DELTA,), prior)
        np.testing.assert_allclose(together[i], alone[0], atol=1e-6)
