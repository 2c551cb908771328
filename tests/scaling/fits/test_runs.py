"""What comes in: tables and files, their columns and units, and what is left out, suspect or assumed."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaling import Law, ScalingFit, backtest, compute_flops, fit, fit_envelope, fit_isoflops, fit_two_step, next_runs
from scaling.fits.runs import Runs

Ladder = Callable[..., pd.DataFrame]


def fitted(runs: pd.DataFrame | str | Path | list[Any], **options: object) -> ScalingFit:
    return fit(runs, n_params_convention="total", n_bootstrap=4, **options)  # type: ignore[arg-type]


def study_ladder(ladder: Ladder) -> pd.DataFrame:
    """A table as a study gives it: branches that share stems, and rows with the reason why they are not comparable."""
    runs = ladder(noise=0.003)
    runs.insert(0, "key", [f"k{i}" for i in range(20)])
    runs = runs.assign(
        purpose="ladder", stem=[f"s{i // 2}" for i in range(20)], regret=0.001, annealed=True, left_out=""
    )
    runs.loc[3, ["loss", "left_out"]] = [9.0, "its depth is 4, the policy's is 2"]
    runs.loc[6, ["regret", "left_out"]] = [math.nan, "the regret of its searched hyperparameters is not known"]
    runs.loc[8, "regret"] = 0.02
    return runs.astype({"n_params": np.int64, "n_tokens": np.int64})


def write(runs: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        runs.to_parquet(path)
    elif path.suffix == ".csv":
        runs.to_csv(path, index=False)
    else:
        runs.to_json(path, orient="records", lines=True, double_precision=15)
    return path


# Files


@pytest.mark.parametrize("name", ["runs.parquet", "runs.csv", "runs.jsonl"])
def test_a_file_gives_the_fit_of_its_table(ladder: Ladder, tmp_path: Path, name: str) -> None:
    runs = study_ladder(ladder)
    if name == "runs.jsonl":  # pandas writes 15 digits
        runs["loss"] = runs["loss"].round(9)
    path = write(runs, tmp_path / name)
    table = fitted(runs).to_dict()
    assert fitted(path).to_dict() == table
    assert fitted(str(path)).to_dict() == table


def test_a_row_of_a_filtered_table_is_named_as_the_caller_knows_it(ladder: Ladder) -> None:
    runs = ladder()
    runs.loc[7, "loss"] = -1.0
    with pytest.raises(ValueError, match=r"loss .*got -1 in row 7 \("):
        fitted(runs[runs.index % 2 == 1].sample(frac=1, random_state=0))


def test_integers_beyond_64_bits_are_read(ladder: Ladder, tmp_path: Path) -> None:
    runs = ladder().astype({"n_params": object, "n_tokens": object})
    runs["n_params"] = [int(n) * 10**15 for n in runs["n_params"]]
    runs["n_tokens"] = [int(n) * 10**15 for n in runs["n_tokens"]]
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in runs.to_dict("records")) + "\n\n")
    np.testing.assert_array_equal(fitted(path).rows["n_params"], fitted(runs).rows["n_params"])


def test_every_verb_of_a_ladder_takes_a_file(ladder: Ladder, planted: Law, tmp_path: Path) -> None:
    runs = ladder(noise=0.003)
    path = write(runs, tmp_path / "runs.parquet")
    kept: dict[str, Any] = {"n_params_convention": "total", "n_bootstrap": 4}
    tested = [backtest(given, n_params_convention="total", cuts=[4], forms=[]) for given in (path, runs)]
    assert tested[0].to_dict() == tested[1].to_dict()

    sizes = np.outer([1e7, 3e7, 1e8], 2.0 ** np.arange(-2, 3)).ravel()
    grid = pd.DataFrame({"n_params": sizes, "n_tokens": np.repeat([1e17, 1e18, 1e19], 5) / 6 / sizes})
    grid["loss"] = planted.loss(grid["n_params"], grid["n_tokens"])
    powers = [fit_isoflops(g, **kept) for g in (write(grid, tmp_path / "grid.csv"), grid)]
    assert powers[0].to_dict() == powers[1].to_dict()

    curves = pd.concat([grid.assign(run=grid.index, n_tokens=share * grid["n_tokens"]) for share in (0.1, 0.3, 1.0)])
    curves["loss"] = planted.loss(curves["n_params"], curves["n_tokens"])
    envelopes = [fit_envelope(c, **kept) for c in (write(curves, tmp_path / "curves.parquet"), curves)]
    assert envelopes[0].to_dict() == envelopes[1].to_dict()

    tasks = runs.rename(columns={"loss": "task_loss"}).assign(accuracy=lambda t: 1 / (1 + np.exp(t["task_loss"] - 3)))
    steps = [fit_two_step(t, **kept) for t in (write(tasks, tmp_path / "tasks.parquet"), tasks)]
    assert steps[0].to_dict() == steps[1].to_dict()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("runs.xlsx", b"", r"runs.xlsx: the file's name .*got .xlsx"),
        ("runs", b"", r"runs: the file's name .*got no suffix"),
        ("runs.csv", None, "runs.csv: no such file"),
        ("runs.parquet", b"PAR?", r"runs.parquet: can't be read as a table: "),
        ("runs.csv", b"", r"runs.csv: can't be read as a table: "),
        ("runs.jsonl", b"{'a'}", r"runs.jsonl: can't be read as a table: "),
        ("runs.csv", b"n_params,n_tokens\n1,2\n", r"runs.csv: missing column loss"),
        (
            "runs.csv",
            b"n_params,n_tokens,loss\n1e9,2e9,-1\n",
            r"runs.csv: loss .*got -1 in row 0",
        ),
        ("runs.csv", b"n_params,n_tokens,loss\n1e9,2e9,1\n", r"runs.csv: .*n_tokens.*got 1"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        fitted(path)


def test_columns_of_two_levels_are_refused(ladder: Ladder) -> None:
    runs = ladder()
    levels = pd.MultiIndex.from_product([["run"], runs.columns])
    with pytest.raises(ValueError, match=r"columns.*\('run', 'n_params'\)"):
        fitted(runs.set_axis(levels, axis=1))


def test_a_list_of_dicts_is_a_table(ladder: Ladder) -> None:
    assert fitted(ladder().to_dict("records")).to_dict() == fitted(ladder()).to_dict()
    with pytest.raises(ValueError, match="runs .*a list of dicts.*got list"):
        fitted([1.0, 2.0])


# The ledger


def test_rows_that_the_table_leaves_out_are_listed_with_its_reason(ladder: Ladder) -> None:
    runs = study_ladder(ladder)
    result = fitted(runs)
    assert result.left_out["reason"].to_dict() == {
        3: "its depth is 4, the policy's is 2",
        6: "the regret of its searched hyperparameters is not known",
        8: "predicted regret 2.000% is above 0.250%",
    }
    by_hand = fitted(runs.drop(index=[3, 6, 8]).drop(columns="left_out"))
    pd.testing.assert_frame_equal(result.rows, by_hand.rows)
    assert result.law == by_hand.law


def test_what_the_table_leaves_out_need_not_be_sound(ladder: Ladder) -> None:
    runs = study_ladder(ladder).astype({"stem": object, "annealed": object, "loss": object, "n_params": float})
    runs.loc[3, ["loss", "stem", "annealed", "n_params"]] = ["diverged", None, None, -1]
    result = fitted(runs)
    assert np.isnan(result.left_out.loc[3, "loss"])
    restored = ScalingFit.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    pd.testing.assert_frame_equal(restored.left_out, result.left_out, check_dtype=False)


def test_a_column_left_out_without_reasons_leaves_nothing_out(ladder: Ladder) -> None:
    assert fitted(ladder().assign(left_out=math.nan)).left_out.empty
    with pytest.raises(ValueError, match="left_out .*got True"):
        fitted(ladder().assign(left_out=True))


# Names and units


def test_bits_per_token_become_nats(ladder: Ladder) -> None:
    nats = ladder(noise=0.003)
    bits = nats.assign(loss=nats["loss"] / math.log(2))
    one, other = fitted(nats), fitted(bits, loss_unit="bits per token")
    assert other.loss_unit == "nats per token"
    np.testing.assert_allclose(other.rows["loss"], one.rows["loss"], rtol=1e-15)
    np.testing.assert_allclose([*other.law.parameters.values()], [*one.law.parameters.values()], rtol=1e-6)
    kept: dict[str, Any] = {"n_params_convention": "total", "cuts": [4], "forms": []}
    tests = backtest(nats, **kept), backtest(bits, loss_unit="bits per token", **kept)
    np.testing.assert_allclose(tests[1].predictions["predicted"], tests[0].predictions["predicted"], rtol=1e-6)


def test_another_unit_is_kept_and_shown(ladder: Ladder) -> None:
    result = fitted(ladder(noise=0.003), loss_unit="bits per byte")
    for one in (result, result.law, result.forecast(1e9, 2e10), result.law.allocate(1e20)):
        assert "bits per byte" in str(one)
        assert "nats" not in str(one)
    with pytest.raises(ValueError, match="loss_unit .*got"):
        fitted(ladder(), loss_unit=" ")


@pytest.mark.parametrize("column", ["n_params", "n_tokens"])
def test_counts_in_millions_or_billions_are_refused(ladder: Ladder, column: str) -> None:
    runs = ladder()
    with pytest.raises(ValueError, match=f"{column} .*got .*millions or billions"):
        fitted(runs.assign(**{column: runs[column] / 1e9}))


def test_tiny_models_are_models(ladder: Ladder, planted: Law) -> None:
    runs = ladder()
    runs[["n_params", "n_tokens"]] /= 1e4
    runs["loss"] = planted.loss(runs["n_params"], runs["n_tokens"])
    assert runs["n_params"].min() == 1000
    np.testing.assert_allclose([*fitted(runs).law.parameters.values()], [*planted.parameters.values()], rtol=1e-5)


def warnings_of(runs: pd.DataFrame) -> str:
    return "; ".join(fitted(runs).warnings)


def test_sound_ladders_raise_no_warning(ladder: Ladder) -> None:
    runs = ladder(noise=0.003)
    seeds = pd.concat([runs, runs.assign(loss=runs["loss"] * 1.001)], ignore_index=True)
    flops = 1.5 * compute_flops(runs["n_params"], runs["n_tokens"])  # attention and the embeddings count for something
    for sound in (runs, seeds, runs.assign(compute_flops=flops), runs.assign(run=runs.index), study_ladder(ladder)):
        assert not fitted(sound).warnings


def test_losses_that_look_like_another_unit_raise_a_warning(ladder: Ladder) -> None:
    runs = ladder(noise=0.003)
    assert "3e+05 tokens per parameter in the median" in warnings_of(runs.assign(n_params=runs["n_params"] / 1e4))
    flops = compute_flops(runs["n_params"], runs["n_tokens"])
    assert "compute_flops is 0.1 times 6·N·D in the median" in warnings_of(runs.assign(compute_flops=flops / 10))
    assert "compute_flops" not in warnings_of(runs.assign(compute_flops=flops / 2.5))
    assert "is it a perplexity?" in warnings_of(runs.assign(loss=np.exp(runs["loss"])))
    assert "perplexity" not in str(fitted(runs.assign(loss=np.exp(runs["loss"])), loss_unit="something else"))


def test_repeated_rows_are_counted(ladder: Ladder) -> None:
    runs = ladder(noise=0.003)
    twice = pd.concat([runs, runs.iloc[:3]], ignore_index=True)
    assert "3 rows repeat another in every column" in warnings_of(twice)
    assert "repeat" not in warnings_of(twice.assign(seed=range(23)))


def test_rows_that_seem_to_share_a_run_raise_a_warning(ladder: Ladder) -> None:
    runs = ladder(noise=0.003).assign(run_name=[f"run {i // 2}" for i in range(20)])
    assert "rename run_name to stem" in warnings_of(runs)
    assert "rename" not in warnings_of(runs.assign(stem=runs["run_name"]))


def test_assumptions_without_a_column_are_reported(ladder: Ladder) -> None:
    assert "every loss is that of an annealed run (no column annealed)" in str(fitted(ladder()))
    assert fitted(study_ladder(ladder), loss_unit="nats per token").assumptions == ()
    assert "assumed" not in str(fitted(study_ladder(ladder), loss_unit="nats per token"))


# float64 throughout


def test_integers_do_not_wrap(ladder: Ladder, planted: Law) -> None:
    """N·D of the largest rows is above 2^63."""
    runs = ladder()
    runs[["n_params", "n_tokens"]] = (1e4 * runs[["n_params", "n_tokens"]]).astype(np.int64)
    flops = 6.0 * runs["n_params"].astype(float) * runs["n_tokens"].astype(float)
    assert flops.max() > 2**63
    runs["loss"] = planted.loss(runs["n_params"].astype(float), runs["n_tokens"].astype(float))
    result = fitted(runs.assign(compute_flops=flops))
    assert not result.warnings
    assert result.compute_range == pytest.approx((flops.min(), flops.max()))
    assert result.rows.drop(columns="stem").dtypes.eq(np.float64).all()
    np.testing.assert_allclose([*result.law.parameters.values()], [*planted.parameters.values()], rtol=1e-4)
    chosen = next_runs(result, 10**13, 10**15, affordable_flops=1e28, candidates=runs[["n_params", "n_tokens"]]).runs
    np.testing.assert_allclose(chosen["cost_flops"], flops[chosen.index])


def test_each_kind_of_reason_is_counted_once() -> None:
    """Nine rows differ by their numbers alone, which is one reason."""
    reasons = [*(f"its warmup takes {n}% of its tokens" for n in range(9)), "it is not annealed"]
    rows = pd.DataFrame({"reason": reasons})
    found = Runs(rows=rows, left_out=rows, compute_flops=np.ones(10), loss_unit="nats", warnings=(), assumptions=())
    assert "9 because its warmup takes 0%" in found.omitted
    assert "1 because it is not annealed" in found.omitted
    assert "takes 1%" not in found.omitted
