"""Tables as people have them mean what the plain table means, or are refused by column, row and value; what was read how is noted."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import fit
from scaling.fits.as_found import BYTES, NOTES, PF_DAY
from scaling.fits.runs import check_runs, read_runs
from scaling.forms.law import compute_flops
from tests.scaling.conftest import planted_ladder
from tests.scaling.fits.test_units import ladder

PLAIN = ladder(14)[["n_params", "n_tokens", "loss"]].round({"n_params": -4, "n_tokens": -4})
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def rows_of(table: Any, **options: Any) -> pd.DataFrame:
    return check_runs(read_runs(table), (), **{"max_regret": 1.0, "loss_unit": None, **options}).rows


def written(value: float, style: str) -> object:
    """A count as tables print it."""
    if style == "commas":
        return f"{round(value):,}"
    if style == "underscores":
        return f"{round(value):_}"
    if style == "B tokens":
        return f"{value / 1e9:.10g} B tokens"
    if style in UNITS:
        return f"{value / UNITS[style]:.10g}{style}"
    return value if style == "number" else f"{value:.10e}"


@settings(max_examples=60, deadline=None)
@given(
    styles=st.lists(
        st.sampled_from(["commas", "underscores", "number", "text", "B tokens", *UNITS]), min_size=28, max_size=28
    ),
    names=st.tuples(
        st.sampled_from(["n_params", "Params", "# params", "N", "num-parameters"]),
        st.sampled_from(["n_tokens", "Tokens", "D", "training tokens"]),
        st.sampled_from(["loss", "val/loss", "Final Loss"]),
    ),
    as_list=st.booleans(),
)
def test_counts_in_any_writing_are_the_same_runs(styles: list[str], names: tuple[str, ...], as_list: bool) -> None:
    table: Any = pd.DataFrame(
        {
            names[0]: [written(v, s) for v, s in zip(PLAIN["n_params"], styles[:14], strict=True)],
            names[1]: [written(v, s) for v, s in zip(PLAIN["n_tokens"], styles[14:], strict=True)],
            names[2]: PLAIN["loss"],
        }
    )
    found = rows_of(table.to_dict("records") if as_list else table)
    for name in PLAIN:
        np.testing.assert_allclose(found[name], rows_of(PLAIN)[name], rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    unit=st.sampled_from([*UNITS]),
    header=st.sampled_from(["Params ({})", "n_params_{}", "parameters [in {}]", "N ({})"]),
    tokens=st.sampled_from(["Tokens ({})", "n_tokens_{}", "D [{}]"]),
    commas=st.booleans(),
)
def test_columns_in_millions_are_scaled(unit: str, header: str, tokens: str, commas: bool) -> None:
    in_unit = PLAIN[["n_params", "n_tokens"]] / UNITS[unit]
    cells = in_unit.map("{:,.10f}".format) if commas else in_unit
    found = read_runs(cells.set_axis([header.format(unit), tokens.format(unit)], axis=1).assign(loss=PLAIN["loss"]))
    np.testing.assert_allclose(found["n_params"], PLAIN["n_params"], rtol=1e-9)
    np.testing.assert_allclose(found["n_tokens"], PLAIN["n_tokens"], rtol=1e-9)
    assert len(found.attrs[NOTES]) == 2


@pytest.mark.parametrize(
    ("name", "unit"), [("PF-days", PF_DAY), ("compute (PF-days)", PF_DAY), ("petaflop/s-days", PF_DAY), ("FLOPs", 1.0)]
)
def test_tokens_follow_from_compute_with_a_note(name: str, unit: float) -> None:
    table = PLAIN.assign(**{name: compute_flops(PLAIN["n_params"], PLAIN["n_tokens"]) / unit}).drop(columns="n_tokens")
    np.testing.assert_allclose(read_runs(table)["n_tokens"], PLAIN["n_tokens"])
    result = fit(table, n_params_convention="total", n_bootstrap=2)
    assert f"n_tokens is {name} / (6·n_params): C = 6·N·D" in str(result)
    some = PLAIN.assign(flops=compute_flops(PLAIN["n_params"], PLAIN["n_tokens"]))
    some.loc[3, "n_tokens"] = math.nan
    np.testing.assert_allclose(rows_of(some)["n_tokens"], rows_of(PLAIN)["n_tokens"])
    by_ratio = PLAIN.assign(tokens_per_param=PLAIN["n_tokens"] / PLAIN["n_params"]).drop(columns="n_tokens")
    np.testing.assert_allclose(rows_of(by_ratio)["n_tokens"], rows_of(PLAIN)["n_tokens"])


@pytest.mark.parametrize(
    ("name", "separator", "decimal"),
    [("a.tsv", "\t", "."), ("a.csv", "\t", "."), ("a.csv", ";", ","), ("a.csv", ";", ".")],
)
def test_files_are_read_by_the_separator_that_they_have(
    name: str, separator: str, decimal: str, tmp_path: Path
) -> None:
    PLAIN.to_csv(tmp_path / name, sep=separator, decimal=decimal, index=False)
    pd.testing.assert_frame_equal(rows_of(tmp_path / name), rows_of(PLAIN))


def test_an_export_of_wandb_with_blank_rows_is_the_same_runs(tmp_path: Path) -> None:
    names = {"n_params": "model.num_params", "n_tokens": "train/tokens_seen", "loss": "eval/loss"}
    blank = pd.concat([PLAIN.rename(columns=names), pd.DataFrame([{}] * 3)], ignore_index=True)
    blank.assign(state="finished").to_csv(tmp_path / "wandb.csv")
    pd.testing.assert_frame_equal(rows_of(tmp_path / "wandb.csv"), rows_of(PLAIN), check_index_type=False)
    pd.testing.assert_frame_equal(
        rows_of(PLAIN.set_index(["n_params", "n_tokens"])).reset_index(drop=True), rows_of(PLAIN).reset_index(drop=True)
    )


def test_a_column_of_bits_per_byte_states_its_unit() -> None:
    per_byte = PLAIN[["n_params", "n_tokens"]].assign(val_bpb=PLAIN["loss"] / math.log(2) / 4, **{"Bytes per token": 4})
    found = check_runs(read_runs(per_byte), (), max_regret=1.0, loss_unit=None)
    np.testing.assert_allclose(found.rows["loss"], rows_of(PLAIN)["loss"])
    assert not any("nats per token, as no loss_unit" in text for text in found.assumptions)


@pytest.mark.parametrize("spelling", ["bits", "Bits/token", "bits per token"])
def test_spellings_of_bits(spelling: str) -> None:
    bits = PLAIN.assign(loss=PLAIN["loss"] / math.log(2))
    np.testing.assert_allclose(rows_of(bits, loss_unit=spelling)["loss"], rows_of(PLAIN)["loss"])


def test_bits_per_byte_become_nats_per_token_where_the_bytes_are_known() -> None:
    of_bytes = np.linspace(3.5, 4.5, 14)
    per_byte = PLAIN.assign(loss=PLAIN["loss"] / math.log(2) / of_bytes, **{BYTES: of_bytes})
    found = check_runs(read_runs(per_byte), (), max_regret=1.0, loss_unit="bpb")
    assert found.loss_unit == "nats per token"
    np.testing.assert_allclose(found.rows["loss"], rows_of(PLAIN)["loss"])
    alone = check_runs(read_runs(per_byte.drop(columns=BYTES)), (), max_regret=1.0, loss_unit="bpb")
    assert alone.loss_unit == "bits per byte"


def test_an_assumed_unit_is_in_the_first_line_and_asked_for_where_the_floor_is_too_high() -> None:
    result = fit(PLAIN, n_params_convention="total", n_bootstrap=2)
    assert "nats per token (assumed: no loss_unit was given)" in str(result).splitlines()[0]
    stated = fit(PLAIN, n_params_convention="total", n_bootstrap=2, loss_unit="nats")
    assert "assumed" not in str(stated).splitlines()[0]
    high = PLAIN.assign(loss=2 * PLAIN["loss"])
    assert any("set loss_unit='bits'" in text for text in fit(high, n_params_convention="total", n_bootstrap=2).caveats)
    stated = fit(high, n_params_convention="total", n_bootstrap=2, loss_unit="nats")
    assert not any("loss_unit" in text for text in stated.caveats)


def test_a_loss_above_the_vocabulary_is_asked_about() -> None:
    table = PLAIN.assign(vocab_size=np.exp(PLAIN["loss"].max() - 0.1))
    found = check_runs(read_runs(table), (), max_regret=1.0, loss_unit=None)
    assert any(
        "worse than a uniform guess among its vocabulary: are the losses bits" in text for text in found.warnings
    )


def test_a_repeated_row_is_no_further_run() -> None:
    law = fit(
        pd.concat([PLAIN.iloc[:9]] * 2, ignore_index=True), n_params_convention="total", loss_unit="nats per token"
    )
    assert law.n_stems == 9
    assert not law.forecast(*PLAIN[["n_params", "n_tokens"]].iloc[8]).supported


def test_the_same_run_under_another_name_is_counted() -> None:
    named = PLAIN.assign(name=[f"run {i}" for i in range(14)])
    twice = pd.concat([named, named.iloc[:3].assign(name="again"), named.iloc[5:6]], ignore_index=True)
    warnings = "; ".join(check_runs(twice, (), max_regret=1.0, loss_unit=None).warnings)
    assert "1 row repeats another in every column" in warnings
    assert "3 rows have N, D and loss of another under another name" in warnings
    rounded = twice.assign(loss=twice["loss"].round(2))
    assert "under another name" not in "; ".join(check_runs(rounded, (), max_regret=1.0, loss_unit=None).warnings)


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("loss", "n/a", r"loss must hold numbers, got 'n/a' in row 'run-4'"),
        ("n_params", "huge", r"n_params must hold numbers, got 'huge' in row 'run-4'"),
        ("n_tokens", "1,3B", r"n_tokens must hold numbers, got '1,3B' in row 'run-4'"),
        (
            "n_params",
            math.nan,
            r"n_params must be finite.*got nan in row 'run-4' .*: drop such rows, or give the reason in .*left_out",
        ),
    ],
)
def test_the_first_bad_cell_is_named(column: str, cell: object, message: str) -> None:
    table = PLAIN.astype(object).set_axis([f"run-{i}" for i in range(14)])
    table.loc["run-4", column] = cell
    with pytest.raises(ValueError, match=message):
        rows_of(table)


@pytest.mark.parametrize("empty", [None, math.nan, math.inf, "", "NaN", "Infinity"])
def test_rows_without_a_loss_are_left_out_by_name(empty: object) -> None:
    """A crashed run's cell as CSV, Parquet and wandb have it; the law is that of the other rows."""
    table = PLAIN.astype({"loss": object}).set_axis([f"run-{i}" for i in range(14)])
    table.loc[["run-4", "run-9"], "loss"] = empty
    table.loc["run-9", "n_tokens"] = math.nan  # it never took a step
    found = check_runs(read_runs(table), (), max_regret=1.0, loss_unit=None)
    assert [*found.left_out.index] == ["run-4", "run-9"]
    assert any("'run-4', 'run-9'" in note for note in found.assumptions)
    pd.testing.assert_frame_equal(
        found.rows.drop(columns="stem"), rows_of(table.drop(["run-4", "run-9"])).drop(columns="stem")
    )


