"""--json: standard output is one JSON document, of every command that prints a result."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from muscale.cli.options import Options
from muscale.cli.running import result_alone, show
from tests.muscale.command_lines import PROMOTED, commands, json_output, muscale
from tests.muscale.planted_evaluations import PlantedEvaluations

MakeStudy = Callable[..., Path]
HERE = {
    "gallery",
    "check",
    "compare",
    "mixture",
    "amend",
    "continue",
    "train",
    "init",
    "doctor",
    "wheel",
    "import-space",
    "data check",
    "data clean",
}
SERVES = {"ui"}  # and prints no result


def test_every_command_has_json_and_is_tried() -> None:
    for name, command in commands().items():
        if name in SERVES:
            continue
        function = inspect.unwrap(command.default_command)
        hints = get_type_hints(function)
        assert "json" in hints or issubclass(hints.get("options", object), Options), name
        assert name in PROMOTED | HERE, f"{name}: try its --json here, or on a promoted study"


TRAINED_FIRST = {
    "check": "",
    "sweep": "sweep",
    "transfer": "sweep transfer",
    "ladder": "sweep transfer ladder",
    "fit": "sweep transfer ladder",
    "plan": "sweep transfer ladder",
    "promote": "sweep transfer ladder promote",
    "run": "sweep transfer ladder promote",
}
"""Stages that a command on a new study trains."""


def test_what_needs_no_training(make_study: MakeStudy, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    for name, trained in TRAINED_FIRST.items():
        rows = json_output(capfd, name, path, "--dry-run")
        assert [row["stage"] for row in rows if row["stage"] != "total"] == trained.split()
    assert json_output(capfd, "check", path)["passed"]
    assert json_output(capfd, "runs", path) == []
    assert Path(json_output(capfd, "report", path)["report"]).exists()
    evaluated = PlantedEvaluations(make_study("evaluated"))
    evaluated.ledger.close()
    assert Path(json_output(capfd, "gallery", evaluated.study)["gallery"]).exists()
    assert json_output(capfd, "init", tmp_path / "new")["path"].endswith("study.toml")
    assert Path(json_output(capfd, "wheel", tmp_path / "dist")["wheel"]).exists()
    variants = tmp_path / "variants.csv"
    losses = {"baseline": (3.56, 3.33, 3.16, 3.03), "wide": (3.50, 3.27, 3.10, 2.98)}
    rows = [f"{name},{c},{y}" for name, values in losses.items() for c, y in zip((1, 3, 9, 27), values, strict=True)]
    variants.write_text("\n".join(["variant,compute_flops,loss", *rows]))
    page = tmp_path / "variants.html"
    compared = json_output(capfd, "compare", variants, "--target-flops", "100", "--html", page)
    assert [row["verdict"] for row in compared["table"]] == ["promote"]
    assert page.read_text().count('role="img"') == 2, "one look is no course"
    assert muscale(capfd, "compare", variants, "--html", tmp_path / "none" / "page.html").code == 2
    far = tmp_path / "far.csv"
    far.write_text("\n".join(["variant,compute_flops,loss", "baseline,1,3.6", "baseline,3,3.3", "wide,90,2.9"]))
    compared = json_output(capfd, "compare", far, "--target-flops", "100", "--html", page)
    assert [(row["verdict"], row["beyond"]) for row in compared["table"]] == [("undecided", 1)]
    mixtures = tmp_path / "mixtures.csv"
    weights = [i / 8 for i in range(9)]
    rows = [f"{w},{1 - w},{3 - w - w * w}" for w in weights]
    mixtures.write_text("\n".join(["weight_web,weight_code,loss_web", *rows]))
    page = tmp_path / "page.html"
    limited = ("--objective", "web=1", "--at-most", "web=0.5", "--next", "1", "--html", page)
    mixed = json_output(capfd, "mixture", mixtures, *limited)
    assert all(f"<h2>{title}</h2>" in page.read_text() for title in ("The best mixture", "What to train next"))
    assert mixed["best"]["table"][1]["weight"] == 0.5
    assert len(mixed["next_mixtures"]["runs"]) == 1
    assert len(json_output(capfd, "mixture", mixtures, "--predict", mixtures)["predictions"]) == 9
    done = muscale(capfd, "mixture", mixtures, "--html", tmp_path / "none" / "page.html")
    assert (done.code, str(tmp_path / "none") in done.err, "unfinished" in done.err) == (2, True, False)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "method: random\nparameters: {learning_rate: {min: 0.001, max: 0.01, distribution: log_uniform_values}}\n"
    )
    assert json_output(capfd, "import-space", sweep)["sweep"]["space"]["learning_rate"]["low"] == 0.001


def test_an_error_leaves_standard_output_empty(make_study: MakeStudy, capfd: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    table = path.parent / "losses.csv"
    table.write_text("tokens,loss\n1,2\n")
    for line in (
        ("continue", path, path.parent / "none.toml"),
        ("amend", path, path.parent / "none.toml"),
        ("train", path.parent / "none.json"),
        ("watch", path, "--losses", table),
        ("watch", path),
    ):
        done = muscale(capfd, *line, "--json")
        assert (done.code, done.out) == (2, ""), line
        assert done.err.startswith("error: ")


def test_what_others_print_meanwhile_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:

    with result_alone(as_json=True):
        sys.stdout.write("a library\n")
        sys.stdout.flush()
        os.write(1, b"a process of a library\n")
    show({"a": 1}, as_json=True)
    output: Any = capfd.readouterr()
    assert json.loads(output.out) == {"a": 1}
    assert sorted(output.err.splitlines()) == ["a library", "a process of a library"]


def test_names_of_columns_also_hold_for_the_table_to_predict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"{w / 8},{1 - w / 8},{size},{3 - w / 8 - (w / 8) ** 2 + 1e3 / size**0.5}"
        for size in (1e7, 1e8)
        for w in range(9)
    ]
    predictions = []
    for name, options in (("n_params", ()), ("size", ("--params", "size"))):
        table = tmp_path / f"{name}.csv"
        table.write_text("\n".join([f"weight_web,weight_code,{name},loss_web", *rows]))
        predictions.append(json_output(capfd, "mixture", table, "--predict", table, *options)["predictions"])
    assert len(predictions[0]) == 18
    assert predictions[0] == predictions[1]
