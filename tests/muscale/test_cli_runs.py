"""`muscale runs`: safe terms, columns, sorting, two runs side by side, files."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from muscale.errors import RunSelectionError
from muscale.store.run_comparison import RunComparison
from muscale.store.run_selection import Selection, one_run, save, widened


def row(key: str, loss: float, **changes: Any) -> dict[str, Any]:
    """A row as `Ledger.runs` gives it."""
    usual = {
        "purpose": "ladder",
        "key": key,
        "stem": "s",
        "d_model": 32,
        "n_params": 1000,
        "n_tokens": 4096,
        "seed": 0,
        "learning_rate": 0.01,
        "hyperparameters": {"learning_rate": 0.01, "optimizer": "adamw", "zero_readout": False, "swap_fraction": 0.0},
        "label": "a run",
        "created_at": "2026-01-02T00:00:00",
        "loss": loss,
        "source_losses": {},
        "diverged_because": None,
        "seconds": 1.5,
        "numerics": {"model": {"d_model": 32}, "seed": 0, "corpus_key": "c"},
        "segment": {},
        "environment": {"host": "a"},
    }
    return {**usual, **changes}


@pytest.fixture
def runs() -> pd.DataFrame:
    tuned = {"learning_rate": 0.02, "optimizer": "lion", "zero_readout": True, "swap_fraction": 0.0}
    return pd.DataFrame(
        [
            row("aa11", 2.5),
            row("aa22", 1.5, n_tokens=8192, hyperparameters=tuned, learning_rate=0.02, environment={"host": "b"}),
            row("bb33", float("nan"), purpose="sweep", label="x and y"),
        ]
    )


@pytest.mark.parametrize(
    ("terms", "keys"),
    [
        (("loss<2",), ["aa22"]),
        (("loss <= 2.5", "purpose=ladder"), ["aa11", "aa22"]),
        (("purpose == 'ladder' and loss > 2",), ["aa11"]),
        (("label = 'x and y'",), ["bb33"]),
        (("loss!=1.5",), ["aa11", "bb33"]),
        (("n_tokens>=8_192",), ["aa22"]),
        (("optimizer=lion",), ["aa22"]),
        (("zero_readout=true",), ["aa22"]),
        (("created_at<2026-02",), ["aa11", "aa22", "bb33"]),
        (("loss<0",), []),
    ],
)
def test_terms_choose_rows(runs: pd.DataFrame, terms: tuple[str, ...], keys: list[str]) -> None:
    assert list(Selection(where=terms).of(runs)["key"]) == keys


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"where": ("los<2",)}, "no column los; did you mean loss?"),
        ({"where": ("loss<two",)}, "loss is a number, got 'two'"),
        ({"where": ("loss",)}, "a term is COLUMN"),
        ({"where": ("loss<2 and ",)}, "a term is COLUMN"),
        ({"where": ("@pd.io=1",)}, "a term is COLUMN"),
        ({"where": ("__import__('os').system('true')=1",)}, "a term is COLUMN"),
        ({"where": ("key.str=1",)}, "no column key.str"),
        ({"sort": "-lost"}, "--sort -lost: there is no column lost; did you mean loss?"),
        ({"columns": ("key,wat",)}, "--columns wat: there is no column wat; there are purpose, key"),
        ({"limit": 0}, "--limit: must be at least 1, got 0"),
    ],
)
def test_what_is_no_term_or_no_column_is_refused(runs: pd.DataFrame, selection: dict[str, Any], message: str) -> None:
    with pytest.raises(RunSelectionError) as refusal:
        Selection(**selection).of(runs)
    assert message in str(refusal.value)


def test_rows_are_sorted_and_limited_and_columns_chosen(runs: pd.DataFrame) -> None:
    assert list(Selection(sort="loss").of(runs)["key"]) == ["aa22", "aa11", "bb33"]
    assert list(Selection(sort="-loss").of(runs)["key"]) == ["aa11", "aa22", "bb33"], "missing losses come last"
    chosen = Selection(sort="loss", limit=1, columns=("key,optimizer", "loss")).of(runs)
    assert chosen.to_dict("records") == [{"key": "aa22", "optimizer": "lion", "loss": 1.5}]
    plain = Selection().of(runs)
    assert "hyperparameters" not in plain
    assert "optimizer" not in plain
    assert Selection().of(runs.iloc[:0]).empty


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_is_read_back_from_its_file(runs: pd.DataFrame, tmp_path: Path, suffix: str) -> None:
    path = save(widened(runs), tmp_path / f"runs{suffix}")
    read = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    assert list(read["key"]) == ["aa11", "aa22", "bb33"]
    assert list(read["optimizer"]) == ["adamw", "lion", "adamw"]
    assert read["loss"].isna().tolist() == [False, False, True]


def test_a_file_of_another_kind_is_refused(runs: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(RunSelectionError, match=r"must end in .csv or .parquet"):
        save(runs, tmp_path / "runs.xlsx")
    with pytest.raises(RunSelectionError, match="there is no folder"):
        save(runs, tmp_path / "none" / "runs.csv")


def test_two_runs_are_compared(runs: pd.DataFrame) -> None:
    found = RunComparison.of(runs, "aa11", "aa2")
    assert found.settings == {
        "n_tokens": (4096, 8192),
        "learning_rate": (0.01, 0.02),
        "optimizer": ("adamw", "lion"),
        "zero_readout": (False, True),
    }
    assert found.environment == {"host": ("a", "b")}
    assert found.difference == pytest.approx(-1.0)
    assert "-1.0000 (-40.00%)" in str(found)
    diverged = RunComparison.of(runs, "aa1", "bb")
    assert diverged.difference is None
    assert "diverged" in str(diverged)
    assert diverged.to_dict()["losses"] == (2.5, None)
    assert "equal" in str(RunComparison.of(runs, "aa11", "aa11"))


def test_a_key_must_mean_one_run(runs: pd.DataFrame) -> None:
    assert one_run(runs, "b")["key"] == "bb33"
    shared = pd.concat([runs, runs[runs["key"] == "bb33"].assign(purpose="ladder")])
    assert one_run(shared, "bb33")["key"] == "bb33", "a run of two stages has a row for each"
    with pytest.raises(RunSelectionError, match=r"'aa'.*2 runs \(aa11, aa22\):"):
        one_run(runs, "aa")
    for nothing in ("zz", ""):
        with pytest.raises(RunSelectionError, match="no run's key begins with"):
            one_run(runs, nothing)
