"""The reference problem: Besiroglu et al. (2404.10102), 240 points digitised from Hoffmann et al."""

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingFit, fit


@pytest.fixture(scope="module")
def result(reference: pd.DataFrame) -> ScalingFit:
    return fit(reference, n_params_convention="total", n_bootstrap=2000)


def test_the_minimum_of_4500_starts_is_reached(result: ScalingFit) -> None:
    assert result.objective <= 0.00101827403


def test_published_parameters(result: ScalingFit) -> None:
    law = result.law
    assert pytest.approx(1.81722, abs=1e-5) == law["E"]
    assert pytest.approx(477.826, abs=0.05) == law["A"]
    assert pytest.approx(2143.4, abs=0.5) == law["B"]
    assert law["alpha"] == pytest.approx(0.347311, abs=2e-5)
    assert law["beta"] == pytest.approx(0.367172, abs=2e-5)
    assert law.params_exponent == pytest.approx(0.5139, abs=1e-4)
    assert result.status == "ok"


def test_published_standard_deviations(result: ScalingFit) -> None:
    """Of the replication's 4,000 multinomial refits; B's has heavy tails, so its deviation is loose in both."""
    draws = result.draws
    spread = np.array([draws[:, 0].std(), draws[:, 3].std(), draws[:, 4].std(), draws[:, 1].std()])
    np.testing.assert_allclose(spread, [0.0257, 0.0154, 0.0206, 124.5], rtol=0.1)
    assert draws[:, 2].std() == pytest.approx(1293, rel=0.3)
    assert np.log(draws[:, 1]).std() == pytest.approx(124.5 / 477.8, rel=0.1)
    assert (draws[:, 4] / (draws[:, 3] + draws[:, 4])).std() == pytest.approx(0.0200, rel=0.1)


def test_chinchilla_itself_is_forecast(result: ScalingFit) -> None:
    forecast = result.forecast(70e9, 1.4e12)
    assert forecast.supported
    assert forecast.extrapolation == pytest.approx(45.4, rel=0.01)
    assert 15 < result.law.allocate(5.76e23).tokens_per_param < 25
