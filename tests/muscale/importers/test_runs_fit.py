"""The law of a table of others' runs, from the command line: planted parameters, and tables that can't be right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from muscale import StageError, StudyFileError
from muscale.cli import app
from muscale.importers.runs_fit import fit_runs
from scaling import Law, MixtureOfExperts


def ladder() -> pd.DataFrame:
    sizes = np.geomspace(1e6, 1e8, 5)
    rows = pd.DataFrame([(n, d) for n in sizes for d in np.geomspace(2e7, 2e9, 4)], columns=["n_params", "n_tokens"])
    drawn = np.exp(1e-3 * np.random.default_rng(0).standard_normal(len(rows)))
    return rows.assign(loss=(1.7 + 400 / rows["n_params"] ** 0.34 + 410 / rows["n_tokens"] ** 0.28) * drawn)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_planted_law_is_recovered_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ladder.{suffix}"
    table = ladder()
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    found = fit_runs(path, n_params_convention="total", compute_flops=1e20)
    law = found.fit.law
    assert isinstance(law, Law)
    assert law["alpha"] == pytest.approx(0.34, abs=0.05)
    assert law["beta"] == pytest.approx(0.28, abs=0.05)
    assert found.decision is not None
    assert found.decision.total_flops == pytest.approx(1e20, rel=1e-6)
    assert found.warnings == ()


def test_the_command_prints_law_intervals_and_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ladder.csv"
    ladder().to_csv(path, index=False)
    arguments = ["fit", "--runs", str(path), "--n-params", "total", "--compute-flops", "1e20"]
    assert app(arguments, result_action="return_value") == 0
    output = capsys.readouterr().out
    assert "alpha" in output
    assert "total" in output
    assert app([*arguments, "--json"], result_action="return_value") == 0
    assert json.loads(capsys.readouterr().out)["decision"]["n_params"] > 0


def test_a_page_has_the_decision_the_backtest_and_the_next_runs(tmp_path: Path) -> None:
    path, page = tmp_path / "ladder.csv", tmp_path / "page.html"
    ladder().to_csv(path, index=False)
    arguments = ["fit", "--runs", str(path), "--n-params", "total", "--html", str(page)]
    titles = {"The decision": 1, "The law and its data": 0, "Backtest": 0, "What to run next": 1}
    for budget in ([], ["--compute-flops", "1e20"]):
        assert app([*arguments, *budget], result_action="return_value") == 0
        written = page.read_text()
        assert all(f"{title}</h2>" in written for title, of_budget in titles.items() if budget or not of_budget)
        assert ("What to run next</h2>" in written) == bool(budget)
    ladder().iloc[::3].to_csv(path, index=False)
    assert app(arguments, result_action="return_value") == 0, "too few runs for a backtest"
    nowhere = [*arguments[:-1], str(tmp_path / "none" / "page.html")]
    for refused, part in ((nowhere, "none"), (["fit", "study.toml", "--html", str(page)], "--html")):
        with pytest.raises(StudyFileError, match=part):
            app(refused, result_action="return_value")


@pytest.mark.parametrize("form", ["tied", "joint", "kaplan", "repeated"])
def test_every_form_has_a_page(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "ladder.csv", tmp_path / "page.html"
    rows = ladder()
    epochs = {"unique_tokens": rows["n_tokens"] / (1 + np.arange(len(rows)) % 4)} if form == "repeated" else {}
    rows.assign(**epochs).to_csv(path, index=False)
    arguments = ["fit", "--runs", str(path), "--n-params", "total", "--form", form, "--html", str(page)]
    assert app(arguments, result_action="return_value") == 0
    assert "alpha" in capsys.readouterr().out
    assert "The law and its data</h2>" in page.read_text()


def test_runs_of_one_size_keep_it_and_their_page_has_no_section_of_other_sizes(tmp_path: Path) -> None:
    path, page = tmp_path / "ladder.csv", tmp_path / "page.html"
    tokens = np.geomspace(1e8, 2e9, 7)
    rows = pd.DataFrame({"n_params": 1e8, "n_tokens": tokens, "loss": 2.2 + 30 / (tokens + 3e8) ** 0.2})
    rows.to_csv(path, index=False)
    found = fit_runs(path, n_params_convention="total", compute_flops=6e8 * 6e9)
    assert found.fit.one_size == 1e8
    assert found.decision is not None
    assert found.decision.n_params == 1e8
    assert found.decision.n_tokens == pytest.approx(6e9)
    arguments = ["fit", "--runs", str(path), "--n-params", "total", "--compute-flops", "3.6e18", "--html", str(page)]
    assert app(arguments, result_action="return_value") == 0
    written = page.read_text()
    assert all(
        f"{title}</h2>" in written for title in ("The decision", "The law and its data", "Backtest", "What to run next")
    )
    assert "IsoFLOPs</h2>" not in written
    with pytest.raises(StageError, match="n_params"):
        fit_runs(path, n_params_convention="total", form="chinchilla")


def test_losses_in_bits_raise_a_warning_where_a_column_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "ladder.csv"
    table = ladder()
    nats = table["loss"]
    table.assign(loss=nats / math.log(2), perplexity=np.exp(nats)).to_csv(path, index=False)
    found = fit_runs(path, n_params_convention="total")
    assert len(found.warnings) == 1
    assert '--loss-unit "bits per token"' in found.warnings[0]
    right = fit_runs(path, n_params_convention="total", loss_unit="bits per token")
    assert right.warnings == ()
    assert right.fit.law["E"] == pytest.approx(found.fit.law["E"] * math.log(2), rel=1e-3)


def test_a_faulty_table_is_refused_with_file_column_and_value(tmp_path: Path) -> None:
    path = tmp_path / "ladder.csv"
    ladder().rename(columns={"loss": "val_loss"}).assign(test_loss=3.0).to_csv(path, index=False)
    with pytest.raises(StageError, match=r"ladder\.csv: .*loss.*val_loss"):
        fit_runs(path, n_params_convention="total")
    ladder().assign(n_params=lambda t: t["n_params"] / 1e6).to_csv(path, index=False)
    with pytest.raises(StageError, match="n_params"):
        fit_runs(path, n_params_convention="total")
    with pytest.raises(StageError, match=r"none\.csv: no such file"):
        fit_runs(tmp_path / "none.csv", n_params_convention="total")


def test_commands_read_the_columns_that_their_options_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plain = tmp_path / "found.csv", tmp_path / "plain.csv"
    names = {"loss": "c4 nll", "n_params": "weights", "n_tokens": "seen_"}
    options = ["--loss", "c4 nll", "--params", "weights", "--tokens", "seen_"]
    table = pd.concat(
        [ladder().assign(variant="v"), ladder().assign(variant="baseline", loss=lambda t: 1.02 * t["loss"])]
    )
    for command in (["fit", "--n-params", "total", "--runs"], ["compare"]):
        rows = table if command == ["compare"] else ladder()
        rows.to_csv(plain, index=False)
        rows.rename(columns=names).assign(loss=9.0).to_csv(path, index=False)
        found = []
        for arguments in ([*command, str(path), *options, "--json"], [*command, str(plain), "--json"]):
            assert app(arguments, result_action="return_value") == 0
            found.append(json.loads(capsys.readouterr().out))
        if command == ["compare"]:
            assert found[0].pop("notes")
            assert not found[1].pop("notes"), "the names are ours"
            assert found[0] == found[1]
        else:
            assert found[0]["fit"]["law"] == found[1]["fit"]["law"]
    for study in (["fit", "study.toml"], ["compare", "study.toml"], ["sweep", "study.toml"]):
        with pytest.raises(StudyFileError):
            app([*study, "--loss", "c4"], result_action="return_value")


def test_a_table_of_experts_is_fitted_by_the_form_that_is_named(tmp_path: Path) -> None:
    planted = MixtureOfExperts().law(E=1.7, A=90, B=600, alpha=0.3, beta=0.3, A_total=30, alpha_total=0.25, h=0.8)
    grid = np.meshgrid(np.geomspace(2e7, 1e9, 5), [10.0, 30.0, 100.0], [1.0, 8.0, 64.0])
    n_params, ratio, sparsity = (x.ravel() for x in grid)
    table = pd.DataFrame({"n_params": n_params, "n_tokens": n_params * ratio, "n_params_total": n_params * sparsity})
    table["loss"] = planted.loss(n_params, n_params * ratio, sparsity=sparsity)
    table.to_csv(path := tmp_path / "moe.csv", index=False)
    found = fit_runs(path, n_params_convention="active", compute_flops=1e21, form="experts")
    assert found.fit.law.parameters == pytest.approx(planted.parameters, rel=1e-3)
    assert found.decision is not None
    assert found.decision.sparsity == pytest.approx(64)
    with pytest.raises(StageError, match="form .*'dense'"):
        fit_runs(path, n_params_convention="active", form="dense")
    with pytest.raises(StageError, match=r"moe\.csv: .*unique_tokens"):
        fit_runs(path, n_params_convention="active", form="repeated")
