"""The normal density: scipy's value, and a slope that agrees with finite differences."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from scaling.arrays import Array
from scaling.gaussian import NormalDensity


@pytest.fixture
def covariance() -> Array:
    root = np.random.default_rng(0).standard_normal((5, 5))
    return np.asarray(root @ root.T + 0.1 * np.eye(5))


def test_the_density_is_the_normal_one_and_its_slope_the_derivative_by_the_covariance(covariance: Array) -> None:
    values = np.random.default_rng(1).standard_normal(5)
    found = NormalDensity.of(values, covariance)
    expected = -multivariate_normal(np.zeros(5), covariance).logpdf(values) - 2.5 * np.log(2 * np.pi)
    assert found.value == pytest.approx(expected)
    assert covariance @ found.weights == pytest.approx(values)
    direction = np.random.default_rng(2).standard_normal((5, 5))
    step = 1e-6 * (direction + direction.T)
    change = NormalDensity.of(values, covariance + step).value - NormalDensity.of(values, covariance - step).value
    assert change / 2 == pytest.approx((found.slope * step).sum(), rel=1e-5)


def test_an_indefinite_covariance_is_refused(covariance: Array) -> None:
    with pytest.raises(np.linalg.LinAlgError):
        NormalDensity.of(np.ones(5), covariance - 100 * np.eye(5))
