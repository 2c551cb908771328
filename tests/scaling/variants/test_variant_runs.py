"""Tables of variants: checkpoints, rows that are left out, units, tokenizers and names of columns."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from scaling import VariantComparison, compare_variants

N_PARAMS = 1e8 * 2.1 ** np.arange(4)
TARGET = 1e22


def runs() -> pd.DataFrame:
    """One annealed run of each variant and size, without noise."""
    rows = pd.DataFrame(
        [
            {"variant": name, "n_params": n, "n_tokens": 20 * n, "loss": 1.7 + 1.3 * (m * 120 * n**2 / 1e18) ** -0.15}
            for name, m in {"base": 1.0, "good": 1.3, "bad": 0.7}.items()
            for n in N_PARAMS
        ]
    )
    return rows.assign(seed=0)


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Twelve rows of each run as W&B exports them; before the last, the better variants lag behind."""
    rows = rows.assign(run_id=[f"{number:x}f" for number in range(len(rows))])
    lag = rows["variant"].map({"base": 0.1, "good": 0.5, "bad": 0.0}).fillna(0.1)
    parts = [
        rows.assign(step=250 * k, n_tokens=rows["n_tokens"] * k / 12, loss=rows["loss"] * (1 + lag * (1 - k / 12)))
        for k in range(1, 13)
    ]
    return pd.concat(parts, ignore_index=True)


def compared(table: pd.DataFrame, **options: object) -> VariantComparison:
    return compare_variants(table, "base", target_flops=TARGET, **options)  # type: ignore[arg-type]


def assert_same(found: VariantComparison, wanted: VariantComparison) -> None:
    pd.testing.assert_frame_equal(found.table, wanted.table)
    pd.testing.assert_frame_equal(found.measured, wanted.measured)


def flops_only(rows: pd.DataFrame) -> pd.DataFrame:
    flops = 6 * rows["n_params"] * rows["n_tokens"]
    return rows.assign(compute_flops=flops).drop(columns=["n_params", "n_tokens"])


@pytest.mark.parametrize("table", ["N and D", "compute", "label"])
def test_only_the_last_checkpoint_of_a_run_counts(table: str) -> None:
    whole, log = runs(), curves(runs())
    if table != "N and D":
        whole, log = flops_only(whole), flops_only(log)
    if table == "label":
        log = log.rename(columns={"run_id": "name"})
    found = compared(log)
    assert_same(found, compared(whole))
    assert (found.verdict("good"), found.verdict("bad")) == ("promote", "reject")
    assert len(found.notes) == 1
    assert found.warnings == ()
    assert VariantComparison.from_dict(found.to_dict()).notes == found.notes
    assert_same(compared(log, columns={"run": "name" if table == "label" else "run_id"}), compared(whole))


def test_rows_that_may_be_checkpoints_are_kept_with_a_warning() -> None:
    log = curves(runs())
    found = compared(log.drop(columns=["run_id", "step"]))
    assert found.table["runs"].tolist() == [48, 48]
    assert len(found.warnings) == 1
    assert compared(flops_only(log).drop(columns="step")).warnings


@pytest.mark.parametrize("label", ["experiment", "run"])
def test_separate_runs_that_share_a_label_are_kept(label: str) -> None:
    """The label names the variant or the repeat; the steps are those of the whole run."""
    rows = runs().assign(n_tokens=lambda r: 20 * r["n_params"] * 4, step=lambda r: r["n_tokens"] / 1e6)
    rows[label] = rows["variant"] if label == "experiment" else 0
    assert compared(flops_only(rows)).table["sizes"].tolist() == [4, 4]
    one_size = rows.assign(n_tokens=lambda r: r["n_params"] * 20, n_params=1e8, step=lambda r: r["n_tokens"] / 1e6)
    if label == "experiment":
        assert compared(one_size).table["sizes"].tolist() == [4, 4]


def test_rows_that_the_table_leaves_out_or_that_are_not_annealed_do_not_count() -> None:
    rows = runs()
    spoilt = rows.assign(loss=rows["loss"] * rows["variant"].map({"base": 1.0, "good": 1.5, "bad": 0.8}), seed=1)
    both = pd.concat([rows, spoilt], ignore_index=True)
    first = both["seed"] == 0
    whole = compared(rows)
    for column in (
        {"left_out": first.map({True: None, False: "the wrong data"})},
        {"annealed": first},
        {"left_out": first.map({True: None, False: "failed"}), "n_params": both["n_params"].where(first)},
    ):
        found = compared(both.assign(**column))
        assert_same(found, whole)
        assert len(found.notes) == 1
    with pytest.raises(ValueError):
        compared(rows.assign(annealed=False))


