"""Forecasts of a run's scores: registered before its first step, once, and compared with what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import Plan, StudyConfig
from muscale.plans.planning import Planner
from muscale.plans.score_forecasts import (
    PlannedScore,
    ScoreForecasts,
    forecast_scores,
    in_time,
    memorisation_law,
    register_scores,
    registered_scores,
    task_laws,
)
from muscale.settings.scores import ScoresSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.evaluation.repeated_windows import times_read
from proxy_models.evaluation.smooth_scores import share_error
from scaling import HorizonLaw, ScalingFit, TaskLaw

SETTINGS = ScoresSettings(tasks=("sums",), least_signal_to_noise=0.0)


@pytest.fixture
def plan(make_study: Callable[[], Path], law: ScalingFit, horizon: HorizonLaw) -> Plan:
    config = StudyConfig.read(make_study())
    return Planner(config, config.hyperparameters, horizon, law).plan()


def ladder(noise: float = 0.002) -> pd.DataFrame:
    """Scores at the ends of runs of four sizes, three lengths and two seeds: a sigmoid of ln N + ln D, and others."""
    rng, rows = np.random.default_rng(0), []
    for n_params in (1e4, 2e4, 4e4, 8e4):
        for n_tokens in (1e6, 2e6, 4e6):
            for seed in (0, 1):
                skill = 1 / (1 + np.exp(-(np.log(n_params * n_tokens) - np.log(8e10)) / 2)) + noise * rng.normal()
                known = {
                    ("sums", "accuracy"): 0.25 + 0.75 * np.clip(skill, 0, 1),
                    ("sums", "bits_per_byte"): 3 - 2 * skill,
                    ("sums", "chance"): 0.25,
                    ("sums", "perplexity"): 20 - 10 * skill,
                    ("sums, contaminated items", "accuracy"): 1.0,
                }
                for (name, metric), value in known.items():
                    key = f"{n_params:g}-{n_tokens:g}-{seed}"
                    about = {"weights": key, "run": key, "n_params": n_params, "tokens": n_tokens, "n_tokens": n_tokens}
                    score = {"name": name, "metric": metric, "value": value, "standard_error": 0.01, "n": 100}
                    rows.append(about | {"anneals": True, "seed": seed, "measure": "tasks"} | score)
    return pd.DataFrame(rows)


@pytest.fixture
def forecasts(plan: Plan) -> ScoreForecasts:
    return forecast_scores(plan, ladder(), SETTINGS)


def test_scores_with_a_known_range_are_forecast_and_contaminated_items_are_not(forecasts: ScoreForecasts) -> None:
    *known, unknown = forecasts.scores
    assert [(score.task, score.metric) for score in known] == [("sums", "accuracy"), ("sums", "bits_per_byte")]
    assert (unknown.task, unknown.metric, unknown.value, len(unknown.reasons)) == ("sums", "perplexity", None, 1)
    for score in known:
        assert score.value is not None
        assert score.low is not None
        assert score.high is not None
        assert score.low < score.value < score.high


def test_a_checkpoint_without_a_score_leaves_the_others(plan: Plan) -> None:
    """NaN is no number out of range: the forecast is that without the row."""
    rows = ladder()
    broken = (rows["metric"] == "accuracy") & (rows["weights"] == rows["weights"].iloc[0])
    with_nan, without = (
        {score.metric: score for score in forecast_scores(plan, table, SETTINGS).scores}
        for table in (rows.assign(value=rows["value"].mask(broken)), rows[~broken])
    )
    assert with_nan["accuracy"].value is not None
    assert with_nan == without


def test_the_chance_of_the_items_is_the_floor(plan: Plan) -> None:
    laws = {metric: law for _, metric, law in task_laws(ladder(), plan, SETTINGS)}
    law = laws["accuracy"]
    assert isinstance(law, TaskLaw)
    direct = law.direct
    assert direct is not None
    assert np.ptp(direct.draws[:, 0]) == 0
    assert direct.draws[0, 0] == pytest.approx(0.25)


def test_a_task_with_too_little_signal_is_reported_without_a_forecast(plan: Plan) -> None:
    strict = ScoresSettings(tasks=("sums",), least_signal_to_noise=1e6)
    for score in forecast_scores(plan, ladder().query("metric != 'perplexity'"), strict).scores:
        assert score.value is None
        assert score.signal_to_noise is not None
        assert score.reasons


def test_too_few_runs_are_a_reason_not_an_error(plan: Plan) -> None:
    few = ladder().query("n_params < 15_000 and seed == 0")
    found = forecast_scores(plan, few, SETTINGS)
    assert all(score.value is None and score.reasons for score in found.scores)


def test_what_is_registered_stays_and_is_read_back(forecasts: ScoreForecasts, ledger: Ledger) -> None:
    assert register_scores(forecasts, ledger) == forecasts
    other = replace(forecasts, scores=forecasts.scores[:1])
    assert register_scores(other, ledger) == forecasts
    assert registered_scores(forecasts.plan, ledger) == forecasts
    assert ScoreForecasts.from_dict(json.loads(json.dumps(forecasts.to_dict()))) == forecasts


def test_a_score_that_is_measured_later_joins_the_registered_ones_without_a_forecast(forecasts: ScoreForecasts) -> None:
    registered = replace(forecasts, scores=forecasts.scores[:1])
    shown = registered.with_further(forecasts)
    assert shown.scores[0] == forecasts.scores[0]
    assert [(score.task, score.metric) for score in shown.scores] == [(s.task, s.metric) for s in forecasts.scores]
    assert shown.scores[1].value is None
    assert shown.scores[1].reasons


def test_a_score_of_0_is_a_reason_not_an_error(plan: Plan) -> None:
    """No law of a loss passes through 0."""
    rows = ladder()
    rows.loc[rows["metric"] == "bits_per_byte", "value"] = 0.0
    found = {score.metric: score for score in forecast_scores(plan, rows, SETTINGS).scores}
    assert found["bits_per_byte"].value is None
    assert found["bits_per_byte"].reasons
    assert found["accuracy"].metric == "accuracy"


def test_nothing_is_forecast_once_the_run_has_begun(forecasts: ScoreForecasts, ledger: Ledger) -> None:
    assert in_time(forecasts, ledger) == forecasts
    ledger.record_result(ResultKind.PROMOTION_STARTED, forecasts.plan, {"at": "2026-01-01"})
    late = register_scores(forecasts, ledger)
    assert [score.metric for score in late.scores] == [score.metric for score in forecasts.scores]
    assert all(score.value is None and score.reasons for score in late.scores)


def test_a_measured_score_is_inside_or_outside_its_interval() -> None:
    score = PlannedScore(task="t", metric="accuracy", value=0.5, low=0.4, high=0.6, method="direct law", errors={})
    unknown = PlannedScore(task="t", metric="probability", errors={}, reasons=("too few",))
    found = ScoreForecasts(plan="p", level=0.9, scores=(score, unknown))
    measured = pd.DataFrame(
        [("t", "accuracy", 0.7, 0.02), ("t", "probability", 0.4, None), ("u", "accuracy", 0.1, None)],
        columns=["name", "metric", "value", "standard_error"],
    ).assign(measure="tasks")
    accuracy, probability = found.with_measured(measured).scores
    assert (accuracy.measured, accuracy.standard_error, accuracy.inside) == (0.7, 0.02, False)
    assert (probability.measured, probability.standard_error, probability.inside) == (0.4, None, None)
    assert score.inside is None
    assert len(found.table) == 2
    assert [*replace(found, scores=()).table] == [*found.table]


def memorised(size: float, times: float) -> float:
    """Planted share of windows that a model continues verbatim, in the manner of Carlini et al. (arXiv 2202.07646).

    Args:
        size: Parameters as a share of the plan's.
    """
    return float(1 / (1 + np.exp(-(0.9 * np.log(5 * size) + 1.5 * np.log(times / 16)))))


def memorisation(plan: Plan) -> pd.DataFrame:
    """Shares of runs of four sizes and two lengths; the longer, of a quarter of the plan's tokens, read windows up to 63 times."""
    rng, rows, n_sequences = np.random.default_rng(0), [], 256
    for size in (1 / 16, 1 / 8, 1 / 4, 1 / 2):
        for length, most in ((1 / 8, 16), (1 / 4, 32)):
            about = {"run": f"{size}-{length}", "n_params": plan.n_params * size, "tokens": plan.n_tokens * length}
            about |= {
                "weights": about["run"],
                "n_tokens": about["tokens"],
                "anneals": True,
                "seed": 0,
                "n": n_sequences,
            }
            for least in (0, *(2**power for power in range(6) if 2**power <= most)):
                times = math.sqrt(least * (2 * least - 1))
                share = rng.binomial(n_sequences, memorised(size, times) if least else 0) / n_sequences
                known = {"memorised": share, "loss": 1.0} | ({"repetitions": times} if least else {})
                rows += [
                    about
                    | {"measure": "memorisation", "name": times_read(least), "metric": metric, "value": value}
                    | {"standard_error": share_error(share, n_sequences) if metric == "memorised" else None}
                    for metric, value in known.items()
                ]
    return pd.DataFrame(rows)