def test_more_rows_without_a_loss_than_with_one_are_refused() -> None:
    table = PLAIN.copy()
    table.loc[:7, "loss"] = math.nan
    with pytest.raises(ValueError, match=r"loss .*8 of 14 .*row 0:"):
        rows_of(table)
    assert len(rows_of(table.assign(left_out=table["loss"].isna().map({True: "crashed", False: ""})))) == 6


def test_what_is_ambiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="rename val_loss or test_loss to loss"):
        rows_of(PLAIN.rename(columns={"loss": "val_loss"}).assign(test_loss=3.0))
    mixed = PLAIN.rename(columns={"n_params": "Params (M)"}).astype({"Params (M)": object})
    mixed.loc[2, "Params (M)"] = "1.3B"
    with pytest.raises(ValueError, match=r"Params \(M\) must.*got '1.3B'.*2"):
        rows_of(mixed)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("total_training_Gflops", 1e9),
        ("training compute (FLOP)", 1.0),
        ("EFLOPs", 1e18),
        ("C (1e18 FLOPs)", 1e18),
        ("compute_pf_days", PF_DAY),
    ],
)
def test_either_count_follows_from_compute_in_its_unit(name: str, unit: float) -> None:
    table = PLAIN.assign(**{name: compute_flops(PLAIN["n_params"], PLAIN["n_tokens"]) / unit})
    for column in ("n_params", "n_tokens"):
        found = read_runs(table.drop(columns=column))
        np.testing.assert_allclose(found[column], PLAIN[column])
        assert any(name in note for note in found.attrs[NOTES])


