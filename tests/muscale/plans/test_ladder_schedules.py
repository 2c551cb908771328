"""The ladder's curves as schedules, and the cooldown of a full run that would begin now."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muscale import StageError
from muscale.full_runs.amend.so_far import SoFar
from muscale.layout import METRICS
from muscale.monitoring.anneal_now import anneal_now
from muscale.plans.ladder_schedules import LadderSchedules, measured
from muscale.proxies.ladder_curves import rates_of
from muscale.store.ledger_tables import ResultKind
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from scaling import ScalingError
from scaling.schedules.schedule_fit import LENGTH
from tests.muscale.planted_ladder import OFFSET, PlantedPlan, numerics_of, write_ladder

MakeStudy = Callable[..., Path]
BATCH = 256


def test_rates_are_those_of_the_schedule_at_the_base_shape() -> None:
    segments = chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, warmup_fraction=0.1), 20 * BATCH)
    positions = np.array([step * float(BATCH) for step in range(20)])
    expected = [0.01 * one.rate_factor(tokens) for one in segments for tokens, _ in one.steps()]
    assert rates_of(segments, positions).tolist() == pytest.approx(expected)


def test_windows_have_the_mean_of_the_log_loss_times_the_ratio_of_held_out_to_training_loss() -> None:
    rows = measured(np.arange(100.0), np.full(100, 0.5), np.tile([1.0, 4.0], 50), offset=math.log(3))
    assert len(rows) == 50
    np.testing.assert_allclose(rows["loss"], 6.0)
    np.testing.assert_allclose(rows["tokens"], np.arange(50) * 2 + 0.5)


def test_the_noise_of_a_window_is_that_of_its_steps_without_their_trend() -> None:
    steps = np.arange(5000.0)
    losses = 5 * np.exp(-steps / 5000 + 0.05 * np.random.default_rng(0).standard_normal(5000))
    rows = measured(steps, np.ones(5000), losses, offset=0.0)
    np.testing.assert_allclose(rows["noise"], 0.005, rtol=0.05)


def test_the_ladder_s_curves_end_at_their_held_out_loss_with_a_rate_of_zero(make_study: MakeStudy) -> None:
    planted = PlantedPlan(make_study())
    rows = write_ladder(planted.ledger, numerics_of(planted.config), planted.config)
    found = LadderSchedules.of(planted.ledger, rows, max_regret=0.05)
    assert found.offset == pytest.approx(OFFSET, abs=0.01)
    assert found.law.n_params == (planted.config.model.n_params,)
    ends = found.law.curves.groupby("run").tail(1)
    assert found.law.lengths == (128 * planted.config.hyperparameters.batch_tokens,)
    assert (ends["step"].to_list(), ends["lr"].to_list()) == ([LENGTH] * 4, [0.0] * 4)
    np.testing.assert_allclose(ends["loss"], 2.0)
    with pytest.raises(ScalingError):
        LadderSchedules.of(planted.ledger, rows.assign(regret=1.0), max_regret=0.05)
    planted.ledger.close()


def test_a_cooldown_that_would_begin_now_lowers_the_loss_and_its_cost_is_counted(make_study: MakeStudy) -> None:
    planted = PlantedPlan(make_study())
    ledger, plan = planted.ledger, planted.plan
    rows = write_ladder(ledger, numerics_of(planted.config), planted.config)
    schedules = LadderSchedules.of(ledger, rows, max_regret=0.05)
    ledger.record_result(ResultKind.PROMOTION_STARTED, plan.key, {"at": "2026-01-01T00:00:00+00:00"})
    with pytest.raises(StageError, match=plan.key):
        anneal_now(ledger, schedules, level=0.9)
    planted.directory.mkdir(parents=True)
    steps = plan.n_tokens // BATCH // 2
    lines = [
        json.dumps({"tokens": step * BATCH, "train_loss": 2.2 + 1 / step, "seconds": 0.5 * step}) + "\n"
        for step in range(1, steps + 1)
    ]
    (planted.directory / METRICS).write_text("".join(lines))
    found = anneal_now(ledger, schedules, shares=(0.1, 0.5), level=0.9)
    tokens = steps * BATCH
    assert (found.run, found.tokens, found.planned) == (plan.key, tokens, plan.n_tokens)
    table = found.table
    assert table["tokens"].to_list() == [round(tokens * 1.1), round(tokens * 1.5)]
    assert table["saved"].to_list() == [plan.n_tokens - end for end in table["tokens"]]
    np.testing.assert_allclose(table["seconds"], np.array([0.1, 0.5]) * tokens * 0.5 / BATCH)
    now = SoFar.of([(plan.key, tokens)], ledger.directory, ledger, schedules.offset).curve["loss"].dropna().iloc[-1]
    assert (table["loss"] < now).all()
    assert (table["low"] < table["loss"]).all()
    assert (table["loss"] < table["high"]).all()
    assert found.reasons, "one schedule does not show what another is worth"
    assert json.loads(json.dumps(found.to_dict()))["table"][0]["share"] == 0.1
    with pytest.raises(StageError, match="why"):
        anneal_now(ledger, "why", level=0.9)
    ledger.close()
