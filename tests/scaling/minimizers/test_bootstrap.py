"""What resampling sees of the errors behind a fit, and by how much its draws are drawn apart for the rest."""

import math

import numpy as np
import pytest

from scaling import Chinchilla, Joint
from scaling.forms.problem import Problem
from scaling.minimizers.bootstrap import free_columns, share_seen, stem_weights, widening

LAW = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)


def runs(n: int, seed: int = 0) -> tuple[Problem, np.ndarray, np.ndarray]:
    """A problem of n runs over three decades of N, its true theta, and their log losses."""
    rng = np.random.default_rng(seed)
    n_params = 10 ** rng.uniform(7, 10, n)
    n_tokens = n_params * 10 ** rng.uniform(0.7, 2.3, n)
    log_loss = np.log(LAW.loss(n_params, n_tokens))
    problem = LAW.form.problem({"n_params": n_params, "n_tokens": n_tokens}, log_loss)
    x, y = np.log(n_params).mean(), np.log(n_tokens).mean()
    theta = np.array([np.log(1.8), np.log(400) - 0.34 * x, np.log(2000) - 0.37 * y, 0.34, 0.37])
    return problem, theta, log_loss


@pytest.mark.parametrize("n", [12, 20, 60])
def test_the_share_is_that_of_linear_least_squares(n: int) -> None:
    """Errors are drawn and fitted by least squares, the fit is refitted under weights: what the sum of squares falls by."""
    problem, theta, _ = runs(n)
    jacobian = problem.linearise(theta[None])[1][0]
    inverse, weights = np.linalg.inv(jacobian.T @ jacobian), stem_weights(np.arange(n), 200, seed=1)
    normal = np.einsum("ki,jk,kl->jil", jacobian, weights, jacobian)
    seen, true = 0.0, 0.0
    for error in np.random.default_rng(2).standard_normal((200, n)):
        estimate = inverse @ jacobian.T @ error
        residual = error - jacobian @ estimate
        score = (weights * residual) @ jacobian
        seen += np.einsum("ji,ji->", score, np.linalg.solve(normal, score[..., None])[..., 0]) / len(weights)
        true += estimate @ jacobian.T @ jacobian @ estimate
    assert share_seen(jacobian, np.ones(n), np.arange(n)) == pytest.approx(seen / true, rel=0.15)


def test_few_runs_are_drawn_apart_and_many_hardly() -> None:
    few, many = (
        widening(free_columns(problem, theta), np.ones(n), np.arange(n))
        for n in (12, 400)
        for problem, theta, _ in [runs(n)]
    )
    assert 1.3 < few < 3
    assert 1 < many < 1.05


def test_rows_of_one_run_count_once() -> None:
    """Sixty rows of twelve runs are drawn apart as twelve runs are, not as sixty."""
    problem, theta, _ = runs(60)
    by_run, by_row = (
        widening(free_columns(problem, theta), np.ones(60), stems) for stems in (np.arange(60) // 5, np.arange(60))
    )
    assert by_run > 1.2 > by_row


def test_a_parameter_on_its_bound_is_not_counted() -> None:
    problem, theta, _ = runs(20)
    stuck = theta.copy()
    stuck[4] = problem.upper[4]
    np.testing.assert_array_equal(free_columns(problem, stuck), problem.linearise(stuck[None])[1][0][:, :4])
    none = free_columns(problem, problem.lower)
    assert (none.shape, share_seen(none, np.ones(20), np.arange(20))) == ((20, 0), 1.0)


def test_draws_of_fewer_runs_than_parameters_stay_within_reason() -> None:
    """Three sizes, each a run read at four lengths: what is seen of their errors is rounding."""
    n_params = np.repeat([1e7, 1e8, 1e9], 4)
    n_tokens = n_params * np.tile([10, 20, 40, 80], 3)
    law = Joint().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37, g=1.0)
    log_loss = np.log(law.loss(n_params, n_tokens))
    problem = law.form.problem({"n_params": n_params, "n_tokens": n_tokens}, log_loss)
    theta = np.clip(problem.starts(log_loss)[0], problem.lower + 0.01, problem.upper - 0.01)
    three = free_columns(problem, theta), np.ones(12), np.arange(12) // 4
    assert share_seen(*three) < 0.05
    assert widening(*three) == pytest.approx(math.sqrt(30))