@pytest.mark.parametrize("name", ["TFLOPs", "tflops_per_second", "FLOP/s", "perf/tflops"])
def test_a_speed_is_not_taken_for_compute(name: str) -> None:
    table = PLAIN.assign(**{name: 1e14}).drop(columns="n_tokens")
    with pytest.raises(ValueError, match="n_tokens"):
        rows_of(table)


@pytest.mark.parametrize("first", ["sep=;\n", '"sep=;"\n', "\n", "\nSEP=;\n"])
def test_what_precedes_the_header_is_no_header(first: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("﻿" + first + PLAIN.to_csv(sep=";", decimal=",", index=False), encoding="utf-8")
    pd.testing.assert_frame_equal(rows_of(path), rows_of(PLAIN))


def test_columns_that_the_caller_names_are_read_in_place_of_others() -> None:
    table = PLAIN.rename(columns={"n_params": "Active (M)", "loss": "c4 nll"}).assign(loss=9.0, n_params=1e12)
    table["Active (M)"] /= 1e6
    names = {"n_params": "Active (M)", "loss": "c4 nll"}
    found = check_runs(read_runs(table, names), (), max_regret=1.0, loss_unit=None)
    for column in PLAIN:
        np.testing.assert_allclose(found.rows[column], rows_of(PLAIN)[column])
    law = fit(table, n_params_convention="total", n_bootstrap=2, columns=names).law
    assert law["E"] == pytest.approx(fit(PLAIN, n_params_convention="total", n_bootstrap=2).law["E"])
    for wrong in ({"loss": "none"}, {"loss": "c4 nll", "n_params": "c4 nll"}):
        with pytest.raises(ValueError, match="c4 nll"):
            read_runs(table, wrong)


def test_the_last_row_of_each_run_that_the_caller_names_is_fitted() -> None:
    early = PLAIN.assign(n_tokens=PLAIN["n_tokens"] / 2, loss=PLAIN["loss"] + 1)
    table = pd.concat([early.assign(member=range(14)), PLAIN.assign(member=range(14))], ignore_index=True)
    found = check_runs(read_runs(table, {"run": "member"}), (), max_regret=1.0, loss_unit=None)
    assert [*found.rows.index] == [*(rows_of(PLAIN).index + 14)]
    with pytest.raises(ValueError, match="run.*n_params"):
        check_runs(read_runs(table.assign(member=0), {"run": "member"}), (), max_regret=1.0, loss_unit=None)


def test_an_error_lists_the_columns_of_the_file() -> None:
    with pytest.raises(ValueError, match=r"got Params, flops, score"):
        rows_of(pd.DataFrame({"Params": PLAIN["n_params"], "flops": 1e20, "score": PLAIN["loss"]}))


@pytest.mark.parametrize("name", ["non_embedding_params", "n_params_non_embedding"])
def test_two_counts_of_parameters_are_not_chosen_between(name: str) -> None:
    runs = planted_ladder()
    both = runs.rename(columns={"n_params": "total_params"}).assign(**{name: 0.7 * runs["n_params"]})
    with pytest.raises(ValueError, match=rf"{name} or total_params"):
        fit(both, n_params_convention="total", n_bootstrap=2)
    found = fit(both, n_params_convention="total", n_bootstrap=2, columns={"n_params": "total_params"})
    assert found.n_params_range == fit(runs, n_params_convention="total", n_bootstrap=2).n_params_range
    alone = both.drop(columns="total_params")
    assert fit(alone, n_params_convention="without embeddings", n_bootstrap=2).n_params_range[0] == pytest.approx(7e6)
