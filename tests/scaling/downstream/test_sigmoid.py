"""From loss to accuracy: planted sigmoids, their intervals, and two steps from (N, D)."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaling import DownstreamLaw, Law, ScalingError, TaskForecast, TwoStep, fit, fit_downstream, fit_two_step

Ladder = Callable[..., pd.DataFrame]


def accuracy(loss: np.ndarray, floor: float = 0.25, ceiling: float = 0.9) -> np.ndarray:
    return floor + (ceiling - floor) / (1 + np.exp((loss - 2.4) / 0.25))


def rows(noise: float = 0.0, seed: int = 0, losses: tuple[float, float] = (1.8, 3.6), n: int = 24) -> pd.DataFrame:
    loss = np.linspace(*losses, n)
    return pd.DataFrame(
        {"loss": loss, "accuracy": accuracy(loss) + noise * np.random.default_rng(seed).standard_normal(n)}
    )


@pytest.mark.parametrize("given", [{}, {"chance": 0.25}, {"chance": 0.25, "ceiling": 0.9}])
def test_planted_sigmoid_is_recovered(given: dict[str, float]) -> None:
    law = fit_downstream(rows(), n_bootstrap=5, **given)  # type: ignore[arg-type]
    assert (law.floor, law.ceiling, law.midpoint, law.width) == pytest.approx((0.25, 0.9, 2.4, 0.25), rel=1e-3)
    assert law.held == tuple(name for name in ("floor", "ceiling") if {"floor": "chance"}.get(name, name) in given)
    assert law.predict([1.0, 2.4]) == pytest.approx(accuracy(np.array([1.0, 2.4])), rel=1e-3)
    assert law.status == "ok"


def test_intervals_cover_a_further_run() -> None:
    """Losses to 2.2, a run at 2.0: with chance known, and the scatter of one run."""
    covered = []
    for seed in range(30):
        law = fit_downstream(rows(0.01, seed, (2.2, 3.6)), chance=0.25, n_bootstrap=60)
        low, high = law.interval(2.0, 0.9)
        new = float(accuracy(np.array(2.0))) + 0.01 * np.random.default_rng(1000 + seed).standard_normal()
        covered.append(low < new < high)
    assert np.mean(covered) >= 0.75


def test_rows_of_one_run_are_resampled_together() -> None:
    repeated = pd.concat([rows(0.01).assign(stem=np.arange(24))] * 5, ignore_index=True)
    clustered = fit_downstream(repeated, n_bootstrap=100)
    naive = fit_downstream(repeated.drop(columns="stem"), n_bootstrap=100)
    assert naive.draws[:, 2].std() < 0.65 * clustered.draws[:, 2].std()


def test_doubts() -> None:
    rng = np.random.default_rng(0)
    at_chance = rows(losses=(4.5, 6)).assign(accuracy=0.25 + 0.01 * rng.standard_normal(24))
    assert "may all be at chance" in "; ".join(fit_downstream(at_chance, chance=0.25, n_bootstrap=5).warnings)
    early = fit_downstream(rows(0.002, losses=(2.9, 4)), chance=0.25, n_bootstrap=5)
    assert any("no run is half-way up" in warning for warning in early.warnings) or early.ceiling < 0.999


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"accuracy": 1.0}, "the metric is 1 in every row"),
        ({"stem": "one"}, "1 independent runs: intervals over runs want at least 6"),
        ({"accuracy": lambda t: 1 - t["accuracy"]}, "the metric falls as the loss falls"),
    ],
)
def test_what_the_rows_can_not_tell_is_doubted(change: dict[str, Any], doubt: str) -> None:
    law = fit_downstream(rows(0.01).assign(**change), n_bootstrap=5)
    assert law.status == "doubtful"
    assert doubt in "; ".join(law.warnings)


def test_intervals_stay_within_what_a_metric_can_be() -> None:
    """Of a percentage as of a share; the scatter alone would reach beyond."""
    table = rows().assign(accuracy=lambda t: accuracy(t["loss"], ceiling=1.0))
    table["accuracy"] = np.clip(table["accuracy"] + 0.05 * np.random.default_rng(0).standard_normal(24), 0, 1)
    share = fit_downstream(table, n_bootstrap=20)
    percent = fit_downstream(table.assign(accuracy=100 * table["accuracy"]), most=100, n_bootstrap=20)
    assert share.interval(1.0)[1] == 1.0
    assert percent.interval(1.0)[1] == 100.0
    assert percent.interval(1.0)[0] == pytest.approx(100 * share.interval(1.0)[0], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"accuracy": 1.2}, {}, "accuracy must be at most 1, got 1.2"),
        ({"loss": -1.0}, {}, "loss must be finite and above 0"),
        ({"loss": 2.0}, {}, "loss is 2 in every row"),
        ({}, {"chance": 0.9, "ceiling": 0.5}, "chance and ceiling must keep 0 <= chance < ceiling <= 1"),
        ({}, {"metric": "f1"}, "missing column f1"),
        ({"stem": None}, {}, "stem must be named in every row, got 24 empty values"),
        ({"accuracy": 50.0}, {"most": 100, "chance": 0.25}, "chance must be in the unit of accuracy, .* 100, got 0.25"),
        ({"accuracy": 50.0}, {"most": 100, "ceiling": 0.9}, "ceiling must be in the unit of accuracy, .* 100, got 0.9"),
    ],
)
def test_bad_values_are_named(change: dict[str, float], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_downstream(rows().assign(**change), **options)  # type: ignore[arg-type]
    with pytest.raises(ScalingError, match="need at least 6 rows for 4 numbers, got 5"):
        fit_downstream(rows().iloc[:5])


def tasks(ladder: Ladder, noise: float, seed: int) -> pd.DataFrame:
    runs = ladder(noise, seed)
    scatter = 0.004 * np.random.default_rng(seed).standard_normal(len(runs))
    return runs.rename(columns={"loss": "task_loss"}).assign(
        accuracy=lambda t: accuracy(t["task_loss"].to_numpy()) + scatter, loss=9.0
    )


def test_two_steps_reach_the_planted_accuracy_of_a_larger_run(ladder: Ladder, planted: Law) -> None:
    covered, off = [], []
    truth = float(accuracy(planted.loss(1e9, 2e10)))
    for seed in range(8):
        both = fit_two_step(
            tasks(ladder, 0.002, seed), n_params_convention="total", chance=0.25, ceiling=0.9, n_bootstrap=40
        )
        ahead = both.forecast(1e9, 2e10)
        covered.append(ahead.low < truth < ahead.high)
        off.append(ahead.value - truth)
    assert np.mean(covered) >= 0.75
    assert np.abs(off).mean() < 0.03


def test_checkpoints_tell_the_second_step_and_results_survive_json(ladder: Ladder) -> None:
    runs = tasks(ladder, 0.002, 0)
    extra = rows(0.004).rename(columns={"loss": "task_loss"})
    both = fit_two_step(runs, n_params_convention="total", checkpoints=extra, chance=0.25, n_bootstrap=20)
    assert both.task.n_rows == len(runs) + len(extra)
    assert both.task.ceiling == pytest.approx(0.9, abs=0.03)
    restored = TwoStep.from_dict(json.loads(json.dumps(both.to_dict(), allow_nan=False)))
    assert str(restored) == str(both)
    assert restored.to_dict() == both.to_dict()
    ahead = both.forecast(1e9, 2e10)
    again = TaskForecast.from_dict(json.loads(json.dumps(ahead.to_dict())))
    assert again.to_dict() == ahead.to_dict()
    assert "task loss" in str(again)
    alone = DownstreamLaw.from_dict(json.loads(json.dumps(both.task.to_dict(), allow_nan=False)))
    assert str(alone) == str(both.task)


def test_both_steps_take_a_task_s_loss_in_bits_as_nats(ladder: Ladder) -> None:
    runs, extra = tasks(ladder, 0.002, 0), rows(0.004).rename(columns={"loss": "task_loss"})

    def ahead(unit: float, loss_unit: str) -> TaskForecast:
        told, further = (table.assign(task_loss=table["task_loss"] / unit) for table in (runs, extra))
        both = fit_two_step(told, n_params_convention="total", loss_unit=loss_unit, checkpoints=further, n_bootstrap=5)
        return both.forecast(1e9, 2e10)

    bits, nats = ahead(math.log(2), "bits per token"), ahead(1.0, "nats per token")
    assert (bits.value, bits.loss.loss) == pytest.approx((nats.value, nats.loss.loss), rel=1e-6)


def test_the_second_step_hears_the_rows_that_the_first_leaves_out(ladder: Ladder) -> None:
    """What a run's task loss is worth doesn't depend on how it came about; the steps name their own columns."""
    runs = tasks(ladder, 0.002, 0).assign(annealed=np.arange(20) < 16)
    both = fit_two_step(runs, n_params_convention="total", n_bootstrap=5)
    assert (both.loss.n_rows, both.task.n_rows) == (16, 20)
    with pytest.raises(ValueError, match="task_loss must be finite and above 0, got nan"):
        fit_two_step(runs.assign(task_loss=np.nan), n_params_convention="total")
    with pytest.raises(ValueError, match="stem must be named in every row, got 20 empty values"):
        fit_two_step(runs, n_params_convention="total", checkpoints=runs.assign(stem=None))
    percent = runs.assign(accuracy=100 * runs["accuracy"])
    assert fit_two_step(percent, n_params_convention="total", most=100, n_bootstrap=5).task.most == 100


def test_a_falling_metric_is_fitted_as_a_loss(ladder: Ladder, planted: Law) -> None:
    """Bits per byte are nats per token by a factor: the exponents are the same, the terms are scaled."""
    runs, factor = ladder(), 1 / (np.log(2) * 4.2)
    bits = fit(runs.assign(loss=runs["loss"] * factor), n_params_convention="total", n_bootstrap=2).law
    assert bits["alpha"] == pytest.approx(planted["alpha"], rel=1e-5)
    assert bits["E"] == pytest.approx(planted["E"] * factor, rel=1e-5)