def test_memorised_shares_are_forecast_by_the_times_that_the_run_will_have_read_them(plan: Plan) -> None:
    """A longer run reads the same text more often, so it has windows that no run of the ladder has."""
    scores = forecast_scores(plan, memorisation(plan), SETTINGS).scores
    assert [score.task for score in scores] == [
        f"memorisation, {times_read(2**power)}"
        for power in range(8)  # the ladder's most read windows four times: 128 to 255
    ]
    for power, score in enumerate(scores):
        assert score.low is not None
        assert score.high is not None
        truth = memorised(1, math.sqrt(2**power * (2 ** (power + 1) - 1)))
        assert score.low - 0.01 <= truth <= score.high + 0.01
        assert score.high - score.low < 0.5
    middle = [score.value or 0.0 for score in scores]
    assert middle == sorted(middle)


def test_memorised_shares_are_compared_with_those_measured(plan: Plan) -> None:
    scores = forecast_scores(plan, memorisation(plan), SETTINGS)
    rows = [("tasks", "4–7 times", "memorised", 0.9), ("memorisation", "4–7 times", "memorised", 0.1)]
    measured = pd.DataFrame(rows, columns=["measure", "name", "metric", "value"]).assign(standard_error=0.01)
    found = {score.task: score.measured for score in scores.with_measured(measured).scores}
    assert found["memorisation, 4–7 times"] == 0.1
    assert found["memorisation, 8–15 times"] is None


def test_the_share_of_held_out_windows_is_the_floor(plan: Plan) -> None:
    rows = memorisation(plan)
    control = (rows["name"] == "held out") & (rows["metric"] == "memorised")
    rows.loc[control, "value"] = 0.06
    assert memorisation_law(rows).draws[:, 0] == pytest.approx(0.06)


def test_memorised_shares_of_one_run_are_no_law(plan: Plan) -> None:
    rows = memorisation(plan)
    scores = forecast_scores(plan, rows[rows["weights"] == rows["weights"].iloc[0]], SETTINGS).scores
    assert scores
    assert all(score.value is None and score.reasons for score in scores)


def test_runs_that_memorised_nothing_do_not_tell_when_a_larger_run_will(plan: Plan) -> None:
    """In a trial, runs of the ladder continued no window, and a run of twice the size seven of eight."""
    rows = memorisation(plan)
    rows.loc[rows["metric"] == "memorised", "value"] = 0.0
    scores = forecast_scores(plan, rows, SETTINGS).scores
    assert len(scores) == 8
    assert all(score.value is None and score.reasons for score in scores)
