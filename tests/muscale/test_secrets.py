"""Secrets of the environment, planted where a user has them, are in nothing that a study writes, prints or starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muscale import StudyConfig
from muscale.bundles import bundle_files
from muscale.layout import REPORT
from muscale.plans.plan_file import write
from muscale.store.ledger import Ledger
from tests.muscale.command_lines import muscale
from tests.muscale.planted_ladder import registered_plan

MakeStudy = Callable[..., Path]
SECRET = "s3cr3t-of-the-environment"
PLANTED = {
    "WANDB_API_KEY": SECRET,
    "RAY_AUTH_TOKEN": SECRET,
    "MUSCALE_LEDGER_URL": f"postgresql://me:{SECRET}@127.0.0.1:9/muscale",
    "MLFLOW_TRACKING_PASSWORD": SECRET,
    "MY_WEBHOOK": f"http://127.0.0.1:9/{SECRET}",
}


def holding(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_no_command_tells_a_secret_or_leaves_it_in_a_file(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    path = make_study()
    path.write_text(path.read_text().replace("[promote]", '[promote]\nwebhook = "MY_WEBHOOK"'))
    config, ledger = StudyConfig.read(path), Ledger(path.parent / "ledger.sqlite")
    write(registered_plan(path, ledger), config, ledger)
    ledger.close()
    told = ""
    for arguments in (
        ("check", path, "--debug"),
        ("report", path),
        ("runs", path, "--json"),
        ("watch", path, "--until", "now"),
        ("sweep", path, "--dry-run", "--json"),
        ("runs", make_study("elsewhere"), "--set", "storage.ledger=postgresql", "--debug"),
        ("observe", path, "me/project/run", "--wandb", "--debug"),
    ):
        done = muscale(capsys, *arguments)
        told += done.out + done.err
        commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        assert SECRET not in "".join(commands), arguments
    assert SECRET not in told
    assert "127.0.0.1" in told, "the database was asked for"
    bundle_files.write_manifest(path.parent, {"plan": "p"})
    assert (path.parent / REPORT).exists()
    assert len([found for found in tmp_path.rglob("*") if found.is_file()]) > 45, "there is something to search"
    assert holding(tmp_path) == []
