"""How sure a decision is: by every fit and every draw, one by one, and as often as is said on planted ladders."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq

from scaling import Joint, Law, Limits, MemoryLimit, ScalingFit, decide, fit
from scaling.forms.law import Allocation


def test_sizes_are_as_sure_as_the_fits_and_the_runs_make_them(fitted: ScalingFit) -> None:
    """The ends are the mean's size, moved as one of the fits differs from their mean and one draw from the base."""
    found = decide(fitted, 1e21, level=0.8)
    fits = np.log([law.allocate(1e21).n_params for law in fitted.ensemble.variants.values()])
    names = list(Joint.parameters)
    drawn = [Joint().law(**dict(zip(names, map(float, draw), strict=True))) for draw in fitted.ensemble.draws]
    draws = np.log([law.allocate(1e21).n_params for law in drawn])
    moved = ((fits - fits.mean())[:, None] + fitted.ensemble.widening * (draws - fits[0])).ravel()
    expected = found.n_params * np.exp(np.quantile(moved, [0.1, 0.9], method="nearest"))
    assert found.intervals is not None
    assert found.intervals.loc["n_params", ["low", "high"]].tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    tokens, ratios = 1e21 / 6 / expected[::-1], 1e21 / 6 / expected[::-1] ** 2
    assert found.intervals.loc["n_tokens", ["low", "high"]].tolist() == pytest.approx(tokens.tolist(), rel=1e-3)
    assert found.intervals.loc["tokens_per_param", ["low", "high"]].tolist() == pytest.approx(ratios.tolist(), rel=1e-3)
    assert found.size_by_fit is not None
    for name, variant in fitted.ensemble.variants.items():
        assert found.size_by_fit[name] == pytest.approx(variant.allocate(1e21).n_params, rel=1e-5)
    assert found.size_by_fit["chinchilla alone"] == pytest.approx(fitted.law.allocate(1e21).n_params, rel=1e-5)
    shapes = decide(fitted, 1e21, limits=Limits(sizes=[1e8, 1e9, 1e10, 1e11]))
    assert shapes.intervals is not None
    assert set(shapes.intervals.loc["n_params"]) <= {1e8, 1e9, 1e10, 1e11}


@pytest.mark.soak
def test_the_interval_of_the_best_size_covers_at_its_level(planted: Law, ladder: Callable[..., pd.DataFrame]) -> None:
    """Of ladders of twenty runs of Chinchilla's form, and of a joint one as public ladders have it."""
    held = []
    for law in (planted, Joint().law(E=1.6, A=60.0, B=300.0, alpha=0.22, beta=0.24, g=0.5)):
        for seed in range(20):
            runs = ladder(0.004, seed)
            runs["loss"] *= law.loss(runs["n_params"], runs["n_tokens"]) / planted.loss(
                runs["n_params"], runs["n_tokens"]
            )
            found = fit(runs, n_params_convention="total", n_bootstrap=2)
            for flops in (1e20, 1e22):
                intervals = decide(found, flops).intervals
                assert intervals is not None
                best = law.allocate(flops)
                held.append(
                    [
                        intervals.loc[n, "low"] <= getattr(best, n) <= intervals.loc[n, "high"]
                        for n in ("n_params", "n_tokens")
                    ]
                )
    assert np.mean(held, axis=0) == pytest.approx(0.9, abs=0.06)


def test_among_given_sizes_and_under_a_memory_the_ends_are_the_nearest_that_there_are(fitted: ScalingFit) -> None:
    def ends(**limits: Any) -> pd.DataFrame:
        found = decide(fitted, 1e21, limits=Limits(**limits)).intervals
        assert found is not None
        return found

    free, sizes = ends(), np.geomspace(1e8, 1e11, 61)
    shapes = ends(sizes=sizes)
    memory = MemoryLimit(what="serving", memory_bytes=free.loc["n_params", "estimate"], bytes_per_param=1, share=1)
    held = ends(memory=[memory])
    assert set(shapes.loc["n_params"]) <= set(sizes)
    one_step = math.log(sizes[1] / sizes[0])
    for end in ("low", "high"):
        assert abs(math.log(shapes.loc["n_params", end] / free.loc["n_params", end])) < 1.5 * one_step
    assert held.loc["n_params", "high"] <= memory.max_params < free.loc["n_params", "high"]


def test_compute_for_a_loss_is_as_sure_as_the_forecast(fitted: ScalingFit) -> None:
    """With the least compute the forecast's interval ends at the loss, with the most it begins there; or never does."""
    found = decide(fitted, loss=2.6)
    assert found.intervals is not None
    assert found.forecast is not None
    reach, (low, high) = found.forecast.high / found.forecast.loss, found.intervals.loc["total_flops", ["low", "high"]]
    mean = fitted.ensemble.law
    assert mean.allocate(low).loss == pytest.approx(2.6 * reach, rel=1e-6)
    assert mean.allocate(high).loss == pytest.approx(2.6 / reach, rel=1e-6)
    for name in ("n_params", "n_tokens"):
        assert found.intervals.loc[name, "low"] <= getattr(mean.allocate(low), name) * (1 + 1e-6)
        assert found.intervals.loc[name, "high"] >= getattr(mean.allocate(high), name) * (1 - 1e-6)
    far = decide(fitted, loss=1.01 * mean.allocate(1e50).loss)
    assert far.intervals is not None
    assert math.isfinite(far.total_flops)
    assert math.isinf(far.intervals.loc["total_flops", "high"])
    assert far.to_dict()["intervals"]["total_flops"]["high"] is None


@pytest.mark.parametrize("loss", [2.6, 2.1])
def test_sizes_for_a_loss_reach_as_far_as_the_fits_and_as_the_forecast_do(fitted: ScalingFit, loss: float) -> None:
    """At 2.6 fits and draws, each with its own least compute, lie further apart than the forecast's ends; at 2.1 not everywhere."""
    found = decide(fitted, loss=loss, level=0.8)
    assert found.intervals is not None
    names = list(Joint.parameters)
    drawn = [Joint().law(**dict(zip(names, map(float, draw), strict=True))) for draw in fitted.ensemble.draws]

    def least(law: Law) -> Allocation:
        return law.allocate(math.exp(brentq(lambda log: law.allocate(math.exp(log)).loss - loss, 20, 90)))

    fits, draws = (list(map(least, laws)) for laws in (fitted.ensemble.variants.values(), drawn))
    at_ends = [fitted.ensemble.law.allocate(flops) for flops in found.intervals.loc["total_flops", ["low", "high"]]]
    for name in ("n_params", "n_tokens"):
        of_fits, of_draws = (np.log([getattr(best, name) for best in each]) for each in (fits, draws))
        moved = (of_fits - of_fits.mean())[:, None] + fitted.ensemble.widening * (of_draws - of_fits[0])
        low, high = getattr(found, name) * np.exp(np.quantile(moved.ravel(), [0.1, 0.9], method="nearest"))
        expected = [min(low, getattr(at_ends[0], name)), max(high, getattr(at_ends[1], name))]
        assert found.intervals.loc[name, ["low", "high"]].tolist() == pytest.approx(expected, rel=1e-4)
