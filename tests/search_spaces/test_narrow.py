"""Narrowing keeps a planted optimum, cuts what is far from it, and cuts nothing by chance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from search_spaces import (
    Choice,
    Condition,
    Config,
    Constraint,
    Fixed,
    Integer,
    LogUniform,
    Narrowed,
    Ordinal,
    Prior,
    Simplex,
    Space,
    SpaceError,
    Uniform,
    Weights,
    narrow,
)
from search_spaces.cuts import _chance_of_range

SPACE = Space(
    {
        "learning_rate": LogUniform(low=2**-10, high=2**-4),
        "init_scale": LogUniform(low=0.25, high=4.0),
        "weight_decay_tau": LogUniform(low=0.05, high=5.0),
        "dropout": Uniform(low=0.0, high=1.0),
    }
)


def trials(space: Space, loss: Callable[[Any], Any], n: int, seed: int, noise: float = 0.003) -> pd.DataFrame:
    configs = space.sample(n, seed)
    errors = np.random.default_rng(seed).normal(scale=noise, size=n)
    return pd.DataFrame(configs).assign(loss=[loss(c) + e for c, e in zip(configs, errors, strict=True)])


def bowl(at: Config) -> Callable[[Config], float]:
    """A loss with its minimum at `at`, three times as steep towards large rates, divergent beyond 2.5 octaves."""

    def loss(config: Any) -> float:
        octaves = {name: math.log2(config[name] / at[name]) for name in list(SPACE)[:3]}
        if octaves["learning_rate"] > 2.5:
            return math.nan
        steep = 0.06 if octaves["learning_rate"] > 0 else 0.02
        return float(
            3
            + steep * octaves["learning_rate"] ** 2
            + 0.01 * octaves["init_scale"] ** 2
            + 0.02 * octaves["weight_decay_tau"] ** 2
            + 0.02 * (config["dropout"] - at["dropout"]) ** 2
        )

    return loss


MIDDLE: Config = {"learning_rate": 2**-7, "init_scale": 1.0, "weight_decay_tau": 0.5, "dropout": 0.5}
ASIDE: Config = {"learning_rate": 2**-9, "init_scale": 3.5, "weight_decay_tau": 3.0, "dropout": 0.9}


@pytest.mark.parametrize("optimum", [MIDDLE, ASIDE], ids=["middle", "aside"])
@pytest.mark.parametrize("n", [32, 64])
def test_a_planted_optimum_stays_in_95_percent_of_the_seeds(optimum: Config, n: int) -> None:
    narrowed = [narrow(SPACE, trials(SPACE, bowl(optimum), n, seed)) for seed in range(60)]
    # All four at once; 3 of 60 is 5 %.
    assert sum(not result.space.contains(optimum) for result in narrowed) <= 3
    if n == 64:
        widths = [width(result, "learning_rate") for result in narrowed]
        assert np.mean(widths) < 0.7


def width(result: Narrowed, name: str) -> float:
    """Length of the narrowed interval, of the whole of the former one."""
    smaller: Any = result.space[name]
    low, high = (SPACE[name].encode(end)[0] for end in (smaller.low, smaller.high))
    return high - low


def test_hardly_anything_is_cut_by_chance() -> None:
    cut = sum(narrow(SPACE, trials(SPACE, lambda _: 3.0, 64, seed)).space != SPACE for seed in range(100))
    # The level is 5 % for all together; 12 of 100 would be p < .004.
    assert cut <= 11


def test_more_and_again_narrows_further() -> None:
    first = narrow(SPACE, trials(SPACE, bowl(MIDDLE), 128, 0))
    again = narrow(first.space, trials(first.space, bowl(MIDDLE), 128, 1))
    assert width(again, "learning_rate") < width(first, "learning_rate") < 1
    assert again.space.contains(MIDDLE)


def test_the_best_trial_always_stays_and_few_trials_cut_nothing() -> None:
    for seed in range(20):
        results = trials(SPACE, bowl(ASIDE), 40, seed, noise=0.05)
        best = results.loc[results["loss"].idxmin()]
        assert narrow(SPACE, results).space.contains(best.drop("loss").to_dict())
        few = narrow(SPACE, results.head(6))
        assert few.space == SPACE
        assert set(few.table["action"]) == {"kept"}


def test_a_best_region_at_a_bound_is_flagged_and_the_bound_kept() -> None:
    beyond: Config = {**MIDDLE, "learning_rate": 2**-3.5}
    # Nothing diverges here: the best is just outside.
    results = trials(SPACE, bowl(beyond), 128, 0)
    result = narrow(SPACE, results)
    smaller: Any = result.space["learning_rate"]
    assert result.at_edge == ("learning_rate",)
    assert smaller.high == 2**-4
    assert smaller.low > 2**-10
    row = result.table.set_index("hyperparameter").loc["learning_rate"]
    assert "they reach the high bound, which is kept: search beyond it" in row["reason"]


def test_divergence_counts_as_worst_and_is_reported() -> None:
    space = Space({"learning_rate": LogUniform(low=1e-4, high=1)})
    results = trials(space, lambda c: math.nan if c["learning_rate"] > 0.02 else 3.0, 80, 0)
    result = narrow(space, results)
    diverged = int(results["loss"].isna().sum())
    assert result.n_diverged == diverged > 20
    smaller: Any = result.space["learning_rate"]
    assert 0.01 < smaller.high < 0.1


def test_a_dominated_choice_is_dropped_only_with_enough_trials() -> None:
    space = Space({"optimizer": Choice(values=("adamw", "lion", "sgd")), "x": Uniform(low=0, high=1)})

    def loss(config: Any) -> Any:
        return {"adamw": 3.0, "lion": 3.0, "sgd": 4.0}[config["optimizer"]] + 0.1 * abs(config["x"] - 0.5)

    assert narrow(space, trials(space, loss, 10, 0)).space["optimizer"] == space["optimizer"]
    result = narrow(space, trials(space, loss, 80, 0))
    assert result.space["optimizer"] == Choice(values=("adamw", "lion"))
    assert "sgd: none of its" in result.table["reason"][0]


def test_on_a_grid_the_neighbours_of_the_best_point_stay() -> None:
    space = Space({"rate": LogUniform(low=2**-10, high=2**-2), "scale": LogUniform(low=0.25, high=4.0)})
    results = pd.DataFrame(space.grid({"rate": 9, "scale": 9}))
    results["loss"] = 3 + np.round(np.log2(results["rate"]) + 6).abs() + 0.001 * np.log2(results["scale"]) ** 2
    smaller: Any = narrow(space, results).space["rate"]
    assert (smaller.low, smaller.high) != (2**-10, 2**-2)
    assert smaller.low <= 2**-7 * (1 + 1e-9)
    assert smaller.high >= 2**-5 * (1 - 1e-9)


def test_ranks_are_cut_to_ranks() -> None:
    betas = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
    space = Space({"beta2": Ordinal(values=betas)})
    result = narrow(space, trials(space, lambda config: 3 + abs(betas.index(config["beta2"]) - 1), 60, 0))
    assert result.space["beta2"] == Ordinal(values=betas[:4]), "the three of the best quarter, and the next"


def test_whole_numbers_are_cut_to_whole_numbers() -> None:
    space = Space({"n": Integer(low=1, high=100)})
    n = narrow(space, trials(space, lambda config: 3 + 0.01 * abs(config["n"] - 30), 60, 0)).space["n"]
    assert isinstance(n, Integer)
    assert 1 < n.low < 30 < n.high < 60


def test_a_simplex_s_lower_bounds_rise_and_keep_the_optimum() -> None:
    best = {"web": 0.7, "code": 0.2, "books": 0.1}
    space = Space({"mix": Simplex(parts=tuple(best), prior=Prior(centre=Weights(best), spread=0.7))})

    def loss(config: Any) -> Any:
        return 3 + sum((config["mix"][part] - weight) ** 2 for part, weight in best.items())

    results = [narrow(space, trials(space, loss, 64, seed)) for seed in range(20)]
    assert sum(not result.space.contains({"mix": best}) for result in results) <= 1
    raised: Any = results[0].space["mix"]
    assert 0.1 < raised.low["web"] < 0.7
    assert raised.prior == Prior(centre=Weights(best), spread=0.7)


def test_of_a_few_mixtures_the_next_to_the_best_stays() -> None:
    space = Space({"mix": Simplex(parts=("web", "code"))})
    weights = [weight for weight in (0.3, 0.5, 0.7) for _ in range(16)]
    luck = np.random.default_rng(0).random(len(weights)) * 1e-4
    rows = [
        {"mix": {"web": web, "code": 1 - web}, "loss": 3 + abs(web - 0.5) + x}
        for web, x in zip(weights, luck, strict=True)
    ]
    smaller: Any = narrow(space, pd.DataFrame(rows)).space["mix"]
    assert smaller.low == pytest.approx({"web": 0.3, "code": 0.3})


def test_the_chance_of_a_range_is_no_less_than_that_of_as_many_among_the_trials() -> None:
    n, m = 48, 12
    for k in range(m, n + 1):
        # Sets of m among n in a row that span at most k of them: by their first, or all in the last k.
        exact = ((n - k) * math.comb(k - 1, m - 1) + math.comb(k, m)) / math.comb(n, m)
        assert _chance_of_range(m, k / n) >= exact * (1 - 1e-12)


@pytest.mark.parametrize(
    ("wide", "best"),
    [
        (LogUniform(low=1e-5, high=1e-1, prior=Prior(centre=1e-3, spread=13_000)), 1e-3),
        (Integer(low=1, high=1000, prior=Prior(centre=500, spread=900_000)), 500),
        (Ordinal(values=tuple(range(20)), prior=Prior(centre=10, spread=19_000)), 10),
    ],
    ids=["log_uniform", "integer", "ordinal"],
)
def test_a_prior_that_is_flat_over_what_is_left_goes(wide: Any, best: float) -> None:
    space = Space({"x": wide})
    result = narrow(space, trials(space, lambda config: 3 + abs(config["x"] - best), 400, 0))
    assert result.space["x"].prior is None
    assert result.space["x"] != space["x"]
    assert "the prior was dropped" in result.table["reason"][0]


@pytest.mark.parametrize(
    ("loss", "reason"),
    [(3.0, "all 5 trials count as the best: too few, or equal"), (math.nan, "all 5 trials diverged")],
    ids=["equal", "diverged"],
)
def test_where_nothing_can_be_narrowed_the_reason_is_given(loss: float, reason: str) -> None:
    x = Uniform(low=0, high=1, when=Condition.from_dict({"kind": ["a"]}))
    space = Space({"kind": Choice(values=("a", "b")), "x": x})
    results = pd.DataFrame({"kind": ["a"] * 5 + ["b"] * 35, "x": [*np.linspace(0, 1, 5), *[math.nan] * 35]})
    table = narrow(space, results.assign(loss=[loss] * 5 + [3.0 + i for i in range(35)])).table.set_index(
        "hyperparameter"
    )
    assert (table.loc["x", "action"], table.loc["x", "reason"]) == ("kept", reason)


def test_what_needs_a_number_beyond_the_narrowed_range_goes() -> None:
    deep = Uniform(low=0, high=1, when=Condition.from_dict({"n": {"low": 60}}))
    space = Space({"n": Integer(low=1, high=100), "x": deep})
    result = narrow(space, trials(space, lambda config: 3 + 0.01 * abs(config["n"] - 20), 200, 0))
    assert set(result.space) == {"n"}
    assert result.table["action"].tolist() == ["cut", "dropped"]


@pytest.fixture
def conditional() -> Space:
    return Space(
        {
            "optimizer": Choice(values=("adamw", "sgd")),
            "beta1": Uniform(low=0.5, high=0.99, when=Condition.from_dict({"optimizer": ["adamw"]})),
            "momentum": Uniform(low=0.0, high=1.0, when=Condition.from_dict({"optimizer": ["sgd"]})),
            "rate": LogUniform(low=1e-4, high=1, prior=Prior(centre=0.5, spread=2)),
            "n": Integer(low=1, high=4),
            "seed": Fixed(value=0),
        },
        {
            "order": Constraint(rule="at_most", names=("rate", "n")),
            "gone": Constraint(rule="less", names=("momentum", "n")),
        },
    )


def test_conditions_priors_and_constraints_stay_and_what_can_t_be_goes(conditional: Space) -> None:
    def loss(config: Any) -> float:
        steps = math.log10(config["rate"] / 1e-3) ** 2 + 5 * (config.get("beta1", 0.9) - 0.9) ** 2
        return float(3 + 0.1 * steps + (config["optimizer"] == "sgd"))

    results = trials(conditional, loss, 160, 0).drop(columns="seed")
    assert results["beta1"].isna().any(), "inactive cells are empty"
    result = narrow(conditional, results)
    assert result.n_left_out == 0
    assert result.space["optimizer"] == Fixed(value="adamw")
    assert result.space["beta1"].when == Condition.from_dict({"optimizer": ["adamw"]})
    assert "momentum" not in result.space
    assert set(result.space.constraints) == {"order"}
    rate: Any = result.space["rate"]
    assert rate.high < 0.5
    assert rate.prior == Prior(centre=rate.high, spread=2)
    actions = dict(zip(result.table["hyperparameter"], result.table["action"], strict=True))
    assert (actions["optimizer"], actions["rate"], actions["momentum"], actions["seed"]) == (
        "cut",
        "cut",
        "dropped",
        "kept",
    )
    assert all(map(result.space.contains, result.space.sample(50, seed=0)))


def test_numbers_that_an_empty_cell_made_real_are_whole_again() -> None:
    when = Condition.from_dict({"deep": [True]})
    space = Space({"deep": Choice(values=(True, False)), "n": Integer(low=1, high=9, when=when)})
    results = pd.DataFrame({"deep": [True, False, True], "n": [3.0, math.nan, 4.0], "loss": [3.0, 3.1, 3.2]})
    result = narrow(space, results)
    assert (result.n_trials, result.n_left_out) == (3, 0)


def test_trials_outside_the_space_are_left_out_and_counted() -> None:
    results = trials(SPACE, bowl(MIDDLE), 30, 0)
    results.loc[:4, "learning_rate"] = 1.0
    result = narrow(SPACE, results)
    assert (result.n_trials, result.n_left_out) == (25, 5)
    assert str(result).startswith("25 trials, ")


def test_the_result_has_a_readable_str() -> None:
    result = narrow(SPACE, trials(SPACE, bowl(MIDDLE), 128, 0))
    assert list(result.table["hyperparameter"]) == list(SPACE)
    row = result.table.iloc[0]
    assert (row["action"], row["before"], row["trials"], row["best"]) == ("cut", "0.000976562 … 0.0625", 128, 32)
    assert row["after"] == str(result.space["learning_rate"])
    assert "<table" in result._repr_html_()
    table = json.loads(json.dumps(result.to_dict()))
    assert Space.from_dict(table["space"]) == result.space


def test_results_without_a_column_or_a_loss_are_refused() -> None:
    results = trials(SPACE, bowl(MIDDLE), 10, 0)
    with pytest.raises(SpaceError, match="need columns dropout$"):
        narrow(SPACE, results.drop(columns="dropout"))
    with pytest.raises(SpaceError, match="need columns loss$"):
        narrow(SPACE, results.drop(columns="loss"))
    with pytest.raises(SpaceError, match="10 trials, 10 inside"):
        narrow(SPACE, results.assign(loss=math.nan))
