"""Rows in bits among rows in nats are found by the factor between them, and no public ladder is suspected."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scaling import fit
from scaling.fits.units import LEAST_ROWS, rows_in_bits


def ladder(rows: int, *, noise: float = 0.003, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    n_params, n_tokens = 10 ** generator.uniform(7, 9.5, rows), 10 ** generator.uniform(8.5, 11, rows)
    loss = (1.7 + 400 / n_params**0.34 + 410 / n_tokens**0.28) * np.exp(noise * generator.standard_normal(rows))
    return pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss})


def suspected(table: pd.DataFrame) -> object:
    return rows_in_bits(*(table[name].to_numpy(dtype=float) for name in ("n_params", "n_tokens", "loss")))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_fit_names_the_rows_that_are_in_bits(share: float) -> None:
    table = ladder(40)
    mixed = table.assign(loss=table["loss"].where(np.arange(40) >= share * 40, table["loss"] / math.log(2)))
    found = suspected(mixed)
    assert found is not None
    np.testing.assert_array_equal(found, np.arange(40) < share * 40)
    (warning,) = (text for text in fit(mixed, n_params_convention="total").warnings if "bits" in text)
    assert warning.startswith(f"{round(share * 40)} of 40 rows, the first of them")
    assert "by the factor 1.4427 of bits over nats" in warning
    assert not [text for text in fit(table, n_params_convention="total").warnings if "bits" in text]


@pytest.mark.parametrize("factor", [1.3, 1.6, 1 / math.log(2) * 1.05])
def test_groups_that_another_factor_parts_are_not_suspected(factor: float) -> None:
    table = ladder(40)
    assert suspected(table.assign(loss=table["loss"].where(np.arange(40) >= 15, table["loss"] * factor))) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_not_suspected(seed: int) -> None:
    assert suspected(ladder(LEAST_ROWS + seed, noise=0.1, seed=seed)) is None


def test_no_public_ladder_nor_any_part_of_one_is_suspected(public_tables: Path) -> None:
    parts = 0
    for path in sorted(public_tables.glob("*.csv")):
        table = pd.read_csv(path)
        if not {"n_params", "n_tokens", "loss"} <= set(table):
            continue
        table = table[np.isfinite(table["loss"]) & (table["loss"] > 0)]
        groups = [name for name in table if 1 < table[name].nunique() <= 6]
        for part in [table, *(part for name in groups for _, part in table.groupby(name))]:
            assert suspected(part) is None, path.name
            parts += 1
    assert parts > 60
