"""From loss to accuracy: planted sigmoids, their intervals, and two steps from (N, D)."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import curve_fit
from scipy.stats import linregress

from scaling import DownstreamLaw, Law, ScalingError, TaskForecast, TwoStep, fit, fit_downstream, fit_two_step
from scaling.downstream.sigmoid import falls

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
    law = fit_downstream(rows(), n_draws=100, **given)  # type: ignore[arg-type]
    assert (law.floor, law.ceiling, law.midpoint, law.width) == pytest.approx((0.25, 0.9, 2.4, 0.25), rel=1e-3)
    assert law.held == tuple(name for name in ("floor", "ceiling") if {"floor": "chance"}.get(name, name) in given)
    assert law.predict([1.0, 2.4]) == pytest.approx(accuracy(np.array([1.0, 2.4])), rel=1e-3)
    assert law.status == "ok"


def test_percentages_are_shares_times_a_hundred() -> None:
    shares = rows(0.01)
    percent = shares.assign(accuracy=100 * shares["accuracy"])
    share = fit_downstream(shares, chance=0.25, ceiling=0.9, n_draws=100)
    law = fit_downstream(percent, chance=25, ceiling=90, most=100, n_draws=100)
    assert law.predict(2.2) == pytest.approx(100 * float(share.predict(2.2)), rel=1e-6)
    assert law.residual == pytest.approx(100 * share.residual, rel=1e-6)


@pytest.mark.parametrize("given", [{}, {"chance": 0.25}, {"chance": 0.25, "ceiling": 0.9}])
def test_the_residual_is_by_the_degrees_of_freedom_that_are_left(given: dict[str, float]) -> None:
    table = rows(0.02)
    law = fit_downstream(table, n_draws=100, **given)  # type: ignore[arg-type]
    squares = float(((law.predict(table["loss"]) - table["accuracy"]) ** 2).sum())
    assert law.residual == pytest.approx(math.sqrt(squares / (len(table) - 4 + len(given))), rel=1e-9)
    assert law.loss_range == (1.8, 3.6)
    line = str(law).splitlines()[1]
    assert [f"{name} " in line and "(given" in line.split(name)[1].split(",")[0] for name in ("floor", "ceiling")] == [
        "chance" in given,
        "ceiling" in given,
    ]


def test_draws_of_many_rows_are_those_of_least_squares() -> None:
    """Mean and covariance by scipy's own search; the scatter has a deviation of 1/√(2·396) of itself."""
    table = rows(0.01, n=400)
    law = fit_downstream(table, n_draws=4000)
    found, covariance = curve_fit(
        lambda x, floor, ceiling, midpoint, width: floor + (ceiling - floor) / (1 + np.exp((x - midpoint) / width)),
        table["loss"],
        table["accuracy"],
        p0=[0.25, 0.9, 2.4, 0.25],
    )
    errors = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((law.draws.mean(axis=0) - found) / errors, 0, atol=0.15)
    np.testing.assert_allclose(
        np.cov(law.draws.T) / np.outer(errors, errors), covariance / np.outer(errors, errors), atol=0.15
    )
    assert law.scatters.mean() == pytest.approx(law.residual, rel=0.01)
    assert law.scatters.std() / law.residual == pytest.approx(1 / math.sqrt(2 * 396), rel=0.15)


def test_draws_keep_what_is_given_and_the_bounds() -> None:
    law = fit_downstream(rows(0.01, losses=(2.2, 3.6), n=12), chance=0.25)
    floor, ceiling = law.draws[:, 0], law.draws[:, 1]
    assert np.ptp(floor) == 0
    assert floor[0] == pytest.approx(0.25)
    assert ceiling.max() <= 1
    assert np.ptp(ceiling) > 0.1, "losses above the midpoint leave the ceiling open"


