"""Several learning rates of one (N, D): the best alone informs the law, and repeats over seeds stay repeats."""

import numpy as np
import pandas as pd
import pytest

from scaling import fit
from scaling.fits.runs import ASSUMED


def searched(column: str = "lr", values: tuple[object, ...] = (0.001, 0.004, 0.016)) -> pd.DataFrame:
    """Three values in each of 16 cells; the second is the best, on the law."""
    rows = []
    for n in (190e6, 370e6, 760e6, 1.3e9):
        for ratio in (10, 20, 40, 100):
            loss = 1.7 + 420 / n**0.34 + 900 / (ratio * n) ** 0.31
            for value, above in zip(values, (0.05, 0.0, 0.03), strict=True):
                rows.append({"n_params": n, "n_tokens": ratio * n, column: value, "loss": loss + above})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("lr", (0.001, 0.004, 0.016)),
        ("Learning Rate", (0.001, 0.004, 0.016)),
        ("config/batch_size", (64, 128, 256)),
        ("optimizer", ("sgd", "adamw", "lion")),
        ("peak_learning_rate", (0.001, 0.004, 0.016)),
        ("optim/adam_lr", (0.001, 0.004, 0.016)),
        ("global_bs", (64, 128, 256)),
        ("variant", ("base", "wide", "deep")),
        ("arm", ("base", "wide", "deep")),
    ],
)
def test_the_best_of_each_cell_is_kept(column: str, values: tuple[object, ...]) -> None:
    table = searched(column, values)
    found = fit(table, n_params_convention="total", n_bootstrap=4)
    assert len(found.left_out) == 32
    assert ASSUMED["regret"] not in found.assumptions
    assert sorted(found.rows.index) == table.index[table[column] == values[1]].tolist()
    best = table[table[column] == values[1]]
    assert found.law.parameters == fit(best, n_params_convention="total", n_bootstrap=4).law.parameters


def test_repeats_over_seeds_stay_repeats() -> None:
    table = searched("seed", (0, 1, 2))
    assert fit(table, n_params_convention="total", n_bootstrap=4).n_rows == 48
    both = pd.concat([searched().assign(seed=seed, loss=lambda t, s=seed: t["loss"] + 0.001 * s) for seed in (0, 1)])
    found = fit(both.reset_index(drop=True), n_params_convention="total", n_bootstrap=4)
    assert found.n_rows == 32
    assert np.all(both.reset_index(drop=True)["lr"].iloc[found.rows.index] == 0.004)


@pytest.mark.parametrize("column", ["eval_batch_size", "per_device_batch_size", "config/micro_bs"])
def test_what_changes_no_loss_is_no_recipe(column: str) -> None:
    table = searched("seed", (0, 1, 2)).assign(**{column: lambda rows: 8 * (1 + rows["seed"])})
    assert fit(table, n_params_convention="total", n_bootstrap=4).n_rows == 48
