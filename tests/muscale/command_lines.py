"""Command lines run in this process, as `muscale` would run them."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muscale.cli.application import app
from muscale.cli.entry import run

_TRAINED = ("sweep", "transfer", "ladder", "fit", "plan", "promote", "run")
_KEPT = (
    "bundle",
    "verify",
    "evaluate",
    "generate",
    "export",
    "report",
    "runs",
    "calibration",
    "gc",
    "watch",
    "sync",
    "export-optuna",
)
PROMOTED = frozenset((*_TRAINED, *_KEPT))
"""The commands whose --json is tried on a promoted study; the others need none."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command line came to."""

    code: int
    out: str
    err: str


def muscale(capture: pytest.CaptureFixture[str], *arguments: str | Path) -> Done:
    """Run one command line."""
    capture.readouterr()
    try:
        code = run([str(argument) for argument in arguments])
    except SystemExit as end:  # help, and what can't be parsed
        code = int(end.code or 0)
    output = capture.readouterr()
    return Done(code=code, out=output.out, err=output.err)


def json_output(capture: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    """The one JSON document that a command line prints with --json."""
    done = muscale(capture, *arguments, "--json")
    assert done.code == code, done.err
    return json.loads(done.out)


def commands() -> dict[str, Any]:
    """Every command of the application by name, such as "data clean", without options such as --help."""
    found = {name: app[name] for name in app if not name.startswith("-")}
    groups = [name for name, command in found.items() if command.default_command is None]
    within = {
        f"{group} {name}": found[group][name] for group in groups for name in found[group] if not name.startswith("-")
    }
    return {name: command for name, command in found.items() if name not in groups} | within


def example_of(command: Any) -> list[str]:
    """The tokens of the example that a command's help ends with, without `muscale`."""
    last = (command.help_epilogue or "").rpartition("Example: ")[2]
    program, *tokens = shlex.split(last)
    assert program == "muscale", last
    return tokens


def check_that_a_promoted_study_speaks_json(capture: pytest.CaptureFixture[str], study: Path, spare: Path) -> set[str]:
    """Run every command that a promoted study answers without training, and return their names."""
    one = str(study)
    results = {name: json_output(capture, name, one) for name in ("sweep", "ladder", "fit", "plan", "bundle", "report")}
    results |= {name: json_output(capture, name, one) for name in ("runs", "calibration")}
    assert json_output(capture, "gc", one, "--dry-run")["dry_run"]
    assert results["sweep"]
    assert [row["key"] for row in results["runs"]]
    assert Path(results["report"]["report"]).exists()
    rows = muscale(capture, "ladder", one).out.splitlines()[1:]
    assert len(rows) == sum(row["purpose"] == "ladder" for row in results["ladder"])
    verdict = muscale(capture, "transfer", one, "--json")
    assert json.loads(verdict.out)["verdict"]
    promotion = muscale(capture, "promote", one, "--force", "--json")
    assert json.loads(promotion.out)["inside"] is (promotion.code == 0)
    whole = muscale(capture, "run", one, "--force", "--json")
    assert json.loads(whole.out) == json.loads(promotion.out)
    watched = muscale(capture, "watch", one, "--until", "now", "--json")
    assert json.loads(watched.out)["ended"]
    bundle = next(path for path in (study.parent / "bundles").iterdir())
    assert json_output(capture, "verify", bundle)["passed"]
    evaluated = json_output(capture, "evaluate", bundle, "--prompt", "a", "--tokens", "3", "--quantised-bits", "8")
    assert evaluated["val_loss"] == pytest.approx(json.loads(promotion.out)["loss"], rel=1e-5)
    assert evaluated["samples"][0]["prompt"] == "a"
    assert {score["measure"] for score in evaluated["scores"]} == {"quantised_loss"}
    assert json_output(capture, "generate", bundle, "--prompt", "a", "--tokens", "3")["prompt"] == "a"
    assert Path(json_output(capture, "export", bundle, spare / "llama", "--to", "llama")["model"]).exists()
    assert json_output(capture, "sync", one)
    assert json_output(capture, "export-optuna", one, spare / "sweep.db")
    others = (
        "transfer",
        "promote",
        "run",
        "watch",
        "verify",
        "evaluate",
        "generate",
        "export",
        "sync",
        "export-optuna",
    )
    return {*results, "gc", *others}