@pytest.mark.parametrize(("t", "expected"), [(3.1, True), (2.9, False)])
def test_a_metric_falls_if_its_line_does_by_three_standard_errors(t: float, expected: bool) -> None:
    """The scatter is made at right angles to the line and as large as the t value asks (Student)."""
    loss = np.linspace(2, 3, 20)
    line = (loss - loss.mean()) / np.linalg.norm(loss - loss.mean())
    rng = np.random.default_rng(0)
    columns = np.linalg.qr(np.column_stack([np.ones(20), line, rng.standard_normal(20)]))[0]
    table = pd.DataFrame({"loss": loss, "accuracy": 0.5 + 0.02 * (t * line + math.sqrt(18) * columns[:, 2])})
    assert linregress(loss, table["accuracy"]).slope / linregress(loss, table["accuracy"]).stderr == pytest.approx(t)
    warned = any("falls as the loss falls" in warning for warning in fit_downstream(table, n_draws=100).warnings)
    assert warned == expected


def test_a_constant_metric_does_not_fall() -> None:
    assert not falls(np.linspace(2, 3, 20), np.full(20, 0.5))


def test_intervals_cover_a_further_run() -> None:
    """Losses to 2.2, a run at 2.0: with chance known, and the scatter of one run."""
    covered = []
    for seed in range(30):
        law = fit_downstream(rows(0.01, seed, (2.2, 3.6)), chance=0.25, n_draws=100)
        low, high = law.interval(2.0, 0.9)
        new = float(accuracy(np.array(2.0))) + 0.01 * np.random.default_rng(1000 + seed).standard_normal()
        covered.append(low < new < high)
    assert np.mean(covered) >= 0.82


def test_rows_of_one_run_count_as_one_where_they_err_alike() -> None:
    every = rows(0.01).assign(stem=np.arange(24))
    repeated = pd.concat([every] * 5, ignore_index=True)
    once, clustered, naive = (
        fit_downstream(table, n_draws=2000).draws[:, 2].std()
        for table in (every, repeated, repeated.drop(columns="stem"))
    )
    assert clustered == pytest.approx(once, rel=0.1)
    assert naive == pytest.approx(once / math.sqrt(5), rel=0.2)
    noise = 0.01 * np.random.default_rng(1).standard_normal(120)
    apart = repeated.assign(accuracy=accuracy(repeated["loss"].to_numpy()) + noise)
    assert fit_downstream(apart, n_draws=2000).draws[:, 2].std() < 0.7 * once, "errors of their own"


def test_warnings() -> None:
    rng = np.random.default_rng(0)
    at_chance = rows(losses=(4.5, 6)).assign(accuracy=0.25 + 0.01 * rng.standard_normal(24))
    assert "may all be at chance" in "; ".join(fit_downstream(at_chance, chance=0.25, n_draws=100).warnings)
    early = fit_downstream(rows(0.002, losses=(2.9, 4)), chance=0.25, n_draws=100)
    assert any("midpoint" in warning for warning in early.warnings) or early.ceiling < 0.999
    law = fit_downstream(rows(losses=(2.9, 4)), chance=0.25, ceiling=0.9, n_draws=100)
    assert not law.warnings, "a ceiling that was given needs no run half-way up"


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"accuracy": 1.0}, "the metric is 1 in every row"),
        ({"stem": "one"}, "1 independent runs"),
        ({"accuracy": lambda t: 1 - t["accuracy"]}, "the metric falls as the loss falls"),
    ],
)
def test_unidentified_parameters_raise_warnings(change: dict[str, Any], warning: str) -> None:
    law = fit_downstream(rows(0.01).assign(**change), n_draws=100)
    assert law.status == "doubtful"
    assert warning in "; ".join(law.warnings)


