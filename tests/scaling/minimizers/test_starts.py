"""Plain multi-start of scipy's L-BFGS-B comes to the same minimum as the default, which shares nothing with it but the form."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Form, Joint, Kaplan, TiedChinchilla, fit


@pytest.mark.parametrize("form", [Chinchilla(), TiedChinchilla(), Joint(), Kaplan()], ids=lambda form: form.name)
@pytest.mark.parametrize("delta", [1e-3, np.inf])
def test_both_ways_reach_one_minimum(ladder: Callable[..., pd.DataFrame], form: Form, delta: float) -> None:
    results = [
        fit(ladder(0.005), n_params_convention="total", form=form, method=method, delta=delta, n_bootstrap=2)
        for method in ("newton", "multistart")
    ]
    assert results[1].objective == pytest.approx(results[0].objective, rel=1e-6)
    at_target = [float(result.predict(1e9, 2e10)) for result in results]
    assert at_target[1] == pytest.approx(at_target[0], rel=1e-4)


def test_the_reference_problem(reference: pd.DataFrame) -> None:
    """Besiroglu et al. 2404.10102: .00101827403 from 4,500 starts."""
    result = fit(reference, n_params_convention="total", method="multistart", n_bootstrap=2)
    assert result.objective <= 0.00101827403
    assert "the minimum was not reached" not in "; ".join(result.warnings)


def test_an_unknown_method_is_named(ladder: Callable[..., pd.DataFrame]) -> None:
    with pytest.raises(ValueError, match="method .*got 'isoflop': for isoFLOPs see fit_iso"):
        fit(ladder(), n_params_convention="total", method="isoflop")  # type: ignore[arg-type]
