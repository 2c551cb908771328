"""Checkpoints of one training run are not runs of their own, whatever the column of runs is called."""

import numpy as np
import pandas as pd
import pytest

from scaling import fit
from scaling.errors import TooFewRunsError
from scaling.fits.runs import MID_RUN, check_runs, read_runs

SIZES = (53e6, 64e6, 160e6, 206e6, 323e6, 482e6)


def curves(columns: dict[str, str], lengths: tuple[float, ...] = (1.1e8,) * 6) -> pd.DataFrame:
    """Forty rows in mid-schedule for each of six runs, 3 % high at first."""
    rows = []
    for i, (n, per_row) in enumerate(zip(SIZES, lengths, strict=True)):
        for k in range(1, 41):
            d = k * per_row
            loss = 1.7 + 420 / n**0.34 + 900 / d**0.31 + 0.03 * (1 - k / 40)
            row = {name: what.format(i=i, step=100 * k) for name, what in columns.items()}
            rows.append({**row, "params": int(n), "train/tokens_seen": int(d), "val/loss": loss})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "columns",
    [
        {"Name": "m{i}", "ID": "x{i}", "_step": "{step}"},
        {"run": "m{i}"},
        {"run_name": "m{i}"},
        {"Run ID": "x{i}"},
        {"experiment": "m{i}", "step": "{step}"},
    ],
)
def test_the_last_row_of_each_run_is_kept(columns: dict[str, str]) -> None:
    table = curves(columns)
    found = check_runs(read_runs(table), ("n_params", "n_tokens"), max_regret=0.0025, loss_unit=None)
    assert found.rows["n_params"].tolist() == [*SIZES]
    assert set(found.rows["n_tokens"]) == {4.4e9}
    assert len(found.left_out) == 234
    assert set(found.left_out["reason"]) == {MID_RUN}


@pytest.mark.parametrize("columns", [{"run": "ID"}, {}])
def test_runs_that_differ_in_their_id_are_separate_whatever_names_they_share(columns: dict[str, str]) -> None:
    n, d = (grid.ravel() for grid in np.meshgrid(SIZES, (1e9, 2e9, 4e9, 8e9)))
    table = pd.DataFrame({"n_params": n, "n_tokens": d, "loss": 1.7 + 420 / n**0.34 + 900 / d**0.31})
    labels = {"ID": [f"x{i}" for i in range(len(n))], "Name": [f"ladder-{size:.0f}" for size in n], "_step": d / 1e6}
    found = fit(table.assign(**labels), n_params_convention="total", n_bootstrap=4, columns=columns)
    assert (found.n_rows, len(found.left_out)) == (24, 0)
    of_one_job = fit(table.assign(job_id=labels["Name"]), n_params_convention="total", n_bootstrap=4)
    assert (of_one_job.n_rows, of_one_job.status) == (24, "doubtful"), "a job may train several runs"


def test_curves_of_one_length_are_too_few_runs() -> None:
    with pytest.raises(TooFewRunsError):
        fit(curves({"Name": "m{i}", "ID": "x{i}", "_step": "{step}"}), n_params_convention="total", n_bootstrap=4)


@pytest.mark.parametrize("columns", [{"experiment": "m{i}"}, {}])
def test_what_may_be_curves_counts_as_one_run_each_and_is_doubtful(columns: dict[str, str]) -> None:
    table = curves(columns, tuple(np.geomspace(0.5e8, 4e8, 6)))
    found = fit(table, n_params_convention="total", n_bootstrap=4)
    assert found.n_stems == 6
    assert found.status == "doubtful"
    assert not found.forecast(2e9, 4e10).supported


def test_runs_of_a_ladder_stay_runs() -> None:
    n, d = (grid.ravel() for grid in np.meshgrid(SIZES, (1e9, 2e9, 4e9, 8e9)))
    table = pd.DataFrame({"id": range(24), "n_params": n, "n_tokens": d, "loss": 1.7 + 420 / n**0.34 + 900 / d**0.31})
    assert fit(table, n_params_convention="total", n_bootstrap=4).n_stems == 24


def test_a_column_of_row_names_does_not_hide_checkpoints() -> None:
    n, part = (grid.ravel() for grid in np.meshgrid(SIZES, range(1, 11)))
    d = part * 20 * n
    table = pd.DataFrame(
        {"n_params": n, "n_tokens": d, "loss": 1.7 + 420 / n**0.34 + 900 / d**0.31, "step": part * 1000}
    )
    uuid = [f"u{row}" for row in range(len(n))]
    named = table.assign(run_name=[f"size {size:g}" for size in n], uuid=uuid)
    assert read_runs(named).pipe(check_runs, (), max_regret=0.1, loss_unit=None).rows["n_tokens"].nunique() == len(
        SIZES
    )
    each = [f"size {size:g} step {number}" for size, number in zip(n, part, strict=True)]
    assert fit(table.assign(run_id=each), n_params_convention="total", n_bootstrap=4).status == "doubtful"