def test_intervals_stay_within_what_a_metric_can_be() -> None:
    """Of a percentage as of a share; the scatter alone would reach beyond."""
    table = rows().assign(accuracy=lambda t: accuracy(t["loss"], ceiling=1.0))
    table["accuracy"] = np.clip(table["accuracy"] + 0.05 * np.random.default_rng(0).standard_normal(24), 0, 1)
    share = fit_downstream(table, n_draws=100)
    percent = fit_downstream(table.assign(accuracy=100 * table["accuracy"]), most=100, n_draws=100)
    assert share.interval(1.0)[1] == 1.0
    assert percent.interval(1.0)[1] == 100.0
    assert percent.interval(1.0)[0] == pytest.approx(100 * share.interval(1.0)[0], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"accuracy": 1.2}, {}, "accuracy .*got 1.2"),
        ({"loss": -1.0}, {}, "loss must be finite and above 0"),
        ({"loss": 2.0}, {}, "loss .*got 2 in every row"),
        ({}, {"chance": 0.9, "ceiling": 0.5}, "chance and ceiling must keep 0 <= chance < ceiling <= 1"),
        ({}, {"metric": "f1"}, "missing column f1"),
        ({"stem": None}, {}, "stem .* row 0 "),
        ({"accuracy": 50.0}, {"most": 100, "chance": 0.25}, "chance .*got 0.25"),
        ({"accuracy": 50.0}, {"most": 100, "ceiling": 0.9}, "ceiling .*got 0.9"),
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


def test_checkpoints_enter_the_second_step_and_results_survive_json(ladder: Ladder) -> None:
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
        measured, further = (table.assign(task_loss=table["task_loss"] / unit) for table in (runs, extra))
        both = fit_two_step(
            measured, n_params_convention="total", loss_unit=loss_unit, checkpoints=further, n_bootstrap=5
        )
        return both.forecast(1e9, 2e10)

    bits, nats = ahead(math.log(2), "bits per token"), ahead(1.0, "nats per token")
    assert (bits.value, bits.loss.loss) == pytest.approx((nats.value, nats.loss.loss), rel=1e-6)


def test_the_second_step_hears_the_rows_that_the_first_leaves_out(ladder: Ladder) -> None:
    """What a run's task loss is worth doesn't depend on how it came about; the steps name their own columns."""
    runs = tasks(ladder, 0.002, 0).assign(annealed=np.arange(20) < 16)
    both = fit_two_step(runs, n_params_convention="total", n_bootstrap=5)
    assert (both.loss.n_rows, both.task.n_rows) == (16, 20)
    with pytest.raises(ValueError, match="task_loss .*20 of 20"):
        fit_two_step(runs.assign(task_loss=np.nan), n_params_convention="total")
    with pytest.raises(ValueError, match="stem .* row 0 "):
        fit_two_step(runs, n_params_convention="total", checkpoints=runs.assign(stem=None))
    percent = runs.assign(accuracy=100 * runs["accuracy"])
    assert fit_two_step(percent, n_params_convention="total", most=100, n_bootstrap=5).task.most == 100


def test_a_falling_metric_is_fitted_as_a_loss(ladder: Ladder, planted: Law) -> None:
    """Bits per byte are nats per token by a factor: the exponents are the same, the terms are scaled."""
    runs, factor = ladder(), 1 / (np.log(2) * 4.2)
    bits = fit(runs.assign(loss=runs["loss"] * factor), n_params_convention="total", n_bootstrap=2).law
    assert bits["alpha"] == pytest.approx(planted["alpha"], rel=1e-5)
    assert bits["E"] == pytest.approx(planted["E"] * factor, rel=1e-5)


def test_both_steps_have_one_unit_whether_or_not_the_bytes_of_a_token_are_known(ladder: Ladder) -> None:
    runs = tasks(ladder, 0.002, 0)
    plain, known = (
        fit_two_step(table, n_params_convention="total", loss_unit="bits per byte", n_bootstrap=5).forecast(1e9, 2e10)
        for table in (runs, runs.assign(bytes_per_token=4.2))
    )
    assert (plain.value, plain.loss.loss) == (known.value, known.loss.loss)
