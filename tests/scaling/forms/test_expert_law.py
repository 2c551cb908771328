"""Laws of experts: planted numbers, derivatives, the dense limit, one length, and the public table of Clark et al. (2202.01169)."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from proxy_models.architecture.config import ModelConfig
from scaling import (
    Law,
    Limits,
    MemoryLimit,
    MixtureOfExperts,
    ScalingError,
    ScalingFit,
    backtest,
    decide,
    fit,
    next_runs,
)
from scaling.fits.sparsity import with_sparsity
from scaling.forms import FORECAST_FORMS, form_named
from scaling.forms.expert_law import ExpertPowers, JointExperts
from tests.benchmarks import routed_law
from tests.quick import quick_and_soak

NUMBERS = {"E": 1.7, "A": 90.0, "B": 600.0, "alpha": 0.3, "beta": 0.3, "A_total": 30.0, "alpha_total": 0.25, "h": 0.8}
PLANTED = MixtureOfExperts().law(**NUMBERS)
SPARSITIES = (1.0, 4.0, 16.0, 64.0)


def ladder(noise: float = 0.0, seed: int = 0, ratios: tuple[float, ...] = (10.0, 30.0, 100.0)) -> pd.DataFrame:
    """Five sizes by three lengths by four sparsities."""
    grid = np.meshgrid(np.geomspace(2e7, 1e9, 5), ratios, SPARSITIES)
    n_params, ratio, sparsity = (x.ravel() for x in grid)
    rows = pd.DataFrame({"n_params": n_params, "n_tokens": n_params * ratio, "sparsity": sparsity})
    error = noise * np.random.default_rng(seed).standard_normal(len(rows))
    return rows.assign(loss=PLANTED.loss(**rows) * np.exp(error))


@pytest.fixture(scope="module")
def fitted() -> ScalingFit:
    return fit(ladder(0.002), n_params_convention="active", loss_unit="nats", form=MixtureOfExperts(), n_bootstrap=60)


@pytest.fixture(scope="module")
def one_length() -> ScalingFit:
    rows = ladder(0.002).assign(n_tokens=2e10)
    rows["loss"] = PLANTED.loss(**rows[["n_params", "n_tokens", "sparsity"]])
    return fit(rows.drop_duplicates(), n_params_convention="active", form=MixtureOfExperts(), n_bootstrap=20)


def test_planted_numbers_are_recovered() -> None:
    result = fit(ladder(), n_params_convention="active", form=MixtureOfExperts(), n_bootstrap=2)
    assert result.objective < 1e-16
    np.testing.assert_allclose([*result.law.parameters.values()], [*PLANTED.parameters.values()], rtol=1e-3)


def test_intervals_hold_the_planted_numbers_at_the_noise_of_runs(fitted: ScalingFit) -> None:
    table = fitted.intervals(0.99)
    for name, value in NUMBERS.items():
        assert table.loc[name, "low"] < value < table.loc[name, "high"]
    assert fitted.status == "ok"
    restored = ScalingFit.from_dict(json.loads(json.dumps(fitted.to_dict(), allow_nan=False)))
    assert str(restored) == str(fitted)
    assert form_named("experts") == MixtureOfExperts()


@pytest.mark.parametrize("form", [MixtureOfExperts(), JointExperts()])
def test_jacobian_and_coordinates_are_exact(form: MixtureOfExperts | JointExperts) -> None:
    rows = {name: column.to_numpy() for name, column in ladder().items() if name != "loss"}
    log_loss = np.log(ladder()["loss"].to_numpy())
    problem = form.problem(rows, log_loss)
    theta = problem.starts(log_loss)[[40, 900, 2000]] * 0.95
    value, jacobian = problem.linearise(theta)
    steps = 1e-6 * np.eye(theta.shape[1])
    differences = [(problem.log_loss(theta + s) - problem.log_loss(theta - s)) / 2e-6 for s in steps]
    np.testing.assert_allclose(jacobian, np.stack(differences, axis=-1), atol=2e-8)
    natural = problem.natural(theta)
    np.testing.assert_allclose(np.log(form.loss(form.stacked(natural), rows)), value, rtol=1e-12)
    if form in FORECAST_FORMS:
        back = problem.coordinates(dict(zip(form.parameters, natural[1], strict=True)))
        np.testing.assert_allclose(back, theta[1], rtol=1e-10)
        few = {name: column[:3] for name, column in rows.items()}
        np.testing.assert_allclose(problem.elsewhere(few).log_loss(theta), value[:, :3], rtol=1e-12)


def test_a_dense_model_has_a_sum_of_powers_and_experts_help_less_and_less() -> None:
    tied = MixtureOfExperts().law(**NUMBERS | {"alpha_total": 0.3})
    n = np.geomspace(1e7, 1e10, 7)
    scale = (90 ** (1 / 0.8) + 30 ** (1 / 0.8)) ** 0.8
    np.testing.assert_allclose(tied.loss(n, 1e11, sparsity=1.0), 1.7 + scale * n**-0.3 + 600 * 1e11**-0.3, rtol=1e-12)
    sparse = PLANTED.loss(1e8, 1e10, sparsity=np.geomspace(1, 1e6, 7))
    gains = -np.diff(np.log(sparse - 1.7))
    assert (gains > 0).all()
    assert (np.diff(gains) < 0).all()
    assert sparse[-1] > 1.7 + 90 * 1e8**-0.3 + 600 * 1e10**-0.3


def test_columns_of_counts_give_the_sparsity() -> None:
    rows = ladder()
    total = (rows["n_params"] * rows["sparsity"]).where(rows["sparsity"] > 1)
    plain = rows.drop(columns="sparsity")
    np.testing.assert_allclose(with_sparsity(plain.assign(n_params_total=total))["sparsity"], rows["sparsity"])
    in_millions = [f"{each / 1e6:.6f}M" if each > 0 else None for each in total]
    found = with_sparsity(plain.assign(n_params_total=in_millions))["sparsity"]
    np.testing.assert_allclose(found, rows["sparsity"], rtol=1e-4)
    exchanged = plain.assign(n_params=rows["n_params"] * rows["sparsity"], n_params_active=rows["n_params"])
    found = with_sparsity(exchanged)
    np.testing.assert_allclose(found["n_params"], rows["n_params"])
    np.testing.assert_allclose(found["sparsity"], rows["sparsity"])


def test_rows_that_differ_in_k_alone_get_the_parameters_of_k_experts() -> None:
    rows = pd.DataFrame({"n_params": 450e6, "n_params_active": 100e6, "num_experts": 8, "k": [1, 2, 4]})
    np.testing.assert_allclose(with_sparsity(rows)["n_params"], [100e6, 150e6, 250e6])
    counted = rows.assign(n_params_active=[100e6, 150e6, 250e6])
    np.testing.assert_allclose(with_sparsity(counted)["n_params"], [100e6, 150e6, 250e6])
    dense = rows.assign(num_experts=1, n_params=[100e6, 150e6, 250e6])
    np.testing.assert_allclose(with_sparsity(pd.concat([rows, dense], ignore_index=True))["sparsity"][3:], 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sparsity": 0.75}, "sparsity.*0.75"),
        ({"sparsity": np.nan}, "sparsity"),
        ({"sparsity": 4.0}, "sparsity.*got 1"),
        ({"n_tokens": [2e9, 4e9] * 30}, "n_tokens.*got 2"),
    ],
)
def test_bad_tables_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit(ladder().assign(**change), n_params_convention="active", form=MixtureOfExperts())


def test_a_table_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="n_params_total"):
        fit(ladder().drop(columns="sparsity"), n_params_convention="active", form=MixtureOfExperts())
    with pytest.raises(ValueError, match="sparsity missing"):
        PLANTED.loss(1e8, 1e10)


def test_forecasts_hold_what_was_planted_and_refuse_other_sparsities(fitted: ScalingFit) -> None:
    for sparsity in (1.0, 8.0, 64.0):
        found = fitted.forecast(3e9, 1e11, sparsity=sparsity)
        assert found.low < float(PLANTED.loss(3e9, 1e11, sparsity=sparsity)) < found.high
        assert found.supported
        assert found.columns == {"sparsity": sparsity}
    beyond = fitted.forecast(3e9, 1e11, sparsity=200.0)
    assert not beyond.supported
    assert fitted.ensemble.form == JointExperts()
    with pytest.raises(ValueError, match="sparsity missing"):
        fitted.forecast(3e9, 1e11)


def test_one_length_fits_the_sizes_and_forecasts_no_other_length(one_length: ScalingFit) -> None:
    truth = {name: value for name, value in NUMBERS.items() if name not in ("B", "beta")}
    truth["E"] += 600 * 2e10**-0.3
    for name, value in truth.items():
        assert one_length.law[name] == pytest.approx(value, rel=1e-3)
    assert one_length.law["B"] * 2e10 ** -one_length.law["beta"] < 1e-4
    assert one_length.status == "doubtful"
    assert one_length.forecast(1.5e9, 2e10, sparsity=32.0).supported
    assert not one_length.forecast(1.5e9, 6e10, sparsity=32.0).supported
    with pytest.raises(ScalingError, match="tokens_per_param"):
        decide(one_length, 1e21)


def test_the_sparsity_that_is_decided_is_the_largest_within_the_limits(fitted: ScalingFit) -> None:
    """Compared with the best of a grid over N, at 6·N·D + 2·N·I FLOPs with as many experts as fit."""
    budget, served = 1e21, 2e12
    n = np.geomspace(1e8, 1e10, 20001)
    d = (budget / n - 2 * served) / 6
    n, d = n[d > 1e6], d[d > 1e6]
    for memory, most in ((4e10, 64.0), (1e13, 64.0), (4e10, 16.0), (3e9, 64.0)):
        limits = Limits(
            memory=[MemoryLimit(what="serving", memory_bytes=memory, bytes_per_param=1.0, share=1.0)], max_sparsity=most
        )
        found = decide(PLANTED, budget, limits=limits, served_tokens=served)
        fits = n <= memory
        losses = PLANTED.loss(n[fits], d[fits], sparsity=np.clip(memory / n[fits], 1, most))
        assert found.loss == pytest.approx(losses.min(), rel=1e-6)
        assert found.n_params == pytest.approx(n[fits][losses.argmin()], rel=1e-2)
        assert found.n_params_total <= memory * (1 + 1e-9)
        assert found.sparsity is not None
        assert 1 <= found.sparsity <= most * (1 + 1e-9)
        assert found.total_flops == pytest.approx(budget)
    assert decide(fitted, budget, tokens_per_param=20).sparsity == pytest.approx(64)
    with pytest.raises(ValueError, match="max_sparsity"):
        decide(PLANTED, budget)


def test_a_stated_sparsity_and_stated_shapes_are_kept(fitted: ScalingFit) -> None:
    found = decide(fitted, 1e20, sparsity=8.0)
    assert found.sparsity == 8.0
    assert found.forecast is not None
    assert found.forecast.columns == {"sparsity": 8.0}
    assert found.intervals is not None
    low, high = found.intervals.loc["n_params", ["low", "high"]]
    assert low < found.n_params < high
    shapes = [SimpleNamespace(n_params=n, sparsity=s) for n, s in ((3e8, 32.0), (6e8, 8.0), (2e9, 64.0))]
    memory = MemoryLimit(what="serving", memory_bytes=2e10, bytes_per_param=1.0, share=1.0)
    chosen = decide(fitted, 1e20, limits=Limits(sizes=shapes, memory=[memory]))
    of_shapes = {n: float(fitted.best_law.loss(n, 1e20 / 6 / n, sparsity=s)) for n, s in ((3e8, 32.0), (6e8, 8.0))}
    assert chosen.n_params == min(of_shapes, key=lambda n: of_shapes[n])
    assert chosen.loss == pytest.approx(min(of_shapes.values()))
    with pytest.raises(ValueError, match="max_sparsity.*chinchilla"):
        decide(Law.from_dict(DENSE), 1e20, limits=Limits(max_sparsity=8))
    with pytest.raises(ValueError, match=r"sparsity.*got 0\.5"):
        decide(PLANTED, 1e20, sparsity=0.5)
    with pytest.raises(ValueError, match=r"max_sparsity.*got 0\.5"):
        Limits(max_sparsity=0.5)


def shape(n_params: float, sparsity: float | None) -> SimpleNamespace:
    return SimpleNamespace(n_params=n_params, sparsity=sparsity)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("bytes_", "best"), [(1e11, 16.0), (1e10, 4.0)])
def test_equal_active_sizes_of_several_sparsities_are_all_compared(order: int, bytes_: float, best: float) -> None:
    shapes = [shape(1e9, 4.0), shape(1e9, 16.0), shape(5e7, 16.0)][::order]
    memory = MemoryLimit(what="serving", memory_bytes=bytes_, bytes_per_param=1.0, share=1.0)
    n_tokens = 1e21 / 6e9
    for ratio in (None, n_tokens / 1e9):
        found = decide(
            PLANTED, 1e21, limits=Limits(sizes=shapes, memory=[memory]), tokens_per_param=ratio, tolerance=0.1
        )
        assert (found.n_params, found.sparsity) == (1e9, best)
        assert found.config == shape(1e9, best)
        losses = {s: float(PLANTED.loss(1e9, n_tokens, sparsity=s)) for s in (16.0, 4.0) if s <= best}
        assert found.loss == pytest.approx(losses[best], rel=1e-12)
        near = found.near[found.near["n_params"] == 1e9]
        assert near["sparsity"].tolist() == [*losses]
        np.testing.assert_allclose(near["loss"], [*losses.values()], rtol=1e-12)


def test_one_size_needs_no_identified_ratio(one_length: ScalingFit) -> None:
    shapes = [shape(1e9, 4.0), shape(1e9, 16.0)]
    assert decide(one_length, 1.2e20, limits=Limits(sizes=iter(shapes))).config == shapes[1]
    with pytest.raises(ScalingError):
        decide(one_length, 1.2e20, limits=Limits(sizes=[*shapes, shape(2e9, 4.0)]))


def test_mixtures_of_the_built_in_family_state_their_sparsity(fitted: ScalingFit) -> None:
    """T/N of 7.553 and 8.328, counted by hand without the embedding table."""
    base = ModelConfig(
        d_model=256, n_layers=8, head_dim=32, n_experts=64, experts_per_token=2, mlp_ratio=1.0, n_shared_experts=6
    )
    configs = [base, replace(base, n_shared_experts=5)]
    sparsities = []
    for config in configs:
        expert, width = 3 * 256 * 256, 256
        rest = 8 * (4 * width**2 + 64 * width + 2 * width + config.n_shared_experts * expert) + width + 256 * width
        sparsities.append((rest + 8 * 64 * expert) / (rest + 8 * 2 * expert))
        assert config.sparsity == pytest.approx(sparsities[-1], rel=1e-12)
    assert sparsities == pytest.approx([7.553, 8.328], abs=1e-3)
    for limits in (Limits(sizes=configs, max_sparsity=64), Limits(sizes=configs)):
        found = decide(fitted, 1e18, limits=limits, tokens_per_param=20)
        number = configs.index(found.config)
        assert found.sparsity == pytest.approx(sparsities[number], rel=1e-12)
        assert found.forecast is not None
        assert found.forecast.columns == {"sparsity": found.sparsity}
        expected = fitted.best_law.loss(found.n_params, found.n_tokens, sparsity=sparsities[number])
        assert found.loss == pytest.approx(float(expected), rel=1e-12)
    most = (sparsities[0] + sparsities[1]) / 2
    assert decide(fitted, 1e18, limits=Limits(sizes=configs, max_sparsity=most), tokens_per_param=20).config == base
    with pytest.raises(ScalingError):
        decide(fitted, 1e18, limits=Limits(sizes=configs, max_sparsity=2), tokens_per_param=20)


@pytest.mark.parametrize(
    ("sizes", "columns", "match"),
    [
        ([shape(1e9, 4.0), shape(2e9, None)], {}, "sparsity"),
        ([1e9, shape(2e9, 1.0)], {}, "sparsity"),
        ([shape(1e9, 0.25)], {}, r"sparsity.*0\.25"),
        ([shape(1e9, np.nan)], {}, "sparsity.*nan"),
        ([shape(1e9, 4.0)], {"sparsity": 8.0}, r"sparsity.*8\.0.*4\.0"),
        ([1e9], {"sparsity": 128.0}, r"sparsity.*64.*128\.0"),
    ],
)
def test_sizes_that_contradict_the_sparsity_are_refused(
    sizes: list[object], columns: dict[str, float], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        decide(PLANTED, 1e20, limits=Limits(sizes=sizes, max_sparsity=64), **columns)


def test_sizes_that_state_no_sparsity_or_the_given_one_are_kept() -> None:
    assert decide(PLANTED, 1e20, limits=Limits(sizes=[3e8, 6e8], max_sparsity=64)).sparsity == 64
    kept = [shape(3e8, 8.0), shape(3e8, None)]
    assert decide(PLANTED, 1e20, sparsity=8.0, limits=Limits(sizes=kept)).config == kept[0]
    dense = decide(Law.from_dict(DENSE), 1e20, limits=Limits(sizes=[shape(3e8, 0.25), shape(3e8, 4.0)]))
    assert (dense.sparsity, dense.config.sparsity, len(dense.near)) == (None, 0.25, 1)


DENSE = {
    "form": "chinchilla",
    "parameters": {"E": 1.7, "A": 400.0, "B": 2000.0, "alpha": 0.34, "beta": 0.37},
    "n_params_convention": "total",
    "loss_unit": "nats per token",
}


def test_next_runs_have_a_sparsity_and_bring_support(fitted: ScalingFit) -> None:
    found = next_runs(fitted, 3e9, 1e11, affordable_flops=6e20, sparsity=128.0)
    assert found.now.columns == {"sparsity": 128.0}
    assert not found.now.supported
    assert (found.runs["sparsity"].iloc[:2] >= 128.0 / 1.25).all()
    assert found.reasons == ()
    assert found.cost_flops <= 6e20
    assert found.width_then < found.width_now


def test_backtest_along_the_sparsity() -> None:
    found = backtest(
        ladder(0.002),
        n_params_convention="active",
        loss_unit="nats",
        forms=MixtureOfExperts(),
        along="sparsity",
        cuts=[2],
    )
    forecast = found.predictions[found.predictions["method"] == "forecast"]
    assert (forecast["sparsity"] == 64.0).all()
    assert len(forecast) == 15
    assert (forecast["reasons"].str.contains("sparsity")).all()
    assert found.table().set_index("method").loc["forecast", "mean_error"] < 1.5
    with pytest.raises(ValueError, match=r"along.*got 'experts'"):
        backtest(ladder(), n_params_convention="active", forms=MixtureOfExperts(), along="experts")


def test_the_problem_is_of_three_counts() -> None:
    rows = {name: column.to_numpy() for name, column in ladder().items() if name != "loss"}
    problem = ExpertPowers.at(rows, np.log(ladder()["loss"].to_numpy()))
    assert problem.centre[2] - problem.centre[0] == pytest.approx(np.log(SPARSITIES).mean())


@pytest.mark.parametrize("router", quick_and_soak(routed_law.ROUTERS, "S-Base"))
def test_public_runs_held_out_are_forecast_better_than_by_published_forms(router: str, public_tables: object) -> None:
    """Largest size, and the two largest numbers of experts: our error is below the dense form's and below Clark et al.'s."""
    runs = routed_law.ladder(router)
    splits = [(name, out) for name, out in routed_law.held_out(runs) if name in ("size 370M", "experts, two most")]
    found = pd.concat([routed_law.errors_of(runs, name, out) for name, out in splits])
    table = found[["forecast", *routed_law.RIVALS]].abs().mean()
    assert table["forecast"] < 0.0105
    for rival in routed_law.RIVALS:
        assert table["forecast"] < table[rival]
    assert 0.75 <= found["inside"].mean() <= 1
