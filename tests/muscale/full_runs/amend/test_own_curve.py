"""What an amended run's lineage has measured, and its weight in the second forecast."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale.full_runs.amend.amendment import Amendment
from muscale.full_runs.amend.second_forecast import SecondForecast, second_forecast
from muscale.full_runs.amend.so_far import SoFar
from muscale.layout import CORPUS, FULL_RUNS, METRICS
from muscale.plans.ladder_schedules import LadderSchedules
from scaling import fit_schedules
from tests.muscale.full_runs.amend.conftest import BATCH, STEPS, Case
from tests.muscale.planted import planted_fit
from tests.scaling.schedules.test_schedule_law import LENGTH, PEAK, PLANTED, WARMUP, schedule

END, HALF = STEPS * BATCH, STEPS // 2 * BATCH
OFFSET = 0.01


def copied(case: Case, folder: Path, rows: list[dict[str, float]]) -> Amendment:
    """The amendment at half of the plan's run, in a copy of its folder with these metrics."""
    path = folder / FULL_RUNS / case.plan.key / METRICS
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / CORPUS).symlink_to(case.directory / CORPUS)
    amendment = case.amended(parent__run=case.plan.key, parent__tokens=HALF)
    corpus = replace(amendment.corpus, folder=folder / amendment.corpus.folder.relative_to(case.directory))
    return replace(amendment, directory=folder, corpus=corpus)


def so_far(case: Case, folder: Path, rows: list[dict[str, float]]) -> SoFar:
    amendment = copied(case, folder, rows)
    return SoFar.of([(case.plan.key, HALF)], amendment.directory, case.ledger, OFFSET)


def test_enough_held_out_losses_are_the_curve_and_it_ends_at_the_checkpoint(case: Case, tmp_path: Path) -> None:
    tokens = np.arange(1, 21) * (HALF // 20)
    logs = 1.5 - 0.02 * np.arange(20) + 0.001 * (-1.0) ** np.arange(20)
    rows = [
        {"tokens": int(t), "train_loss": 9.0, "val_loss": math.exp(log)} for t, log in zip(tokens, logs, strict=True)
    ]
    curve = so_far(case, tmp_path, rows).curve
    assert curve["tokens"].to_list() == [*tokens, HALF]
    np.testing.assert_allclose(curve["loss"][:-1], np.exp(logs))
    assert math.isnan(curve["loss"].iloc[-1])
    assert (curve["lr"].iloc[-2:] > 0).all()
    # Each value lies .002 from the line through its neighbours: of independent ones, √1.5 times their spread in the median's sense.
    np.testing.assert_allclose(curve["noise"][:-1], 0.004 / 0.6745 / math.sqrt(6))


def test_few_held_out_losses_set_the_level_of_the_training_losses(case: Case, tmp_path: Path) -> None:
    trained = [{"tokens": step * BATCH, "train_loss": 4.0} for step in range(1, STEPS // 2 + 1)]
    held_out = [*trained[:-1], {**trained[-1], "val_loss": 4.4}]
    np.testing.assert_allclose(so_far(case, tmp_path / "a", held_out).curve["loss"].dropna(), 4.4)
    by_ladder = so_far(case, tmp_path / "b", trained)
    np.testing.assert_allclose(by_ladder.curve["loss"].dropna(), 4.0 * math.exp(OFFSET))
    assert [row["tokens"] for row in by_ladder.losses] == [t for t in by_ladder.curve["tokens"][:-1] if t > HALF / 2]


def planted_law(case: Case) -> LadderSchedules:
    """A law of three planted schedules of the plan's size and length."""
    group = {"n_params": float(case.plan.n_params), "length": float(END)}
    curves = [schedule(kind).assign(loss=lambda rows: PLANTED.predict(rows)) for kind in ("constant", "cosine", "wsd")]
    table = pd.concat(curves, ignore_index=True).iloc[::2].assign(**group)
    table["step"] *= END / LENGTH
    return LadderSchedules(law=fit_schedules(table, warmup_share=WARMUP / LENGTH), warmup=WARMUP / LENGTH, offset=0.0)


def test_the_run_s_own_curve_moves_the_forecast_by_its_weight(case: Case, tmp_path: Path) -> None:
    schedules = planted_law(case)
    amendment = copied(case, tmp_path, [])
    positions = np.linspace(0.1, 1, 30) * HALF
    whole = schedules.path(
        pd.DataFrame({"tokens": positions, "lr": amendment.segments[0].recipe.learning_rate, "loss": 1.0}),
        amendment.segments,
        HALF,
        length=END,
    )
    in_steps = whole.assign(step=whole["step"] * LENGTH / END, lr=whole["lr"] / whole["lr"].max() * PEAK)
    truth = 1.02 * PLANTED.predict(in_steps)
    rows = [
        {"tokens": int(step), "train_loss": 9.0, "val_loss": loss}
        for step, loss in zip(whole["step"], truth, strict=True)
        if step <= HALF
    ]
    amendment = copied(case, tmp_path / "measured", rows)
    law = planted_fit().forecast(case.plan.n_params, END, level=0.9)
    by_law = second_forecast(amendment, planted_fit(), case.ledger, level=0.9, schedules=lambda: "none")
    found = second_forecast(amendment, planted_fit(), case.ledger, level=0.9, schedules=lambda: schedules)
    assert isinstance(by_law, SecondForecast)
    assert isinstance(found, SecondForecast)
    assert by_law.by_curve is None
    assert found.by_curve is not None
    assert found.by_curve == pytest.approx(truth[-1], rel=0.005)
    one, other = sorted((law.loss, found.by_curve))
    assert one < found.loss < other
    assert found.correction == pytest.approx(math.log(found.loss / law.loss))
    assert math.log(found.high / found.loss) > 0.3 * math.log(other / one), "they disagree, so the interval is wide"
