"""Rows of any kind are fitted or refused with a ValueError that names the column; nothing else comes out."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaling import ScalingError, compare_variants, fit, fit_envelope, fit_mixture, fit_score, signal_to_noise
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


def _runs() -> pd.DataFrame:
    """Five sizes at three lengths over two seeds, with a task's score, and as mixtures and variants."""
    rng = np.random.default_rng(0)
    n, d, seed = (each.ravel() for each in np.meshgrid(np.geomspace(2e7, 1e9, 5), np.geomspace(1e9, 3e10, 3), (0, 1)))
    loss = (1.7 + 400 / n**0.34 + 1500 / d**0.33) * np.exp(0.002 * rng.standard_normal(n.size))
    share = rng.uniform(0.1, 0.9, n.size)
    table = pd.DataFrame({"n_params": n, "n_tokens": d, "seed": seed, "loss": loss, "task_loss": loss})
    table = table.assign(variant=np.where(seed, "new", "old"), run=[f"{size:g}" for size in n])
    table["accuracy"] = 0.25 + 0.75 / (1 + np.exp(3 * (loss - 2.9))) + 0.005 * rng.standard_normal(n.size)
    return table.assign(weight_code=share, weight_web=1 - share, loss_code=3 - 0.3 * share + 0.1 * loss)


_MIXED = ["weight_code", "weight_web", "loss_code", "n_params", "n_tokens"]
READERS: dict[str, Callable[[pd.DataFrame], float]] = {
    "score": lambda rows: fit_score(rows.drop(columns="loss"), chance=0.25).forecast(3e9, 6e10).value,
    "signal": lambda rows: signal_to_noise(rows.drop(columns=["loss", "run"])).noise,
    "mixture": lambda rows: (
        fit_mixture(rows[[*_MIXED, *rows.columns.intersection(["left_out", "annealed"])]]).best().value
    ),
    "variants": lambda rows: compare_variants(rows.drop(columns=["seed", "run"]), "old").table["multiplier"].item(),
    "envelope": lambda rows: fit_envelope(rows, n_params_convention="total", n_bootstrap=2).params_exponent,
}


@pytest.mark.parametrize("column", ["left_out", "annealed"])
@pytest.mark.parametrize("reader", READERS)
def test_rows_that_the_table_leaves_out_change_no_result(reader: str, column: str) -> None:
    if (reader, column) == ("envelope", "annealed"):
        pytest.skip("an envelope goes through unfinished losses, with a warning")
    runs = _runs()
    kept, out = ("", "contaminated") if column == "left_out" else (True, False)
    wrong = runs.iloc[::3].assign(seed=7, accuracy=0.3, task_loss=4.0, loss=4.0, loss_code=4.0)
    both = pd.concat([runs.assign(**{column: kept}), wrong.assign(**{column: out})], ignore_index=True)
    assert READERS[reader](both) == pytest.approx(READERS[reader](runs), rel=1e-9)


def test_a_size_of_the_vocabulary_that_is_no_number_stops_no_fit() -> None:
    """The column only serves a warning."""
    sizes = pd.Series([50_000.0, None, "32k", float("inf"), 0, -1, *[2] * 8], dtype=object)

    def warnings(**columns: object) -> tuple[str, ...]:
        return fit(ladder(14).assign(**columns), n_params_convention="total", n_bootstrap=2).warnings

    assert warnings(vocab_size=sizes.where(sizes != 2, 50_000)) == warnings()
    assert len(warnings(vocab_size=sizes)) == len(warnings()) + 1
