"""The law of a task's score on one ladder: its choice by held-out runs, its forecast, and scores without enough signal."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from scaling import Law, ScalingError, TaskLaw, fit_task
from scaling.downstream.falling_score import inflation_of
from scaling.downstream.signal import ends_and_checkpoints

Ladder = Callable[..., pd.DataFrame]
SHARES = (0.25, 0.5, 0.7, 0.85, 1.0)


def accuracy(loss: Any, middle: float = 2.8) -> Any:
    return 0.25 + 0.65 * expit((middle - loss) / 0.25)


def evaluated(
    runs: pd.DataFrame, planted: Law, *, middle: float = 2.8, noise: float = 0.005, seed: int = 0
) -> pd.DataFrame:
    """Five evaluations of each run; losses of checkpoints lie 5 % above the law, since they are not annealed."""
    rng = np.random.default_rng(seed)
    tables = []
    for share in SHARES:
        above = 1.0 if share == 1 else 1.05
        loss = above * runs["loss"] * planted.loss(runs["n_params"], share * runs["n_tokens"])
        loss = loss / planted.loss(runs["n_params"], runs["n_tokens"]) * np.exp(0.001 * rng.standard_normal(len(runs)))
        score = np.clip(accuracy(loss, middle) + noise * rng.standard_normal(len(runs)), 0, 1)
        of = {"tokens": share * runs["n_tokens"], "task_loss": loss, "accuracy": score, "run": runs.index}
        tables.append(runs[["n_params", "n_tokens"]].assign(**of))
    return pd.concat(tables, ignore_index=True)


def fitted(table: pd.DataFrame, **options: Any) -> TaskLaw:
    return fit_task(table, n_params_convention="total", n_bootstrap=20, **({"chance": 0.25} | options))


@pytest.fixture(scope="module")
def table(ladder: Ladder) -> pd.DataFrame:
    from tests.scaling.conftest import PLANTED

    return evaluated(ladder(0.002), PLANTED)


@pytest.fixture(scope="module")
def law(table: pd.DataFrame) -> TaskLaw:
    return fitted(table)


def test_the_law_with_the_smaller_error_on_the_largest_runs_is_taken(law: TaskLaw, planted: Law) -> None:
    """The planted score is a sigmoid of the loss, and no sigmoid in ln N and ln D."""
    assert law.errors["two steps"] < law.errors["direct law"]
    assert law.method == "two steps"
    assert law.two_steps is not None
    assert law.two_steps.task.n_rows == 100
    ahead = law.forecast(1e9, 2e10)
    assert ahead.low < float(accuracy(planted.loss(1e9, 2e10))) < ahead.high
    assert ahead.errors == law.errors
    assert not ahead.reasons


def test_a_score_in_n_and_d_alone_takes_the_direct_law(table: pd.DataFrame) -> None:
    """The two largest sizes have a loss that is 30 % too high for their score."""
    at_end = table["tokens"] == table["n_tokens"]
    direct = table[at_end].assign(
        accuracy=lambda t: 0.25 + 0.75 * expit(0.5 * np.log(t["n_params"] * t["n_tokens"] / 1e18)),
        task_loss=lambda t: t["task_loss"] * np.where(t["n_params"] > 1.5e8, 1.3, 1.0),
    )
    law = fitted(direct)
    assert law.method == "direct law"
    assert law.errors["direct law"] < law.errors["two steps"]
    assert law.forecast(1e9, 2e10).value == pytest.approx(0.25 + 0.75 * expit(0.5 * np.log(20)), abs=0.03)


def test_too_few_runs_to_leave_some_out_take_the_direct_law(table: pd.DataFrame) -> None:
    few = table[table["run"] < 9]
    law = fitted(few)
    assert (law.method, law.errors) == ("direct law", {})
    without = fitted(table.drop(columns="task_loss"))
    assert (without.method, without.errors) == ("direct law", {})


def test_probabilities_agree_with_the_interval(law: TaskLaw) -> None:
    """With one law or both, the lower bound is reached with 95 %."""
    for one in (law, replace(law, errors={"two steps": 0.02, "direct law": 0.03})):
        ahead = one.forecast(1e9, 2e10)
        assert one.probability(1e9, 2e10, ahead.low) == pytest.approx(0.95, abs=0.01)
        assert one.probability(1e9, 2e10, ahead.high) <= 0.06


def test_a_law_of_comparable_error_widens_the_interval_and_lowers_probabilities(law: TaskLaw) -> None:
    """The same laws with other errors: the direct law is now within a factor of two."""
    both = replace(law, errors={"two steps": 0.02, "direct law": 0.03})
    size, alone = (1e9, 2e10), replace(law, errors={"two steps": 0.02, "direct law": 0.05}).forecast(1e9, 2e10)
    assert law.direct is not None
    assert law.two_steps is not None
    direct, spanned = law.direct.forecast(*size), both.forecast(*size)
    assert (spanned.value, spanned.low, spanned.high) == (
        alone.value,
        min(alone.low, direct.low),
        max(alone.high, direct.high),
    )
    assert both.probability(*size, 0.7) == min(
        law.direct.probability(*size, 0.7), law.two_steps.probability(*size, 0.7)
    )


def falling(table: pd.DataFrame, bits: Any) -> TaskLaw:
    return fitted(table.assign(bits_per_byte=bits), metric="bits_per_byte", falls=True)


@pytest.fixture(scope="module")
def like_a_loss(table: pd.DataFrame) -> TaskLaw:
    return falling(table, table["task_loss"] / 3)


def test_a_score_that_falls_like_a_loss_has_the_loss_law(like_a_loss: TaskLaw, planted: Law) -> None:
    ahead = like_a_loss.forecast(1e9, 2e10)
    assert ahead.method == "loss law"
    assert like_a_loss.errors["loss law"] < like_a_loss.errors["likelihood law"]
    assert ahead.low < float(planted.loss(1e9, 2e10)) / 3 < ahead.high
    assert like_a_loss.emergence() is None


def skill(n_params: Any, n_tokens: Any, middle: float = 5e18) -> Any:
    """Bits of an answer whose likelihood rises from .2 to 1 around `middle` = N·D."""
    return -np.log2(0.2 + 0.8 * expit((np.log(n_params) + np.log(n_tokens) - math.log(middle)) / 1.5))


def test_a_skill_that_is_learned_has_the_likelihood_law(table: pd.DataFrame) -> None:
    """A sum of powers with a floor falls ever more slowly, so it misses what is learned next."""
    noise = np.exp(0.01 * np.random.default_rng(1).standard_normal(len(table)))
    law = falling(table, skill(table["n_params"], table["tokens"]) * noise)
    assert law.method == "likelihood law"
    ahead, truth = law.forecast(1e9, 5e10), float(skill(1e9, 5e10))
    assert ahead.low < truth < ahead.high
    assert law.loss_law is not None
    assert law.loss_law.forecast(1e9, 5e10).value > 1.5 * truth
    assert 0.5 < law.probability(1e9, 5e10, ahead.high) <= 1
    assert law.probability(1e9, 5e10, ahead.low) < 0.1
    again = TaskLaw.from_dict(json.loads(json.dumps(law.to_dict())))
    assert again.forecast(1e9, 5e10).to_dict() == ahead.to_dict()


def test_an_interval_is_widened_on_the_side_on_which_left_out_runs_lie(like_a_loss: TaskLaw, planted: Law) -> None:
    size = (1e9, 2e10)
    assert like_a_loss.loss_law is not None
    law = replace(like_a_loss.loss_law, inflation=(1.0, 1.0))
    usual, wider = law.forecast(*size), replace(law, inflation=(4.0, 1.0)).forecast(*size)
    assert (wider.value, wider.high) == (usual.value, usual.high)
    assert math.log(wider.low / usual.value) == pytest.approx(4 * math.log(usual.low / usual.value))
    assert len(wider.reasons) == len(usual.reasons) + 1
    assert replace(law, inflation=(4.0, 1.0)).probability(*size, wider.low) == pytest.approx(0.05, abs=1e-6)
    far = replace(law, inflation=(1.0, 1e6)).forecast(*size)
    assert far.high == pytest.approx(max(usual.high, law.worst))
    n, d = np.array([1e9, 1e9]), np.array([1e10, 2e10])
    losses = np.asarray(planted.loss(n, d)) / 3
    assert inflation_of(law, n, d, losses) == (1.0, 1.0)
    low, high = inflation_of(law, n, d, losses / 2)
    assert low > 5
    assert high == 1


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_a_target_of_a_falling_score_is_above_0(like_a_loss: TaskLaw, target: float) -> None:
    assert like_a_loss.probability(1e9, 2e10, np.float64(0.7)) == like_a_loss.probability(1e9, 2e10, 0.7)
    with pytest.raises(ValueError, match="target"):
        like_a_loss.probability(1e9, 2e10, target)


def test_a_score_at_chance_is_reported_with_the_size_at_which_it_is_expected_to_rise(
    ladder: Ladder, planted: Law
) -> None:
    law = fitted(evaluated(ladder(0.002), planted, middle=0.9, noise=0.01))
    assert not law.is_forecast
    found = law.emergence(20.0)
    assert found is not None
    assert not found.seen
    with pytest.raises(ScalingError, match="not yet above chance"):
        law.forecast(1e9, 2e10)
    with pytest.raises(ScalingError, match="signal"):
        law.probability(1e9, 2e10, 0.5)
    assert str(found) in replace(law, min_ratio=0.0).forecast(1e9, 2e10).reasons


def test_without_repeats_the_noise_is_not_known(table: pd.DataFrame) -> None:
    law = fitted(table[table["tokens"] == table["n_tokens"]])
    assert law.signal is None
    assert law.forecast(1e9, 2e10).reasons


def test_a_result_survives_json(law: TaskLaw) -> None:
    again = TaskLaw.from_dict(json.loads(json.dumps(law.to_dict())))
    assert again.forecast(1e9, 2e10).to_dict() == law.forecast(1e9, 2e10).to_dict()
    assert str(again) == str(law)


@pytest.mark.parametrize(("options", "named"), [({"min_ratio": -1}, "min_ratio"), ({"metric": "mmlu"}, "mmlu")])
def test_bad_arguments_are_named(table: pd.DataFrame, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fitted(table, **options)


def test_a_table_without_the_ends_of_runs_is_refused(table: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="n_tokens"):
        fitted(table.assign(tokens=np.floor(0.98 * table["tokens"])))


def test_a_run_ends_at_its_last_row_although_whole_batches_are_fewer_tokens(table: pd.DataFrame) -> None:
    whole = fitted(table).forecast(1e9, 2e10)
    short = table.assign(tokens=np.floor(0.9995 * table["tokens"]))
    assert fitted(short).forecast(1e9, 2e10).value == pytest.approx(whole.value, rel=1e-3)


def test_rows_of_a_run_without_its_length_are_checkpoints_before_its_last(table: pd.DataFrame) -> None:
    runs = table["n_params"].astype(str) + " " + table["n_tokens"].astype(str)
    so_far = table.assign(n_tokens=table["tokens"], run=runs).drop(columns="tokens")
    ends, before = ends_and_checkpoints(so_far, "accuracy", columns={"run": "run"})
    known, earlier = ends_and_checkpoints(table, "accuracy")
    assert (len(ends), len(before)) == (len(known), len(earlier))
    assert sorted(ends["n_tokens"]) == sorted(known["n_tokens"])
    one_name = table.loc[known.index, ["n_params", "n_tokens", "accuracy"]].assign(run="baseline")
    ends, before = ends_and_checkpoints(one_name, "accuracy")
    assert (len(ends), len(before)) == (len(known), 0), "a name that several sizes share joins no rows"


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_a_score_that_never_moves_has_no_forecast(table: pd.DataFrame, value: float) -> None:
    law = fitted(table.assign(accuracy=value))
    assert not law.is_forecast
    with pytest.raises(ScalingError, match="signal to noise"):
        law.forecast(1e9, 2e10)


def test_a_falling_score_keeps_its_unit(table: pd.DataFrame) -> None:
    """Losses in bits per token become nats; a score is fitted as it stands."""
    bits = table.assign(bits=table["task_loss"] / 3)
    one, other = (
        fitted(bits, metric="bits", falls=True, loss_unit=unit).forecast(1e9, 2e10)
        for unit in ("bits per byte", "bits per token")
    )
    assert (one.value, one.low, one.high, one.method) == (other.value, other.low, other.high, other.method)
