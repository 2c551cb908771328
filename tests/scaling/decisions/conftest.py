"""A law that decisions are made by: twenty noisy runs of Hoffmann's."""

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, ScalingFit, fit

HOFFMANN = Chinchilla().law(E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283)


@pytest.fixture(scope="module")
def fitted() -> ScalingFit:
    sizes, ratios = np.meshgrid(np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0])
    n_params, n_tokens = sizes.ravel(), (sizes * ratios).ravel()
    noise = 0.003 * np.random.default_rng(0).standard_normal(n_params.size)
    loss = HOFFMANN.loss(n_params, n_tokens) * np.exp(noise)
    return fit(
        pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss}),
        n_params_convention="total",
        n_bootstrap=60,
    )
