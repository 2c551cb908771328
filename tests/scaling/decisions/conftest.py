"""A law that decisions are made by: twenty noisy runs of Hoffmann's."""

import pytest

from scaling import Chinchilla, ScalingFit, fit
from tests.scaling.conftest import planted_ladder

HOFFMANN = Chinchilla().law(E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283)


@pytest.fixture(scope="module")
def fitted() -> ScalingFit:
    return fit(planted_ladder(0.003, law=HOFFMANN), n_params_convention="total", n_bootstrap=60)
