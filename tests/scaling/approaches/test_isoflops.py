"""Approaches 1 and 2: exact where they should be, and biased where and by how much they say."""

import json
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, ComputePowers, Law, ScalingError, fit, fit_envelope, fit_isoflops

EVEN = Chinchilla().law(E=1.7, A=400.0, B=1200.0, alpha=0.35, beta=0.35)
UNEVEN = Chinchilla().law(E=1.7, A=4e4, B=900.0, alpha=0.62, beta=0.32)
BUDGETS = (1e18, 3e18, 1e19, 3e19, 1e20)


def isoflops(law: Law, octaves: float = 2.0, off: float = 0.0, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Seven sizes a budget, `octaves` to each side of `off` octaves from the best."""
    rng, parts = np.random.default_rng(seed), []
    for budget in BUDGETS:
        n_params = law.allocate(budget).n_params * 2 ** (off + np.linspace(-octaves, octaves, 7))
        n_tokens = budget / 6 / n_params
        loss = law.loss(n_params, n_tokens) * np.exp(noise * rng.standard_normal(7))
        parts.append(pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss}))
    return pd.concat(parts, ignore_index=True)


def two(runs: pd.DataFrame, n_bootstrap: int = 40) -> ComputePowers:
    return fit_isoflops(runs, n_params_convention="total", n_bootstrap=n_bootstrap)


def test_centred_parabolas_of_an_even_surface_are_exact() -> None:
    result = two(isoflops(EVEN))
    assert result.params_exponent == pytest.approx(0.5, abs=1e-8)
    assert result.n_params(1e22) == pytest.approx(EVEN.allocate(1e22).n_params, rel=1e-6)
    assert result.n_tokens(1e22) == pytest.approx(EVEN.allocate(1e22).n_tokens, rel=1e-6)
    np.testing.assert_allclose(result.points["off_centre"], 0, atol=1e-8)
    assert result.status == "ok"
    assert max(map(abs, result.bias.values())) < 1e-4


@pytest.mark.parametrize(
    ("law", "octaves", "off", "says"),
    [
        (UNEVEN, 3.0, 0.0, "from the sizes' width (±3.0 octaves) and alpha ≠ beta"),
        (EVEN, 3.0, 1.5, "nearly all of it from grids off centre"),
        (UNEVEN, 3.0, -1.0, "too small"),
    ],
)
def test_its_bias_is_estimated_and_reported(law: Law, octaves: float, off: float, says: str) -> None:
    """The runs have no noise: what is missed is the parabola's, and is what the result says it is."""
    result = two(isoflops(law, octaves, off))
    exponent = law.params_exponent
    assert exponent is not None
    assert result.bias["params_exponent"] == pytest.approx(result.params_exponent - exponent, abs=1e-4)
    missed = float(result.n_params(10 * BUDGETS[-1])) / law.allocate(10 * BUDGETS[-1]).n_params - 1
    assert abs(missed) > 0.01
    assert result.bias["n_params_beyond"] == pytest.approx(missed, rel=0.02)
    assert says in "; ".join(result.warnings)


def test_centred_grids_of_an_even_surface_would_have_no_bias() -> None:
    """Sizes an octave and a half off centre: all of what they miss is gone once each grid is moved to its optimum."""
    bias = two(isoflops(EVEN, 3.0, 1.5)).bias
    assert abs(bias["n_params"]) > 0.02
    assert max(abs(bias[name]) for name in bias if name.endswith("_centred")) < 1e-4


def test_a_noisy_run_counts_less() -> None:
    runs = isoflops(EVEN).assign(noise=0.001)
    runs.loc[1, ["loss", "noise"]] = runs.loc[1, "loss"] * 1.05, 0.5
    assert two(runs).params_exponent == pytest.approx(0.5, abs=5e-4)
    assert abs(two(runs.drop(columns="noise")).params_exponent - 0.5) > 0.002


def test_resampled_intervals_cover_the_noise() -> None:
    """Of five budgets of seven runs each, not drawn apart, they held two in three."""
    covered = []
    for seed in range(40):
        table = two(isoflops(EVEN, noise=0.002, seed=seed), 100).intervals(1e22, 0.9)
        right = {"n_params": EVEN.allocate(1e22).n_params, "params_exponent": 0.5}
        covered.append([table.loc[name, "low"] < value < table.loc[name, "high"] for name, value in right.items()])
    assert np.mean(covered, axis=0) == pytest.approx(0.9, abs=0.075)


@pytest.mark.parametrize("name", ["n_params", "n_tokens"])
def test_vertices_lie_in_their_intervals_as_often_as_they_say(name: str) -> None:
    covered = []
    for seed in range(40):
        points = two(isoflops(EVEN, noise=0.002, seed=seed), 2).points
        best = EVEN.frontier(points["compute_flops"])[name]
        assert (points[f"{name}_low"] < points[name]).all()
        covered.append((points[f"{name}_low"] < best) & (best < points[f"{name}_high"]))
    assert np.mean(covered) == pytest.approx(0.9, abs=0.05), "200 vertices: a standard error of .02"


def test_a_parabola_indistinguishable_from_a_line_has_no_interval() -> None:
    """The ends are where the parabola's slope is indistinguishable from zero: with so much noise that is everywhere."""
    points = two(isoflops(EVEN, octaves=0.5, noise=0.005, seed=1), 2).points
    unknown = points["n_params_low"].isna()
    assert unknown.any()
    assert (unknown == points["n_params_high"].isna()).all()
    exact = two(isoflops(EVEN)).points
    np.testing.assert_allclose(exact["n_params_low"], exact["n_params_high"], rtol=0.02)


def test_what_has_no_minimum_among_its_sizes_is_left_out() -> None:
    runs = isoflops(EVEN)
    first = 6 * runs["n_params"] * runs["n_tokens"] < 2e18
    runs.loc[first, "loss"] = 3 - 0.01 * np.arange(first.sum())
    runs = runs.drop(index=runs.index[7:11])
    result = two(runs)
    assert len(result.points) == 3
    assert "1e+18 FLOPs: no minimum among the sizes" in result.warnings
    assert "3e+18 FLOPs: fewer than 4 sizes" in result.warnings
    with pytest.raises(ScalingError, match="two budgets.*got 1"):
        two(isoflops(EVEN).iloc[:7])


def test_untuned_and_unannealed_rows_are_left_out() -> None:
    runs = isoflops(EVEN).assign(regret=0.0, annealed=True)
    runs.loc[3, ["loss", "regret"]] = [9.0, 0.02]
    runs.loc[12, "loss"] = 9.0
    runs.loc[12, "annealed"] = False
    result = two(runs)
    assert result.params_exponent == pytest.approx(0.5, abs=2e-3)
    assert "2.000%" in result.warnings[0]


def test_marins_parabolas_are_reported_as_wide(public_table: Callable[[str], pd.DataFrame]) -> None:
    """Measured here: a .432 by parabolas, .368 by the law, of which .032 is the parabolas' own bias."""
    table = public_table("marin_dclm")
    table = table[table["outlier"] == 0].rename(columns={"flops": "compute_flops"})
    parabolas = fit_isoflops(table, n_params_convention="total", n_bootstrap=100)
    law = fit(table, n_params_convention="total", n_bootstrap=100).law
    assert parabolas.params_exponent == pytest.approx(0.432, abs=0.002)
    assert law.params_exponent == pytest.approx(0.368, abs=0.002)
    assert parabolas.bias["params_exponent"] == pytest.approx(0.032, abs=0.003)
    assert parabolas.bias["n_params_beyond"] == pytest.approx(0.255, abs=0.02)
    assert "parabola bias" in parabolas.warnings[-1]


def curves(law: Law, n_sizes: int = 12) -> pd.DataFrame:
    parts = []
    for run, n_params in enumerate(np.geomspace(1e7, 2e9, n_sizes)):
        n_tokens = np.geomspace(n_params, 3000 * n_params, 80)
        loss = law.loss(n_params, n_tokens)
        parts.append(pd.DataFrame({"run": run, "n_params": n_params, "n_tokens": n_tokens, "loss": loss}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("law", [EVEN, UNEVEN])
def test_the_envelope_of_curves_gives_the_powers(law: Law) -> None:
    result = fit_envelope(curves(law), n_params_convention="total", n_bootstrap=60)
    assert result.params_exponent == pytest.approx(law.params_exponent, abs=0.01)
    assert result.params_exponent + result.tokens_exponent == pytest.approx(1)
    best = law.allocate(result.compute_ref)
    assert result.n_params(result.compute_ref) == pytest.approx(best.n_params, rel=0.03)
    table = result.intervals()
    assert table.loc["params_exponent", "low"] < (law.params_exponent or 0) < table.loc["params_exponent", "high"]
    assert (result.points["smaller"] < result.points["larger"]).all()


def test_where_a_curve_ends_is_no_crossing() -> None:
    """Curves cut at 40 tokens per parameter hand over to larger ones by ending, too: those places are no information."""
    rows = curves(UNEVEN)
    short = rows[rows["n_tokens"] < 40 * rows["n_params"]]
    result = fit_envelope(short, n_params_convention="total", n_bootstrap=20)
    whole = fit_envelope(rows, n_params_convention="total", n_bootstrap=20)
    assert 2 <= len(result.points) < len(whole.points)
    assert result.params_exponent == pytest.approx(whole.params_exponent, abs=0.02)
    with pytest.raises(ScalingError, match="got 0 among 2 sizes"):
        fit_envelope(curves(EVEN, 2), n_params_convention="total")


def test_curves_raise_warnings() -> None:
    rows = curves(EVEN, 4).assign(annealed=False)
    warnings = "; ".join(fit_envelope(rows, n_params_convention="total", n_bootstrap=20).warnings)
    assert "3 crossings on the envelope: at least 4" in warnings
    assert "losses in mid-schedule" in warnings
    with pytest.raises(ValueError, match="n_params .*got 12 in run 0"):
        fit_envelope(curves(EVEN).assign(run=0), n_params_convention="total")
    with pytest.raises(ValueError, match="run .* row 3 "):
        fit_envelope(
            curves(EVEN).assign(run=lambda rows: rows["run"].astype(object).mask(rows.index == 3)),
            n_params_convention="total",
        )
    raised = fit_envelope(curves(EVEN).assign(annealed="False"), n_params_convention="total", n_bootstrap=20).warnings
    assert any("losses in mid-schedule" in warning for warning in raised)


@pytest.mark.parametrize("fitted", [fit_isoflops, fit_envelope])
def test_too_few_resamplings_are_refused(fitted: Callable[..., ComputePowers]) -> None:
    rows = curves(EVEN) if fitted is fit_envelope else isoflops(EVEN)
    with pytest.raises(ValueError, match="n_bootstrap .*got 0"):
        fitted(rows, n_params_convention="total", n_bootstrap=0)


@pytest.mark.parametrize("approach", ["isoflops", "envelope"])
def test_results_speak_and_survive_json(approach: str) -> None:
    if approach == "isoflops":
        result = two(isoflops(EVEN, noise=0.001))
    else:
        result = fit_envelope(curves(EVEN), n_params_convention="total", n_bootstrap=40)
    restored = ComputePowers.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert restored.to_dict() == result.to_dict()
    assert str(restored) == str(result)
    assert "N counts total" in str(result)
    with pytest.raises(ValueError, match="level .*got 90"):
        result.intervals(level=90)


def test_losses_in_a_column_s_own_unit_keep_it_and_become_nats_where_the_bytes_are_known() -> None:
    def read(fitting: Callable[..., ComputePowers], table: pd.DataFrame) -> list[ComputePowers]:
        bits = table.assign(val_bpb=table["loss"] / math.log(2) / 4.2).drop(columns="loss")
        both = (bits, bits.assign(bytes_per_token=4.2))
        return [fitting(each, n_params_convention="total", n_bootstrap=4) for each in both]

    for fitting, table in ((fit_isoflops, isoflops(EVEN)), (fit_envelope, curves(EVEN))):
        plain, known = read(fitting, table)
        assert (plain.loss_unit, known.loss_unit) == ("bits per byte", "nats per token")
        expected = fitting(table, n_params_convention="total", n_bootstrap=4)
        np.testing.assert_allclose(known.points["loss"], expected.points["loss"])


def test_the_interval_of_a_vertex_weighs_runs_as_the_vertex_does() -> None:
    """One run of each budget is far off, and says so."""
    runs = isoflops(EVEN, noise=0.002).assign(noise=0.002)
    runs.loc[::7, ["noise", "loss"]] = [0.5, 4.0]
    points = two(runs).points
    assert (points["n_params_low"] <= points["n_params"]).all()
    assert (points["n_params"] <= points["n_params_high"]).all()
    assert (points["n_params_high"] / points["n_params_low"] < 1.2).all()
