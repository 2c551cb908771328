"""The regret surface: planted parabolas are found, in spite of levels that differ from group to group."""

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingError, fit_regret_surface

OPTIMUM = {"rate": 0.3, "init": -0.5}
CURVATURE = {"rate": 0.03, "init": 0.06}
NOISE = 1e-3


def planted(n_runs: int = 60, *, noise: float = NOISE, seed: int = 0) -> tuple[pd.DataFrame, list[int]]:
    generator = np.random.default_rng(seed)
    rows = pd.DataFrame({name: generator.uniform(-1.2, 1.2, n_runs) for name in OPTIMUM})
    groups = [int(group) for group in generator.integers(0, 3, n_runs)]
    log_loss = np.array(groups) * 0.4 + noise * generator.standard_normal(n_runs)
    for name in OPTIMUM:
        log_loss += CURVATURE[name] / 2 * (rows[name] - OPTIMUM[name]) ** 2
    return rows.assign(loss=np.exp(log_loss)), groups


def test_planted_parabolas_are_recovered_across_groups() -> None:
    rows, groups = planted()
    surface = fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=groups)
    for name, centre, slope, half in zip(
        surface.coordinates, surface.centre, surface.slopes, surface.half_curvatures, strict=True
    ):
        assert 2 * half == pytest.approx(CURVATURE[name], abs=0.004)
        assert centre - slope / (2 * half) == pytest.approx(OPTIMUM[name], abs=0.05)
    assert surface.noise == pytest.approx(NOISE, rel=0.3)


def test_regret_is_relative_to_the_reference_and_has_a_sign() -> None:
    rows, groups = planted(noise=1e-6)
    surface = fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=groups)
    points = pd.DataFrame([OPTIMUM, {"rate": 1.3, "init": -0.5}])
    assert surface.regret(points, OPTIMUM) == pytest.approx([0, np.expm1(0.015)], abs=1e-5)
    assert surface.regret(points, {"rate": 1.3, "init": -0.5}) == pytest.approx([np.expm1(-0.015), 0], abs=1e-5)
    assert surface.stderr(points, OPTIMUM)[0] == 0
    assert surface.stderr(points, OPTIMUM)[1] > 0


def test_the_standard_error_covers_the_truth() -> None:
    point, truth = pd.DataFrame([{"rate": 0.0, "init": 0.5}]), np.expm1(0.015 * (0.3**2 + 2 * 1.0**2))
    inside = 0
    for seed in range(60):
        rows, groups = planted(40, noise=0.005, seed=seed)
        surface = fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=groups)
        error = surface.regret(point, OPTIMUM)[0] - truth
        inside += abs(error) <= 1.645 * surface.stderr(point, OPTIMUM)[0]
    assert 48 <= inside <= 60  # of 60 at 90 %: 54 ± 2.3


def test_diverged_runs_and_lone_runs_give_no_regret() -> None:
    rows, groups = planted()
    extra = pd.DataFrame([{"rate": 0.0, "init": 0.0, "loss": np.nan}, {"rate": 0.0, "init": 0.0, "loss": 99.0}])
    with_extra = fit_regret_surface(
        pd.concat([rows, extra], ignore_index=True), coordinates=list(OPTIMUM), groups=[*groups, 0, 7]
    )
    without = fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=groups)
    assert with_extra.n_runs == without.n_runs == 60
    assert with_extra.slopes == pytest.approx(without.slopes)


@pytest.mark.parametrize("n_runs", [9, 10])
def test_five_degrees_of_freedom_estimate_the_noise(n_runs: int) -> None:
    """One level, two slopes and two curvatures of ten runs."""
    rows, _ = planted(n_runs)
    if n_runs == 10:
        assert fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=[0] * n_runs).n_runs == 10
    else:
        with pytest.raises(ScalingError, match="9 comparable runs in 1 groups"):
            fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=[0] * n_runs)


def test_too_few_runs_are_refused() -> None:
    rows, groups = planted(9)
    with pytest.raises(ScalingError, match=r"4.*rate, init"):
        fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=groups)
    with pytest.raises(ScalingError, match="cannot determine"):
        rows, groups = planted(60)
        fit_regret_surface(rows.assign(init=0.0), coordinates=list(OPTIMUM), groups=groups)


def test_it_prints_and_serialises() -> None:
    rows, groups = planted()
    surface = fit_regret_surface(rows, coordinates=list(OPTIMUM), groups=groups)
    assert "60 runs in 3 groups" in str(surface)
    curvature, error = 2 * surface.half_curvatures[0], 2 * np.sqrt(surface.covariance[2, 2])
    assert f"curvature {curvature:+.2%} ± {error:.2%} of the loss" in str(surface)
    assert surface.to_dict()["coordinates"] == ["rate", "init"]
