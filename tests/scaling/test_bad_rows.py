"""Rows of any kind are fitted or refused with a ValueError that names the column; nothing else comes out."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaling import ScalingError, fit
from scaling.fits.runs import OPTIONAL
from tests.scaling.fits.test_units import ladder

CELLS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=1)
)
COLUMNS = ("n_params", "n_tokens", "loss", *OPTIONAL)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    column=st.sampled_from(COLUMNS),
    cells=st.lists(CELLS, min_size=1, max_size=14),
    in_file=st.booleans(),
)
def test_any_cells_in_any_column_are_fitted_or_refused(
    tmp_path: Path, column: str, cells: list[object], in_file: bool
) -> None:
    table = ladder(14).astype(object)
    values: list[object] = list(table[column]) if column in table else [None] * 14
    table[column] = pd.Series([*cells, *values[len(cells) :]], dtype=object)
    source: object = table
    if in_file:
        source = tmp_path / "rows.jsonl"
        lines = [json.dumps(dict(zip(table, row, strict=True))) for row in table.to_numpy().tolist()]
        source.write_text("\n".join(lines))
    with suppress(ValueError, ScalingError):  # hypothesis shows the cells at any other error
        assert np.isfinite(fit(source, n_params_convention="total", n_bootstrap=2).law.parameters["E"])


def test_a_column_that_is_there_twice_is_refused() -> None:
    table = ladder(14)
    twice = pd.concat([table, table[["loss"]]], axis=1)
    with pytest.raises(ValueError, match="column loss .* 2 times"):
        fit(twice, n_params_convention="total")


def test_a_column_of_another_quantity_is_not_suggested_for_a_missing_one() -> None:
    table = ladder(14)
    others = {"batch_size_tokens": 5e5, "weight_decay": 0.1, "tokens_per_second": 1e4}
    with pytest.raises(ValueError, match="missing column n_params, n_tokens") as refused:
        fit(table.drop(columns=["n_params", "n_tokens"]).assign(**others), n_params_convention="total")
    assert "rename" not in str(refused.value)
    with pytest.raises(ValueError, match="rename seen_tokens to n_tokens"):
        fit(table.rename(columns={"n_tokens": "seen_tokens"}).assign(**others), n_params_convention="total")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 100, bytes(1000)])
def test_a_broken_parquet_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows.parquet: can't be read as a table: "):
        fit(path, n_params_convention="total")


def test_counts_that_nothing_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n_tokens .*got 1e\+300 in row 0"):
        fit(ladder(14).assign(n_tokens=1e300), n_params_convention="total")