def test_runs_that_did_not_finish_raise_a_warning() -> None:
    rows = runs()
    states = np.where(rows.index == 5, "crashed", "finished")
    assert len(compared(rows.assign(State=states)).warnings) == 1
    assert compared(rows.assign(state="finished")).warnings == ()
    repeats = pd.concat([rows.assign(state="finished"), rows.assign(state="crashed", loss=rows["loss"] * 1.001)])
    assert compared(repeats.drop(columns="seed").reset_index(drop=True)).warnings


@pytest.mark.parametrize(("column", "unit"), [("n_params", 1e6), ("n_tokens", 1e9)])
def test_counts_in_millions_or_billions_are_refused(column: str, unit: float) -> None:
    rows = runs()
    with pytest.raises(ValueError, match=column):
        compared(rows.assign(**{column: rows[column] / unit}))
    assert_same(compared(rows.assign(**{column: [f"{n / 1e9:.6f}B" for n in rows[column]]})), compared(rows))


BYTES = {"base": 3.0, "good": 4.5, "bad": 3.0}


@pytest.mark.parametrize("unit", ["", "nats per token", "bits"])
def test_losses_of_two_tokenizers_are_compared_per_byte(unit: str) -> None:
    per_byte = runs()
    bytes_per_token = per_byte["variant"].map(BYTES)
    nats = math.log(2) * per_byte["loss"] * bytes_per_token
    per_token = per_byte.assign(loss=nats / (math.log(2) if unit == "bits" else 1), bytes_per_token=bytes_per_token)
    found = compared(per_token, unit=unit)
    wanted = compared(per_byte.rename(columns={"loss": "val_bpb"}))
    assert found.unit == wanted.unit == "bits per byte"
    columns = ["multiplier", "low", "high", "loss", "p_better"]
    np.testing.assert_allclose(found.table[columns], wanted.table[columns], rtol=1e-6)
    assert found.verdict("good") == "promote"


def test_equal_bytes_per_token_and_losses_per_byte_stay() -> None:
    rows = runs()
    assert_same(compared(rows.assign(bytes_per_token=4.0)), compared(rows))
    varying = rows["variant"].map(BYTES)
    for each in (
        compared(rows.assign(bytes_per_token=varying), unit="bpb"),
        compared(rows.rename(columns={"loss": "val_bpb"}).assign(vocab_size=varying)),
        compared(rows.assign(vocab_size=varying, bytes_per_token=4.0)),  # padded vocabularies of one tokenizer
    ):
        assert_same(each, compared(rows))


@pytest.mark.parametrize("column", ["vocab_size", "Tokenizer", "bytes_per_token"])
def test_losses_per_token_of_unknown_length_are_refused(column: str) -> None:
    rows = runs()
    other = rows["variant"] == "good"
    values = np.where(other, math.nan, 4.0) if column == "bytes_per_token" else np.where(other, 50_000, 32_000)
    with pytest.raises(ValueError, match=column):
        compared(rows.assign(**{column: values}))


def test_names_of_columns_may_have_capitals() -> None:
    rows = runs()
    seeds = pd.concat([rows, rows.assign(seed=1, loss=rows["loss"] * 1.01)], ignore_index=True)
    table = seeds.assign(size=seeds["n_params"].astype(str)).pipe(flops_only)
    capitals = table.rename(columns={"variant": "Variant", "seed": "Seed", "size": "SIZE"})
    assert_same(compared(capitals.assign(method="adam")), compared(table))
    with pytest.raises(ValueError, match="variant"):
        compared(table.rename(columns={"variant": "Variant"}).assign(VARIANT="a"))


def test_the_noise_that_seeds_share_is_known_where_they_are_paired() -> None:
    rng, rows = np.random.default_rng(0), runs()
    of_seed = 0.015 * rng.standard_normal((8, len(N_PARAMS)))
    table = pd.concat(
        [
            rows.assign(seed=i, loss=rows["loss"] * np.exp(np.tile(each, 3) + 1e-3 * rng.standard_normal(len(rows))))
            for i, each in enumerate(of_seed)
        ],
        ignore_index=True,
    )
    found = compared(table)
    assert found.noise == pytest.approx(1e-3, rel=0.3)
    assert found.seed_noise == pytest.approx(0.015, rel=0.4)
    alone = compared(table.assign(seed=range(len(table))))
    assert alone.seed_noise == 0
    assert alone.noise == pytest.approx(0.015, rel=0.4)
    assert VariantComparison.from_dict(found.to_dict()).seed_noise == found.seed_noise
