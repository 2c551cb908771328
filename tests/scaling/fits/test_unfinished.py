"""A run without a loss is left out and named, whichever function reads the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaling import fit, fit_envelope, fit_mixture, fit_two_step
from scaling.fits.unfinished import finished
from tests.scaling.conftest import planted_ladder
from tests.scaling.fits.test_units import ladder
from tests.scaling.mixtures.test_mixtures import table as mixtures

OPTIONS: dict[str, Any] = {"n_params_convention": "total", "n_bootstrap": 5}


def tasks() -> pd.DataFrame:
    rows = ladder(14).rename(columns={"loss": "task_loss"})
    return rows.assign(accuracy=1 / (1 + np.exp(3 * (rows["task_loss"] - 2.5))))


def curves() -> pd.DataFrame:
    parts = []
    for run, n_params in enumerate(np.geomspace(1e7, 1e9, 8)):
        n_tokens = np.geomspace(n_params, 1000 * n_params, 40)
        loss = 1.7 + 400 / n_params**0.34 + 410 / n_tokens**0.28
        parts.append(pd.DataFrame({"run": run, "n_params": n_params, "n_tokens": n_tokens, "loss": loss}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("cell", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("rows", "column", "read", "notes"),
    [
        (ladder(14), "loss", lambda rows: fit(rows, **OPTIONS), lambda law: law.assumptions),
        (curves(), "loss", lambda rows: fit_envelope(rows, **OPTIONS), lambda powers: powers.assumptions),
        (tasks(), "task_loss", lambda rows: fit_two_step(rows, **OPTIONS), lambda both: both.loss.assumptions),
        (mixtures(12), "loss_code", fit_mixture, lambda law: law.notes),
    ],
    ids=["fit", "fit_envelope", "fit_two_step", "fit_mixture"],
)
def test_a_row_without_a_loss_changes_nothing_and_is_named(
    rows: pd.DataFrame,
    column: str,
    read: Callable[[Any], Any],
    notes: Callable[[Any], tuple[str, ...]],
    cell: float,
    tmp_path: Path,
) -> None:
    crashed = rows.assign(**{column: rows[column].where(rows.index != 3, cell)})
    crashed.to_csv(tmp_path / "runs.csv", index=False)
    found, without = read(tmp_path / "runs.csv"), read(rows.drop(index=3))
    assert sum("(3)" in note for note in notes(found)) == 1
    assert "(3)" in str(found)
    values, same = found.to_dict(), without.to_dict()
    for kept in ("draws", "points", "numbers"):
        np.testing.assert_equal(values.get(kept), same.get(kept))


def test_a_note_of_how_a_column_was_read_survives_a_second_reading() -> None:
    renamed = tasks().rename(columns={"n_params": "params"})
    assert any("column params" in text for text in fit_two_step(renamed, **OPTIONS).loss.assumptions)


def test_a_column_that_is_mostly_empty_is_refused() -> None:
    rows = pd.DataFrame({"task_loss": [1.0, None, None], "other": 1.0})
    with pytest.raises(ValueError, match="task_loss .*2 of 3 .*row 1"):
        finished(rows, "other", "task_loss")


def test_runs_whose_state_is_not_finished_are_doubtful() -> None:
    ladder = planted_ladder()
    states = np.where(np.arange(len(ladder)) < 2, "crashed", "finished")
    found = fit(ladder.assign(State=states), n_params_convention="total", n_bootstrap=2)
    assert found.status == "doubtful"
    assert any("crashed" in warning for warning in found.warnings)
    for same in ("finished", "crashed"):
        assert fit(ladder.assign(State=same), n_params_convention="total", n_bootstrap=2).status == "ok"
