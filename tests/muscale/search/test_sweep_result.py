"""What a sweep shows of planted losses: the optimum, what matters, the front, how sure it is, and what it warns of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from muscale import StageError, StudyConfig
from muscale.pages.search_sections import _trials
from muscale.search.rung_optima import RungOptima, for_horizon
from muscale.search.sweep_result import SweepResult
from proxy_models.architecture.config import ModelConfig
from proxy_models.training.numerics import Numerics
from search_spaces import Choice, LogUniform, Ordinal, Simplex, Space, Uniform

Search = Callable[..., SweepResult]
Planted = Callable[..., Any]
POPULATION = ("sweep.scheduler=pbt", "sweep.trials=8")


def test_the_interval_of_each_length_s_optimum_contains_the_planted_one(search: Search) -> None:
    result = search()
    rates = result.optima.query("hyperparameter == 'learning_rate'")
    assert rates["n_tokens"].tolist() == [1000, 2000, 4000, 8000]
    for rung, row in enumerate(rates.to_dict("records")):
        planted = 0.01 * 2 ** (-0.3 * (rung - 3))
        assert row["low"] < planted < row["high"]
        assert row["best"] == pytest.approx(planted, rel=0.2)
        assert row["status"] == "ok"
    assert rates["n_runs"].tolist() == result.annealed.groupby("n_tokens").size().tolist()
    readout = result.optima.query("hyperparameter == 'zero_readout'")
    assert (readout["probability"] > 0.5).all()
    assert not readout["best"].any()
    text = str(result)
    # Whether the winner lies within the optimum's interval hangs on the draws, and they on the machine's rounding.
    assert all("the winner" in warning for warning in result.warnings)
    assert "fitted optimum at 8,000 tokens" in text
    assert result.finalists is not None
    assert result.finalists.sentence in text


def test_the_page_says_how_long_the_run_was_whose_annealed_loss_it_shows(search: Search) -> None:
    result = search()
    shown = _trials(result).set_index("trial")["annealed at"].dropna().to_dict()
    assert shown == result.annealed.dropna(subset="loss").groupby("trial")["n_tokens"].max().to_dict()
    assert len(set(shown.values())) > 1


@pytest.mark.parametrize("diverges", [True, False])
def test_no_winner_is_clear_where_every_trial_diverged_at_the_last_rung(
    search: Search, planted: Planted, monkeypatch: pytest.MonkeyPatch, *, diverges: bool
) -> None:
    losses = planted()
    stable = type(losses).stable
    if diverges:
        monkeypatch.setattr(
            type(losses), "stable", lambda self, job, rung: stable(self, job, rung) if rung < 3 else None
        )
    result = search(losses=losses)
    at_the_winner_s = result.annealed.loc[result.annealed["trial"] == result.winner, "n_tokens"].max()
    assert at_the_winner_s == (4000 if diverges else 8000)
    # with their cooldowns
    assert len([note for note in result.notes if "4,608" in note and "9,472" in note]) == diverges
    assert result.finalists is not None
    assert (result.finalists.verdict == "not known") == diverges


def test_tables_say_what_each_trial_had(search: Search) -> None:
    result = search()
    trials = result.trials.set_index("trial")
    assert trials["round"].eq(0).all()
    assert result.finalists is not None
    assert (trials.loc[result.finalists.trials.index, "seeds"] == 4).all()
    assert trials.loc[trials["n_tokens"] == 0, "seeds"].eq(0).all()
    front = result.front()
    assert front["loss"].is_monotonic_decreasing
    assert front["cost_flops"].is_monotonic_increasing
    assert set(front["trial"]) == set(trials.index[trials["on_front"]])
    n_params = front["cost_flops"].iloc[0] / 6 / front["n_tokens"].iloc[0]
    np.testing.assert_allclose(result.annealed["cost_flops"], 6 * n_params * result.annealed["n_tokens"])
    # A stem's rung takes 36 seconds here, whatever its length.
    np.testing.assert_allclose(result.annealed["cost_seconds"], 36 * (result.annealed["rung"] + 1))
    arrived = result.rungs
    assert arrived["spent_seconds"].iloc[-1] == 36 * len(arrived)
    assert (arrived["parent"] == arrived["trial"].where(arrived["rung"] > 0, -1)).all()
    completed = trials[trials["status"] == "completed"]
    np.testing.assert_allclose(completed["expected_loss"], completed["loss_at_8000"])
    assert trials.loc[trials["status"] == "diverged", "expected_loss"].isna().all()


def test_importance_finds_what_was_planted_or_names_what_is_missing(search: Search) -> None:
    found = search("sweep.trials=48").importance()
    assert found.table.index.tolist() == ["learning_rate", "init_scale", "zero_readout"]
    assert found.significant[0] == "learning_rate"
    few = search("sweep.trials=6", "sweep.seed=1")
    with pytest.raises(StageError, match=r"no importance .* \d finished trials .* 6 coeff"):
        few.importance()
    assert "finished trials can" in few._repr_html_()


def test_everything_is_in_json_and_in_the_notebook_repr(search: Search) -> None:
    result = search("sweep.trials=12", "sweep.rungs=2")
    dumped = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [row["trial"] for row in dumped["trials"]] == result.trials["trial"].tolist()
    assert len(dumped["optima"]) == len(result.optima)
    assert len(dumped["front"]) == len(result.front())
    assert dumped["finalists"]["winner"] == dumped["winner"] == result.winner
    winner = result.trials.iloc[result.trials["trial"].tolist().index(result.winner)]
    assert (
        f"values      learning_rate {winner['learning_rate']:.4g}, "
        f"init_scale {winner['init_scale']:.4g}, zero_readout {winner['zero_readout']}\n"
    ) in str(result)
    shown = result._repr_html_()
    for part in ("best with probability", "importance", "<table", "annealed_loss"):
        assert part in shown


def test_a_near_tie_and_fewer_seeds_than_asked_raise_warnings(search: Search, planted: Planted) -> None:
    tie = search(losses=planted(noise=0.03))
    assert tie.finalists is not None
    assert tie.finalists.verdict == "near-tie"
    assert any(warning.startswith("a near-tie: trial") for warning in tie.warnings)
    fewer = search(repeats=2)
    assert sum("over 2 of the 3 seeds that sweep.n_seeds asks for" in warning for warning in fewer.notes) == 3
    never = search(repeats=0)
    assert never.finalists is None
    assert "sweep.n_seeds asks for 3 more" in never.notes[0]
    stopped = search("sweep.max_tokens=60000", "sweep.n_seeds=0")
    begun = len(stopped.trials)
    assert 1 < begun < 32
    assert stopped.notes[0].startswith(f"{begun} of 32 ")
    assert "sweep.max_tokens = 60000" in stopped.notes[0]
    with pytest.raises(StageError, match="sweep.n_seeds"):
        never.plot_finalists()


def test_an_optimum_at_a_bound_and_another_schedule_raise_warnings(search: Search, planted: Planted) -> None:
    beyond = search("sweep.schedule=wsd_linear", losses=planted(rate=1e-4, exponent=0))
    longest = beyond.fitted.longest().set_index("hyperparameter")
    assert longest["n_tokens"].eq(8000).all()
    assert longest.loc["learning_rate", "status"] == "edge"
    assert longest.loc["learning_rate", "best"] == pytest.approx(0.001, rel=1e-2)
    assert any("widen sweep.space.learning_rate (0.001 … 0.1)" in warning for warning in beyond.warnings)
    assert "searched under schedule wsd_linear, but the full run follows wsd" in beyond.warnings[0]


def test_a_winner_far_from_the_fitted_optimum_raises_a_warning() -> None:
    """Rates 2^-10 to 2^-3, and the run at the worst of them was lucky by 30 %."""
    space = Space({"learning_rate": LogUniform(low=2.0**-10, high=2.0**-3)})
    octaves = np.linspace(-9.5, -3.5, 13)
    loss = 2 * np.exp(0.02 * (octaves + 6) ** 2)
    fitted = RungOptima(runs=pd.DataFrame({"learning_rate": 2.0**octaves, "n_tokens": 1000, "loss": loss}), space=space)
    assert not fitted.misses({"learning_rate": 2.0**-6}, 1000)
    (miss,) = fitted.misses({"learning_rate": 2.0**-9.5}, 1000)
    assert miss.startswith("learning_rate 0.001381 against 0.0156")


def test_every_kind_of_hyperparameter_has_its_optimum_and_inactive_ones_none() -> None:
    space = Space.from_dict(
        {
            "learning_rate": {"distribution": "log_uniform", "low": 1e-3, "high": 1e-1},
            "width": {"distribution": "ordinal", "values": [32, 64, 128, 256]},
            "optimizer": {"distribution": "choice", "values": ["adamw", "lion"]},
            "beta1": {"distribution": "uniform", "low": 0.8, "high": 0.99, "when": {"optimizer": ["lion"]}},
            "mixture": {"distribution": "simplex", "parts": ["a", "b"]},
        }
    )
    assert {type(space[name]) for name in ("width", "optimizer", "mixture")} == {Ordinal, Choice, Simplex}
    rows = [
        {
            **config,
            "n_tokens": 1000,
            "loss": 2
            * math.exp(
                0.02 * math.log2(config["learning_rate"] / 0.01) ** 2  # type: ignore[operator]
                + 0.02 * abs([32, 64, 128, 256].index(config["width"]) - 2)  # type: ignore[arg-type]
                + 0.02 * (config["optimizer"] == "lion")
            ),
        }
        for config in space.sample(40, 0)
    ]
    fitted = RungOptima(runs=pd.DataFrame(rows), space=space)
    table = fitted.table.set_index("hyperparameter")
    assert table.index.tolist() == ["learning_rate", "width", "optimizer", "mixture"]
    assert table.loc["width", "best"] == 128
    assert table.loc["width", "low"] in (32, 64, 128)
    assert table.loc["optimizer", "best"] == "adamw"
    assert fitted.rates()["log2_rate"].tolist() == [pytest.approx(math.log2(0.01), abs=0.4)]


def test_too_few_runs_have_no_optimum(search: Search) -> None:
    result = search("sweep.trials=1")
    assert result.optima.empty
    assert "fitted optimum" not in str(result)


def test_the_noise_of_other_seeds_is_used_and_never_moves_the_winner(search: Search) -> None:
    alone = search()
    config = {"learning_rate": 0.01, "init_scale": 1.0, "zero_readout": True}
    assert alone.finalists is not None
    runs = pd.DataFrame([other_run(alone.best, seed, **config) for seed in range(5)])
    informed = search(runs=runs)
    assert informed.finalists is not None
    assert informed.winner == alone.winner
    assert informed.finalists.dof == alone.finalists.dof + 4
    foreign = search(runs=runs.assign(purpose="sweep"))
    assert foreign.finalists is not None
    assert foreign.finalists.dof == alone.finalists.dof, "the sweep's own repeats are in the comparison already"


def numerics_of(seed: int) -> Numerics:
    model = ModelConfig(d_model=32, n_layers=1, context_length=32)
    return Numerics(model=model, base=model, corpus_key="c", seed=seed, evaluation_tokens=1)


def other_run(best: Any, seed: int, **config: Any) -> dict[str, Any]:
    return {
        "purpose": "transfer",
        "hyperparameters": json.loads(json.dumps({**best.to_dict(), **config})),
        "numerics": json.loads(json.dumps(numerics_of(seed).to_dict())),
        "segment": {"recipe": {"rate": config["learning_rate"]}},
        "n_tokens": 8000,
        "seed": seed,
        "loss": 2.5 * math.exp(0.002 * (-1) ** seed),
    }


def test_the_rungs_optima_feed_the_horizon_law_where_they_may(search: Search, make_study: Callable[..., Path]) -> None:
    result = search()

    def optima_of(name: str, *overrides: str) -> pd.DataFrame:
        return for_horizon(result.fitted, StudyConfig.read(make_study(name), overrides), numerics_of(0))

    optima = optima_of("all", "transfer.horizons=[0.125, 1.0]")
    assert optima["n_tokens"].tolist() == [1000, 2000, 4000, 8000]
    assert np.polyfit(np.arange(4), optima["log2_rate"], 1)[0] == pytest.approx(-0.3, abs=0.1)
    assert optima_of("half", "transfer.horizons=[0.5, 1.0]")["n_tokens"].tolist() == [4000, 8000]
    assert optima_of("last", "transfer.horizons=[1.0]").empty
    assert optima_of("other", "sweep.schedule=wsd_linear").empty
    by_fraction = replace(numerics_of(0), stages_by_fraction=True)
    assert for_horizon(result.fitted, StudyConfig.read(make_study("stages")), by_fraction).empty


@pytest.mark.parametrize("scale", ["log_uniform", "uniform", "ordinal"])
def test_the_best_rates_are_in_octaves_on_whatever_scale_they_were_searched(scale: str) -> None:
    listed = tuple(0.001 * 2**n for n in range(8))
    rate = {
        "log_uniform": LogUniform(low=0.001, high=0.128),
        "uniform": Uniform(low=0.001, high=0.04),
        "ordinal": Ordinal(values=listed),
    }[scale]
    space = Space({"learning_rate": rate})
    configs = space.grid(16) * 2
    octaves = np.log2([float(config["learning_rate"]) for config in configs]) - math.log2(0.012)  # type: ignore[arg-type]
    luck = np.random.default_rng(0).standard_normal(len(configs)) * 0.002
    runs = pd.DataFrame(configs).assign(n_tokens=8000, loss=3 * np.exp(0.03 * octaves**2 + luck))
    (found,) = RungOptima(runs=runs, space=space).rates().to_dict("records")
    assert found["log2_rate"] == pytest.approx(math.log2(0.012), abs=0.25)
    assert 0.01 < found["stderr"] < 0.3


def test_a_categorical_rate_does_not_enter_the_horizon_law(search: Search) -> None:
    choice = '{distribution="choice", values=[0.002, 0.005, 0.01, 0.02, 0.05]}'
    result = search(f"sweep.space.learning_rate={choice}")
    assert (result.optima["hyperparameter"] == "learning_rate").any()
    assert result.fitted.rates().empty


def test_a_cost_aware_winner_needs_no_known_noise(search: Search) -> None:
    result = search("sweep.cost_weight=0.001", "sweep.n_seeds=1", repeats=1)
    assert result.finalists is not None
    assert result.finalists.verdict == "not known"
    assert result.winner in result.finalists.trials.index


def test_a_cost_aware_winner_is_not_in_a_near_tie_with_itself(search: Search, planted: Planted) -> None:
    result = search(losses=planted(noise=0.03))
    assert result.finalists is not None
    tied = (result.finalists.winner, *result.finalists.near_tie)
    assert len(tied) > 1
    for winner in tied:
        (warning,) = [w for w in replace(result, winner=winner).warnings if "near-tie" in w]
        others = ", ".join(str(trial) for trial in tied if trial != winner)
        assert warning.startswith(f"a near-tie: trial {winner} is indistinguishable from trial {others} over 3 seeds")


def test_without_an_annealed_end_there_is_no_result(search: Search, planted: Planted) -> None:
    with pytest.raises(StageError, match="32 of 32 trials diverged"):
        search(losses=planted(diverges_above=0))


def test_a_member_that_diverged_and_then_copied_another_is_reported(search: Search, planted: Planted) -> None:
    result = search(*POPULATION, losses=planted(diverges_above=0.02))
    diverged = result.rungs[result.rungs["loss"].isna()]
    assert not diverged.empty
    assert set(diverged["trial"]) & set(result.copies["trial"])
    assert result.trials["expected_loss"].notna().any()


def test_a_population_has_neither_optima_nor_importance(search: Search) -> None:
    result = search(*POPULATION)
    assert result.optima.empty
    with pytest.raises(StageError, match="population"):
        result.importance()
    copied = result.rungs[(result.rungs["parent"] != result.rungs["trial"]) & (result.rungs["rung"] > 0)]
    copies = result.copies.sort_values(["trial", "rung"])
    assert [*zip(copies["trial"], copies["rung"] + 1, copies["donor"], strict=True)] == sorted(
        zip(copied["trial"], copied["rung"], copied["parent"], strict=True)
    )
