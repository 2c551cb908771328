"""The Gaussian process under the surface: gradients, conditioning, and what is certain."""

import math

import numpy as np
import pytest

from scaling.arrays import Array
from scaling.search.acquisition import latin_hypercube, log_expected_improvement
from scaling.search.basin import InputLayout
from scaling.search.gaussian_process import GaussianProcess, Observations, negative_log_density


@pytest.fixture
def layout() -> InputLayout:
    """Two numbers and a category of three values, two scales."""
    return InputLayout(n_numeric=2, groups=(0, 1, 2, 2, 2), n_scales=2, drifts=((0.0, 0.05), (0.02, 0.03)) * 2)


@pytest.fixture
def data() -> Observations:
    """Runs of a basin that drifts, with noise; one of them exact."""
    generator = np.random.default_rng(0)
    n = 25
    u = np.hstack([generator.random((n, 2)), math.sqrt(0.5) * np.eye(3)[generator.integers(3, size=n)]])
    cell = generator.integers(3, size=n)
    s = np.array([[-1.0, 0.5], [0.0, 0.0], [1.5, 1.0]])[cell]
    w = 0.3 * ((u[:, :2] - 0.4 - 0.03 * s) ** 2).sum(1) + 0.01 * u[:, 2] + 1e-3 * generator.standard_normal(n)
    exact = np.zeros(n, dtype=bool)
    exact[3] = True
    return Observations(u=u, s=s, cell=cell, w=w - w.min(), exact=exact)


def test_gradient_against_finite_differences(data: Observations, layout: InputLayout) -> None:
    mean, spread = layout.prior
    step = 1e-6
    for seed in range(3):
        theta = mean + 0.5 * spread * np.random.default_rng(seed).standard_normal(len(mean))
        _, gradient = negative_log_density(theta, data, layout)
        numeric = [
            (negative_log_density(theta + e, data, layout)[0] - negative_log_density(theta - e, data, layout)[0])
            / (2 * step)
            for e in step * np.eye(len(theta))
        ]
        np.testing.assert_allclose(gradient, numeric, rtol=2e-4, atol=2e-4)


def test_density_is_the_normal_one_of_the_joint_covariance(data: Observations, layout: InputLayout) -> None:
    """Up to a constant: two sets of hyperparameters differ as scipy's normal density of the prior's covariance does."""
    from scipy.stats import multivariate_normal

    mean, spread = layout.prior
    nothing = Observations(u=data.u[:0], s=data.s[:0], cell=data.cell[:0], w=data.w[:0], exact=data.exact[:0])
    found = []
    for shift in (0.0, 0.3):
        theta = mean + shift * spread
        process = GaussianProcess(layout=layout, data=nothing, theta=theta)
        expected, covariance = process.joint(data.u, data.s, data.cell)
        scatter = np.where(data.exact, 1e-12, process.shape.noise**2 + (0.1 * data.w) ** 2)
        log_density = multivariate_normal(expected, covariance + np.diag(scatter)).logpdf(data.w)
        prior = -(shift**2) * len(mean) / 2
        found.append(negative_log_density(theta, data, layout)[0] + log_density + prior)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_uncertainty_is_that_of_the_density_around_its_peak(data: Observations, layout: InputLayout) -> None:
    """Second differences of the density itself, in the prior's units, whose own part is one; two runs leave the prior."""
    mean, spread = layout.prior
    process = GaussianProcess.fit(data, layout)
    step, units = 0.02, np.diag(spread)

    def density(*moved: Array) -> float:
        return negative_log_density(process.theta + step * sum(moved), data, layout)[0]

    p = len(mean)
    hessian = np.array(
        [
            [
                density(units[i], units[j])
                - density(units[i], -units[j])
                - density(-units[i], units[j])
                + density(-units[i], -units[j])
                for j in range(p)
            ]
            for i in range(p)
        ]
    ) / (4 * step**2)
    values, vectors = np.linalg.eigh(hessian)
    expected = (vectors / np.maximum(values, 1)) @ vectors.T
    np.testing.assert_allclose(process.uncertainty, expected, atol=0.02)
    assert np.trace(expected) < 0.95 * p, "the runs inform the process"
    few = Observations(u=data.u[:2], s=data.s[:2], cell=data.cell[:2], w=data.w[:2], exact=data.exact[:2])
    np.testing.assert_array_equal(GaussianProcess.fit(few, layout).uncertainty, np.eye(p))
    drawn = [process.redrawn(np.random.default_rng(seed)).theta for seed in range(400)]
    moved = (np.array(drawn) - process.theta) / spread
    np.testing.assert_allclose(np.cov(moved.T), process.uncertainty, atol=0.25)


def test_an_exact_observation_is_met_and_certain(data: Observations, layout: InputLayout) -> None:
    process = GaussianProcess.fit(data, layout)
    mean, std = process.predict(data.u[3:4], data.s[3:4], data.cell[3:4])
    assert mean[0] == pytest.approx(data.w[3], abs=1e-5)
    assert std[0] < 1e-5
    assert process.predict(data.u[:3], data.s[:3], data.cell[:3])[1].min() > 1e-4


def test_pending_runs_keep_the_mean_and_lower_the_variance(data: Observations, layout: InputLayout) -> None:
    process = GaussianProcess.fit(data, layout)
    at = (np.full((1, 5), 0.3), np.zeros((1, 2)), np.array([1]))
    (before, variance), (after, rest) = process.predict(*at), process.and_exactly(*at).predict(*at)
    assert after[0] == pytest.approx(before[0], abs=1e-6)
    assert rest[0] < 1e-5 < variance[0]
    far = (np.array([[0.8, 0.1, 0.0, 0.0, 0.7]]), np.zeros((1, 2)), np.array([1]))
    assert process.and_exactly(*at).predict(*far)[0][0] == pytest.approx(process.predict(*far)[0][0], abs=1e-6)


def test_joint_agrees_with_predict(data: Observations, layout: InputLayout) -> None:
    process = GaussianProcess.fit(data, layout)
    at = (data.u[:6] * 0.9, data.s[:6], data.cell[:6])
    mean, std = process.predict(*at)
    joint_mean, covariance = process.joint(*at)
    np.testing.assert_allclose(joint_mean, mean, atol=1e-12)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std, rtol=1e-6)


def test_log_expected_improvement_against_quadrature_and_far_out() -> None:
    from scipy.integrate import quad
    from scipy.stats import norm

    for z in (-6.0, -3.0, 0.0, 2.0, 5.0):
        exact, _ = quad(lambda x, z=z: (z - x) * norm.pdf(x), -12.0, z, epsabs=0, epsrel=1e-11)
        computed = log_expected_improvement(np.array([-z]), np.array([1.0]), 0.0)
        assert computed[0] == pytest.approx(math.log(exact), rel=1e-6)
    far = log_expected_improvement(np.array([30.0, 900.0, 1100.0, 1e8, -30.0]), np.ones(5), 0.0)
    assert np.isfinite(far).all()
    assert (np.diff(far[:4]) < 0).all()
    assert far[4] == pytest.approx(math.log(30))


def test_latin_hypercube_has_one_point_in_each_slice() -> None:
    points = latin_hypercube(7, 3, np.random.default_rng(1))
    np.testing.assert_array_equal(np.sort((points * 7).astype(int), axis=0), np.tile(np.arange(7)[:, None], 3))
