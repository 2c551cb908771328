"""A loss curve that was torn or in which a bit flipped is named, and its run left out of what is made from curves."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest

from muscale import StudyConfig
from muscale.layout import CURVES, LEDGER
from muscale.proxies.ladder_curves import read_curves
from muscale.store.ledger import Ledger
from tests.faults.damage import flip, tear
from tests.muscale.planted_ladder import numerics_of, write_ladder

MakeStudy = Callable[..., Path]


def flip_a_loss(path: Path) -> None:
    """Change one bit in the last bytes of the losses' column."""
    columns = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    losses = next(
        columns.column(n) for n in range(columns.num_columns) if columns.column(n).path_in_schema == "train_loss"
    )
    begins = losses.dictionary_page_offset or losses.data_page_offset
    flip(path, begins + losses.total_compressed_size - 3)


@pytest.mark.parametrize("damage", [tear, flip_a_loss])
def test_a_damaged_curve_is_named_and_its_run_left_out(
    make_study: MakeStudy, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    config = StudyConfig.read(path := make_study())
    ledger = Ledger(path.parent / LEDGER)
    keys = list(write_ladder(ledger, numerics_of(config), config)["key"])
    for key in keys:  # as a worker writes them
        file = ledger.directory / CURVES / f"{key}.parquet"
        if file.exists():
            pd.read_parquet(file).to_parquet(file, index=False, write_page_checksum=True)
    whole = read_curves(ledger, keys)
    damaged = ledger.directory / CURVES / f"{keys[2]}.parquet"
    damage(damaged)
    caplog.set_level(logging.WARNING)
    assert len(read_curves(ledger, keys)) == len(whole) - 1
    assert any(str(damaged) in message and "its run is left out" in message for message in caplog.messages)


def test_a_worker_s_curve_carries_checksums_of_its_pages(study: Path) -> None:
    path = sorted((study / CURVES).glob("*.parquet"))[0]
    whole, curve = path.read_bytes(), pd.read_parquet(path, columns=["tokens", "train_loss"])
    chance, counts = random.Random(0), Counter[str]()
    for _ in range(150):
        flip(path, chance.randrange(len(whole)), chance.randrange(8))
        try:
            read = pd.read_parquet(path, columns=["tokens", "train_loss"], page_checksum_verification=True)
            counts["harmless" if read.equals(curve) else "altered"] += 1
        except Exception:  # whatever layer notices
            counts["noticed"] += 1
        path.write_bytes(whole)
    assert counts["altered"] <= 3, f"the footer alone has no checksum: {counts}"
