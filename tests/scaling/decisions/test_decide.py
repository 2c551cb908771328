"""Decisions: closed forms and published figures where they exist, brute force where they do not."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest

from scaling import (
    Budget,
    Decision,
    Form,
    Joint,
    Kaplan,
    Law,
    Limits,
    MemoryLimit,
    RepeatedData,
    ScalingError,
    ScalingFit,
    TiedChinchilla,
    decide,
    fit,
)
from scaling.presentation import span
from tests.scaling.decisions.conftest import HOFFMANN

LAWS = [
    HOFFMANN,
    TiedChinchilla().law(E=1.8, A=400, B=2000, alpha=0.35),
    Kaplan().law(A=8.8e13**0.076, B=5.4e13**0.095, alpha=0.076, beta=0.095),
    Joint().law(E=1.7, A=300, B=900, alpha=0.33, beta=0.33, g=0.7),
]


def brute(
    law: Law, budget: float, served: float = 0.0, most_tokens: float = math.inf, most_params: float = math.inf
) -> Any:
    """(N, D, loss) of the best of 400,001 sizes."""
    n = np.exp(np.linspace(math.log(1e6), math.log(1e13), 400_001))
    n = n[n <= most_params]
    d = np.minimum((budget / n - 2 * served) / 6, most_tokens)
    n, d = n[d > 1], d[d > 1]
    loss = law.loss(n, d)
    best = int(np.argmin(loss))
    return n[best], d[best], loss[best]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.form.name)
@pytest.mark.parametrize("flops", [1e19, 1e25])
def test_compute_alone_meets_the_closed_form(law: Law, flops: float) -> None:
    found, expected = decide(law, flops), law.allocate(flops)
    assert found.n_params == pytest.approx(expected.n_params, rel=2e-6)
    assert found.n_tokens == pytest.approx(expected.n_tokens, rel=2e-6)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.total_flops == pytest.approx(flops, rel=1e-12)


@pytest.mark.parametrize("law", LAWS[:2], ids=lambda law: law.form.name)
def test_least_compute_is_the_inverse_of_the_best_loss(law: Law) -> None:
    least = decide(law, loss=2.1)
    assert law.allocate(least.total_flops).loss == pytest.approx(2.1, rel=1e-10)
    assert decide(law, least.budget).loss == pytest.approx(2.1, rel=1e-10)
    assert least.target_loss == 2.1


def test_serving_moves_sizes_as_published() -> None:
    """Sardana et al. (2401.00448, fig. 1): with 2e12 tokens to serve, a 7B instead of the best-trained 13B saves 17 %."""
    flops = next(c for c in np.geomspace(1e22, 1e23, 2000) if HOFFMANN.allocate(c).n_params >= 13e9)
    thirteen = HOFFMANN.allocate(flops)
    found = decide(HOFFMANN, loss=thirteen.loss, served_tokens=2e12)
    saved = thirteen.compute_flops + 2 * thirteen.n_params * 2e12 - found.total_flops
    assert found.n_params == pytest.approx(7e9, rel=0.01)
    assert saved == pytest.approx(1.7e22, rel=0.02)
    assert saved / (saved + found.total_flops) == pytest.approx(0.17, abs=0.005)
    assert found.serving_flops == pytest.approx(2 * found.n_params * 2e12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.form.name)
@pytest.mark.parametrize(
    ("served", "tokens", "params"),
    [(1e12, math.inf, math.inf), (0, 2e11, math.inf), (0, math.inf, 3e9), (3e11, 1e11, 2e10)],
)
def test_every_limit_meets_brute_force(law: Law, served: float, tokens: float, params: float) -> None:
    given = [] if params == math.inf else [params]
    memory = [MemoryLimit(what="serving", memory_bytes=most, bytes_per_param=1, share=1) for most in given]
    limits = Limits(unique_tokens=None if tokens == math.inf else tokens, memory=memory)
    found = decide(law, 1e23, served_tokens=served, limits=limits)
    n_params, n_tokens, loss = brute(law, 1e23, served, tokens, params)
    assert found.loss <= loss * (1 + 1e-12)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.n_params == pytest.approx(n_params, rel=1e-3)
    assert found.n_tokens == pytest.approx(n_tokens, rel=1e-3)
    assert found.total_flops <= 1e23 * (1 + 1e-9)


def test_serving_dearer_than_training_counts_as_more_tokens() -> None:
    dear = decide(HOFFMANN, 1e23, served_tokens=1e11, serving_price=4)
    assert dear.n_params == pytest.approx(decide(HOFFMANN, 1e23, served_tokens=4e11).n_params, rel=1e-6)
    assert dear.serving_flops == pytest.approx(8 * dear.n_params * 1e11)


def test_ends_of_the_band_lose_what_was_tolerated() -> None:
    found = decide(HOFFMANN, 1e23, tolerance=0.01)
    low, best, high = found.near["n_params"]
    assert low < best < high
    assert best == pytest.approx(found.n_params)
    for end in (low, high):
        assert HOFFMANN.loss(end, 1e23 / 6 / end) == pytest.approx(1.01 * found.loss, rel=1e-9)
    assert found.near["loss_above_best"].tolist() == pytest.approx([0.01, 0, 0.01], abs=1e-9)
    limited = decide(
        HOFFMANN,
        1e23,
        limits=Limits(memory=[MemoryLimit(what="training", memory_bytes=1e10, bytes_per_param=1, share=1)]),
    )
    assert limited.near["n_params"].max() == pytest.approx(limited.n_params)
    assert limited.limits[0].startswith("memory of training: at most 1e+10 parameters")


@dataclass(frozen=True)
class Config:
    n_params: float
    depth: int


def test_shapes_that_can_be_built() -> None:
    configs = [Config(1e9, 16), Config(7e9, 32), Config(2e10, 48), Config(7e10, 80)]
    found = decide(HOFFMANN, 1e23, tolerance=0.02, limits=Limits(sizes=configs))
    losses = [HOFFMANN.loss(c.n_params, 1e23 / 6 / c.n_params) for c in configs]
    assert found.config is configs[int(np.argmin(losses))]
    assert found.n_params == found.config.n_params
    near = [c.n_params for c, loss in zip(configs, losses, strict=True) if loss <= 1.02 * min(losses)]
    assert found.near["n_params"].tolist() == near
    assert "depth=48" in str(found)
    within = decide(HOFFMANN, 1e23, limits=Limits(sizes=configs, memory=[MemoryLimit.serving("H100 SXM", share=0.2)]))
    assert within.n_params == 7e9
    assert decide(HOFFMANN, loss=2.2, limits=Limits(sizes=[1e9, 7e9])).n_params == 7e9


class Repeats(Form):
    """A law that knows repeats: a token seen again counts for less, as exponentially as in Muennighoff et al. 2305.16264."""

    name, formula, source = "repeats", "E + A/N^alpha + B/D'^beta", "2305.16264, eq. 5, for D alone"
    columns = ("n_params", "n_tokens", "unique_tokens")
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = dict.fromkeys(
        ("E", "A", "B", "alpha", "beta", "half"), (1e-6, 1e6)
    )

    def loss(self, values: Mapping[str, Any], rows: Mapping[str, Any]) -> Any:
        unique = rows["unique_tokens"]
        repeats = rows["n_tokens"] / unique - 1
        worth = unique * (1 + values["half"] * (1 - np.exp(-repeats / values["half"])))
        return values["E"] + values["A"] * rows["n_params"] ** -values["alpha"] + values["B"] * worth ** -values["beta"]


def test_repeated_data_where_the_law_knows_of_it() -> None:
    law = Repeats().law(E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283, half=15.4)
    plenty, scarce = decide(law, 1e23), decide(law, 1e23, limits=Limits(unique_tokens=1e11))
    assert plenty.n_params == pytest.approx(HOFFMANN.allocate(1e23).n_params, rel=1e-5)
    assert scarce.n_tokens > 1e11, "the law pays for some repeats"
    once = decide(HOFFMANN, 1e23, limits=Limits(unique_tokens=1e11))
    assert plenty.loss < scarce.loss < once.loss
    n = np.exp(np.linspace(math.log(1e9), math.log(1e12), 100_001))
    assert scarce.loss == pytest.approx(law.loss(n, 1e23 / 6 / n, unique_tokens=1e11).min(), rel=1e-8)
    twice = decide(law, 1e23, limits=Limits(unique_tokens=1e11, max_epochs=2))
    assert twice.n_tokens == pytest.approx(2e11)
    assert twice.epochs == pytest.approx(2)
    assert "2 epochs of 1e+11 unique tokens" in str(twice)
    assert twice.limits == ("data: all 1e+11 unique tokens are used, 2 times each",)
    with pytest.raises(ValueError, match="max_epochs .*got chinchilla"):
        decide(HOFFMANN, 1e23, limits=Limits(unique_tokens=1e11, max_epochs=4))


def test_dollars_and_deadlines_are_budgets() -> None:
    budget = Budget.of_dollars(2e6, "H100 SXM", n_devices=1024)
    found = decide(HOFFMANN, budget, limits=Limits(unique_tokens=2e11))
    assert found.total_flops <= budget.compute_flops
    assert found.cost.dollars == pytest.approx(2e6, rel=1e-6)
    assert "no token is seen twice" in str(found)
    elsewhere = decide(HOFFMANN, loss=2.1).on("B200", n_devices=64)
    assert elsewhere.cost.days == pytest.approx(elsewhere.total_flops / (2250e12 * 0.4 * 64 * 86400))
    assert decide(HOFFMANN, Budget.of_days(30, "H100 SXM", 1024)).cost.days == pytest.approx(30)


def test_a_decision_and_its_forecast_are_of_one_mind(fitted: ScalingFit) -> None:
    found = decide(fitted, 1e21, level=0.8)
    forecast = fitted.forecast(found.n_params, found.n_tokens, 0.8)
    assert found.forecast == forecast
    assert found.loss == pytest.approx(forecast.loss, rel=1e-12)
    around = [math.log(fitted.forecast(n, 1e21 / 6 / n).loss) for n in found.n_params * np.array([0.8, 1, 1.25])]
    assert around[1] == min(around)
    assert found.intervals is not None
    assert found.intervals.loc["loss", ["low", "high"]].tolist() == [forecast.low, forecast.high]
    assert decide(fitted.law, 1e21).n_params == pytest.approx(fitted.law.allocate(1e21).n_params, rel=1e-5)


@pytest.mark.parametrize(
    ("limits", "got"), [({"sizes": [1, 3, 7]}, "1"), ({"sizes": [1e9, 7]}, "7"), ({"unique_tokens": 500}, "500")]
)
def test_sizes_and_tokens_in_millions_are_refused(limits: dict[str, Any], got: str) -> None:
    """Seven parameters, or 500 unique tokens, would be millions or billions; a thousand may be meant."""
    with pytest.raises(ValueError, match=f"{next(iter(limits))} .*got {got}"):
        Limits(**limits)
    assert Limits(sizes=[1000], unique_tokens=1000).unique_tokens == 1000


def test_a_deadline_binds_the_training_alone(fitted: ScalingFit) -> None:
    deadline = Budget.of_days(1, "H100 SXM", 8)
    budget = Budget.of_dollars(1e5, "A100 80GB")
    late = decide(fitted, budget, served_tokens=1e12, limits=Limits(deadline=deadline))
    assert late.training_flops == pytest.approx(deadline.compute_flops, rel=1e-6)
    assert late.serving_flops > 0
    assert late.limits
    assert "the deadline: 1 days of 8 × H100 SXM" in str(late)
    free = decide(fitted, budget, served_tokens=1e12)
    assert free.loss < late.loss
    assert free.tokens_per_param == free.n_tokens / free.n_params
    slack = decide(fitted, budget, served_tokens=1e12, limits=Limits(deadline=Budget.of_days(1e4, "H100 SXM", 8)))
    assert slack.limits == ()
    assert slack.loss == pytest.approx(free.loss, rel=1e-6)
    with pytest.raises(ScalingError, match="never reach 2.0500"):
        decide(fitted, loss=2.05, limits=Limits(deadline=deadline))


@pytest.mark.parametrize(
    "limits",
    [
        Limits(memory=[MemoryLimit.serving("L40S")]),
        Limits(unique_tokens=2e11),
        Limits(deadline=Budget(compute_flops=1e22)),
    ],
    ids=["memory", "data", "time"],
)
def test_a_stated_ratio_is_kept_within_every_limit(fitted: ScalingFit, limits: Limits) -> None:
    free = decide(fitted, 1e23, tokens_per_param=20)
    bound = decide(fitted, 1e23, tokens_per_param=20, limits=limits)
    assert bound.n_params < 0.9 * free.n_params
    assert (bound.tokens_per_param, free.tokens_per_param) == pytest.approx((20, 20))
    assert len(bound.limits) == 1


def test_a_law_of_repeats_decides_by_its_refits() -> None:
    rng = np.random.default_rng(0)
    size, ratio, epochs = (grid.ravel() for grid in np.meshgrid([1e7, 3e7, 1e8], [5.0, 20.0, 80.0], [1.0, 4.0, 16.0]))
    law = RepeatedData().law(E=1.9, A=500, B=1500, alpha=0.35, beta=0.35, rd_star=15.4, rn_star=5.3)
    runs = pd.DataFrame({"n_params": size, "n_tokens": size * ratio, "unique_tokens": size * ratio / epochs})
    runs["loss"] = law.loss(**runs) * np.exp(0.001 * rng.standard_normal(len(runs)))
    fitted = fit(runs, n_params_convention="total", form=RepeatedData(), n_bootstrap=20)
    found = decide(fitted, 1e21, level=0.8, limits=Limits(unique_tokens=1e9))
    refits = [
        decide(
            fitted.law.form.law(**dict(zip(fitted.law.parameters, map(float, draw), strict=True))),
            1e21,
            limits=Limits(unique_tokens=1e9),
        )
        for draw in fitted.draws
    ]
    assert found.forecast is None
    assert found.intervals is not None
    expected = np.quantile([refit.n_params for refit in refits], [0.1, 0.9], method="nearest")
    assert found.intervals.loc["n_params", ["low", "high"]].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert "epochs: the runs end at 16" in "; ".join(found.warnings)


def test_spending_on_a_plateau_raises_a_warning() -> None:
    law = Repeats().law(E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283, half=15.4)
    found = decide(law, 1e27, limits=Limits(unique_tokens=1e8))
    warnings = "; ".join(found.warnings)
    assert "worthless at 40" in warnings
    enough = float(re.findall(r"([\d.e+]+) FLOPs come within 0.50%", warnings)[0])
    assert decide(law, enough, limits=Limits(unique_tokens=1e8)).loss == pytest.approx(1.005 * found.loss, rel=1e-3)
    assert not decide(law, 1e22, limits=Limits(unique_tokens=1e12)).warnings
    assert "3.75e-05 tokens per parameter" in "; ".join(
        decide(HOFFMANN, 1e26, limits=Limits(unique_tokens=2.5e10)).warnings
    )
    dear = decide(law, 1e27, tolerance=0, limits=Limits(unique_tokens=1e8))
    assert not any("buys next to nothing" in warning for warning in dear.warnings), "no tolerance was given"
    shapes = decide(law, 1e27, limits=Limits(unique_tokens=1e8, sizes=[1e9, 1e10]))
    assert not any("buys next to nothing" in warning for warning in shapes.warnings)


def test_a_memory_that_is_large_enough_changes_nothing() -> None:
    large = decide(HOFFMANN, 1e21, limits=Limits(memory=[MemoryLimit.serving("A100 40GB")]))
    assert not large.limits
    assert large.n_params == pytest.approx(decide(HOFFMANN, 1e21).n_params, rel=1e-6)
    assert not any("memory" in assumption for assumption in decide(HOFFMANN, 1e21).assumptions)


def test_memory_holds_the_tables_of_a_size_that_states_them() -> None:
    @dataclass(frozen=True)
    class Size:
        n_params: float
        n_params_total: float

    slim, heavy = Size(1e9, 1.1e9), Size(2e9, 9e9)
    limits = Limits(sizes=[slim, heavy], memory=[MemoryLimit(what="serving", memory_bytes=4e9, bytes_per_param=1.0)])
    found = decide(HOFFMANN, 1e22, limits=limits)
    assert decide(HOFFMANN, 1e22, limits=Limits(sizes=[slim, heavy])).config is heavy
    assert (found.config, found.n_params_total) == (slim, 1.1e9)


def test_on_other_devices_the_old_price_is_not_shown(fitted: ScalingFit) -> None:
    moved = decide(fitted, Budget.of_dollars(1e5, "H100 SXM", n_devices=64)).on("A100 80GB")
    assert "H100" not in str(moved)
    assert moved.cost.days is not None


def test_decisions_say_everything(fitted: ScalingFit) -> None:
    budget = Budget.of_dollars(5e4, "A100 80GB", n_devices=64)
    found = decide(fitted, budget, served_tokens=1e11, limits=Limits(memory=[MemoryLimit.serving("A100 40GB")]))
    text = str(found)
    for words in (
        "$50,000 for A100 80GB",
        "parameters (total)",
        "N as in the law: total",
        "serving costs 2·N FLOPs for each of 1e+11 tokens",
        "90% interval",
        "other fits",
        "forecast",
        "decided by the mean of the forecast's fits",
        "memory of serving: at most 1.4e+10 parameters",
    ):
        assert words in text
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["n_params"] == found.n_params
    assert data["dollars"] == pytest.approx(5e4)
    assert found.tokens_per_param == found.n_tokens / found.n_params
    assert f"cost {found.cost.worth}, {found.serving_flops / found.total_flops:.0%} of it for serving" in re.sub(
        " +", " ", text
    )
    assert found.size_by_fit is not None
    assert f"would choose {span(found.size_by_fit.min(), found.size_by_fit.max())} parameters" in text
    assert f"({found.tokens_per_param:.4g} per parameter)\n" in text, "no shape was chosen among, so none is named"
    for flops, status in ((1e21, "supported"), (1e28, "unsupported: ")):
        assert f", {status}" in next(
            line for line in str(decide(fitted, flops)).splitlines() if line.startswith("forecast")
        )
    assert isinstance(found, Decision)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "budget or a loss"),
        ({"budget": 1e20, "loss": 2.0}, ValueError, "budget or a loss"),
        ({"budget": 0.0}, ValueError, "compute_flops .*got 0"),
        ({"loss": -1.0}, ValueError, "loss .*got -1"),
        ({"budget": 1e20, "served_tokens": -1}, ValueError, "served_tokens .*got -1"),
        ({"budget": 1e20, "serving_price": 0}, ValueError, "serving_price .*got 0"),
        ({"budget": 1e20, "unique_tokens": 0}, ValueError, "unique_tokens .*got 0"),
        ({"budget": 1e20, "level": 1}, ValueError, "level .*got 1"),
        ({"budget": 1e20, "sizes": []}, ValueError, "sizes must hold at least one size"),
        ({"budget": 1e20, "sizes": ["7B"]}, ValueError, "sizes .*got '7B'"),
        ({"budget": "a lot"}, ValueError, "budget .*got 'a lot'"),
        ({"budget": 5.0}, ScalingError, "one token of every size costs more than 5 FLOPs"),
        ({"budget": 1e20, "epochs": 2}, ValueError, "chinchilla .*got epochs"),
        ({"loss": 1.5}, ScalingError, "tend to a loss of 1.69.. under these limits and never reach 1.5000"),
        ({"loss": 1e9}, ScalingError, "reach 1000000000.0000 with less than 1,000,000 FLOPs: no law was fitted there"),
        ({"loss": 2.0, "unique_tokens": 1e10}, ScalingError, "under these limits and never reach 2.0000"),
        (
            {"budget": 1e20, "sizes": [1e9], "served_tokens": 1e12},
            ScalingError,
            "serving 1e.12 tokens alone costs more",
        ),
        (
            {"budget": 1e20, "sizes": [1e12], "memory": [MemoryLimit.serving("H100 SXM")]},
            ScalingError,
            r"sizes .* 2.8e\+10 .*got 1e\+12",
        ),
    ],
)
def test_errors_name_the_rule_and_the_value(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    limits = {name: value for name, value in arguments.items() if name in ("unique_tokens", "sizes", "memory")}
    others = {name: value for name, value in arguments.items() if name not in limits}
    with pytest.raises(error, match=message):
        decide(HOFFMANN, **others, limits=Limits(**limits))


def test_the_planted_law_is_named(planted: Law, ladder: Callable[..., pd.DataFrame]) -> None:
    exact = fit(ladder(), n_params_convention="total", n_bootstrap=10)
    assert decide(exact, 1e21).n_params == pytest.approx(planted.allocate(1e21).n_params, rel=3e-4)


def test_a_budget_beyond_all_computers_is_refused(planted: Law) -> None:
    with pytest.raises(ValueError, match=r"1e\+60"):
        decide(planted, 1e300)
