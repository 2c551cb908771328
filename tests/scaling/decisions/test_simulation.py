"""Planted ladders: what a design costs, and that its simulated forecasts are those that the fit would make."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Law, Simulation, compute_flops, fit, isoflop_design, ladder_design, simulate

SIZES, RATIOS = np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0]


def test_branches_share_a_stem_and_cost_what_they_add() -> None:
    """One size at D/N 10, 20, 40 with a fifth of cooldown: .8·40 + .2·(10 + 20 + 40) = 46 tokens per parameter, not 70."""
    branches = ladder_design([1e8], [40, 10, 20], schedule="branches", cooldown=0.2)
    assert branches["n_tokens"].tolist() == [1e9, 2e9, 4e9]
    assert branches["stem"].tolist() == [0, 0, 0]
    assert branches["cost_flops"].sum() == pytest.approx(6 * 1e8 * 46 * 1e8)
    runs = ladder_design([1e8], [10, 20, 40])
    assert runs["stem"].tolist() == [0, 1, 2]
    assert runs["cost_flops"].sum() == pytest.approx(6 * 1e8 * 70 * 1e8)


def test_ladder_leaves_out_what_is_too_dear() -> None:
    design = ladder_design(SIZES, RATIOS, max_flops=1e18)
    flops = compute_flops(design["n_params"], design["n_tokens"])
    assert flops.max() <= 1e18
    assert len(design) == sum(6 * n * n * r <= 1e18 for n in SIZES for r in RATIOS) < 20


def test_isoflop_curves_lie_at_their_compute_around_the_ratio() -> None:
    design = isoflop_design([1e18, 1e19], 5, spread=16, tokens_per_param=20)
    assert np.asarray(compute_flops(design["n_params"], design["n_tokens"])) == pytest.approx(
        np.repeat([1e18, 1e19], 5)
    )
    for _, curve in design.groupby("cost_flops"):
        assert curve["n_params"].max() / curve["n_params"].min() == pytest.approx(16)
        middle = curve.iloc[2]
        assert middle["n_tokens"] / middle["n_params"] == pytest.approx(20)


def test_without_noise_the_planted_loss_is_forecast(planted: Law) -> None:
    found = simulate(ladder_design(SIZES, RATIOS), planted, n_params=1e9, n_tokens=2e10, noise=0, n_trials=2)
    assert found.truth == planted.loss(1e9, 2e10)
    assert found.rms_error < 1e-4
    assert found.size_error < 1e-3
    assert found.coverage == 1
    assert found.trials["supported"].all()


def test_one_draw_is_the_fit_of_its_losses(planted: Law) -> None:
    """The same generator by hand: the shared part of each stem first, then that of each run."""
    design = ladder_design(SIZES, RATIOS, schedule="branches")
    found = simulate(design, planted, n_params=1e9, n_tokens=2e10, noise=0.002, stem_noise=0.004, n_trials=2, seed=3)
    generator = np.random.default_rng(3)
    stem = 0.004 * generator.standard_normal(len(SIZES))
    error = np.repeat(stem, len(RATIOS)) + 0.002 * generator.standard_normal(len(design))
    runs = design.assign(loss=planted.loss(design["n_params"], design["n_tokens"]) * np.exp(error))
    fitted = fit(runs, n_params_convention="total", n_bootstrap=20)
    forecast, flops = fitted.forecast(1e9, 2e10), float(compute_flops(1e9, 2e10))
    size_error = math.log(fitted.best_law.allocate(flops).n_params / planted.allocate(flops).n_params)
    assert found.trials["size_error"][0] == pytest.approx(size_error, rel=1e-4)
    # the losses agree to rounding, the fits to their tolerance
    assert found.trials["loss"][0] == pytest.approx(forecast.loss, rel=1e-8)
    assert found.trials["error"][0] == pytest.approx(math.log(forecast.loss / planted.loss(1e9, 2e10)), rel=1e-6)
    assert found.trials["width"][0] == pytest.approx((forecast.high - forecast.low) / forecast.loss, rel=1e-4)


def test_errors_grow_with_the_noise_and_with_shared_stems(planted: Law) -> None:
    design = ladder_design(SIZES, RATIOS, schedule="branches")

    def at_the_target(noise: float, stem_noise: float = 0.0) -> Simulation:
        return simulate(design, planted, n_params=2e9, n_tokens=4e10, noise=noise, stem_noise=stem_noise, n_trials=6)

    quiet, loud, shared = at_the_target(0.001), at_the_target(0.006), at_the_target(0.001, 0.006)
    assert quiet.rms_error < loud.rms_error
    assert quiet.width < loud.width
    assert quiet.rms_error < shared.rms_error
    error, size_error = loud.trials["error"].to_numpy(), loud.trials["size_error"].to_numpy()
    assert loud.rms_error == pytest.approx(math.sqrt(sum(error**2) / 6))
    assert loud.bias == pytest.approx(sum(error) / 6)
    assert loud.size_error == pytest.approx(math.sqrt(sum(size_error**2) / 6))
    assert replace(loud, trials=loud.trials.assign(held=[True, True, True, True, False, False])).coverage == 4 / 6
    text = str(loud)
    assert f"within a factor {math.exp(loud.size_error):.3g} (rms)" in text
    assert "20 runs, 5 independent" in text
    assert "5 independent runs: intervals were validated from 10 on" in text
    assert f"rms {loud.rms_error:.2%}" in text


def test_errors_name_the_rule_and_the_value(planted: Law) -> None:
    design = ladder_design(SIZES, RATIOS)
    with pytest.raises(ValueError, match="missing column n_tokens"):
        simulate(design.drop(columns="n_tokens"), planted, n_params=1e9, n_tokens=2e10)
    with pytest.raises(ValueError, match="noise .*got -1"):
        simulate(design, planted, noise=-1, n_params=1e9, n_tokens=2e10)
    with pytest.raises(ValueError, match="n_params .*got -1"):
        simulate(design, planted, n_params=-1e9, n_tokens=2e10)
    with pytest.raises(ValueError, match="n_trials .*got 1"):
        simulate(design, planted, n_trials=1, n_params=1e9, n_tokens=2e10)
    with pytest.raises(ValueError, match="distinct .*got 5"):
        simulate(design[:5], planted, n_params=1e9, n_tokens=2e10)
    with pytest.raises(ValueError, match="schedule .*got 'cosine'"):
        ladder_design(SIZES, RATIOS, schedule="cosine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cooldown .*got 1"):
        ladder_design(SIZES, RATIOS, schedule="branches", cooldown=1)
    with pytest.raises(ValueError, match="max_flops=1.0"):
        ladder_design(SIZES, RATIOS, max_flops=1.0)
    with pytest.raises(ValueError, match="spread .*got 1"):
        isoflop_design([1e18], 5, spread=1)
    with pytest.raises(ValueError, match="n_params .*got -1.0"):
        ladder_design([-1.0], RATIOS)


def test_a_design_is_any_table(planted: Law) -> None:
    bare = pd.DataFrame({"n_params": np.repeat(SIZES, 4), "n_tokens": np.repeat(SIZES, 4) * np.tile(RATIOS, 5)})
    found = simulate(bare, planted, n_params=1e9, n_tokens=2e10, n_trials=2)
    assert found.cost_flops == pytest.approx(compute_flops(bare["n_params"], bare["n_tokens"]).sum())
    assert found.design["stem"].nunique() == 20
    assert "rms" in str(found)
    assert Chinchilla() == planted.form


def test_each_reason_is_listed_once_whatever_its_numbers(planted: Law) -> None:
    found = simulate(ladder_design(SIZES, (10, 20, 40)), planted, n_params=1e12, n_tokens=2e13, n_trials=4)
    assert found.trials["supported"].sum() == 0
    assert 0 < len(found.reasons) <= 3
