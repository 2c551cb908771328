"""Secrets of the environment, planted where a user has them, are in nothing that a study writes, prints or starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import Study, StudyConfig
from muscale.bundles import bundle_files
from muscale.bundles.bundle import METRICS, WEIGHTS
from muscale.full_runs.promote.prepared import PREPARED, prepare, train_here
from muscale.full_runs.promote.promotion import begin, promote
from muscale.layout import BUNDLES, FULL_RUNS, PLANS, REPORT, RESULT
from muscale.plans.gate import Gate
from muscale.plans.plan_export import export
from muscale.plans.plan_file import write
from muscale.store.ledger import Ledger
from tests.muscale.command_lines import muscale
from tests.muscale.planted_ladder import registered_plan
from tests.muscale.planted_secrets import PLANTED, SECRET, holding, leaking_processes

MakeStudy = Callable[..., Path]
SMALL = ("ladder.stems=[{width=16, n_tokens=16384}]", "plan.compute_flops=2e9")


def test_no_command_prints_a_secret_or_writes_it_to_a_file(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    path = make_study()
    path.write_text(path.read_text().replace("[promote]", '[promote]\nwebhook = "MY_WEBHOOK"'))
    config, ledger = StudyConfig.read(path), Ledger(path.parent / "ledger.sqlite")
    write(registered_plan(path, ledger), config, ledger.directory)
    ledger.close()
    printed = ""
    for arguments in (
        ("check", path, "--debug"),
        ("report", path),
        ("runs", path, "--json"),
        ("watch", path, "--until", "now"),
        ("sweep", path, "--dry-run", "--json"),
        ("runs", make_study("elsewhere"), "--set", "storage.ledger=postgresql", "--debug"),
        ("watch", path, "--losses", "wandb:me/project/run", "--debug"),
    ):
        done = muscale(capsys, *arguments)
        printed += done.out + done.err
        assert leaking_processes() == [], arguments
    assert SECRET not in printed
    assert "127.0.0.1" in printed, "the database was asked for"
    bundle_files.write_manifest(path.parent, {"plan": "p"})
    assert (path.parent / REPORT).exists()
    assert len([found for found in tmp_path.rglob("*") if found.is_file()]) > 45, "there is something to search"
    assert holding(tmp_path) == []


def test_a_promoted_run_its_plan_and_its_bundle_hold_no_secret(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    path = make_study()
    path.write_text(path.read_text().replace("[promote]", '[promote]\nwebhook = "MY_WEBHOOK"'))
    study = Study.open(path, SMALL, quiet=True)
    plan = registered_plan(path, study.ledger, *SMALL)
    write(plan, study.config, study.directory)
    numerics, gate = study.config.shared_numerics(study.corpus, study.directory), Gate(plan=plan.key, lines=())
    export(plan, numerics, tmp_path / "exported")
    begin(plan, study.config, study.ledger, verdict="pass", gate=gate)
    run = study.directory / FULL_RUNS / plan.key
    prepared = prepare(plan, study.config, numerics, run)

    train_here(Path(prepared.path))
    assert leaking_processes() == []
    promote(plan, study.config, study.ledger, numerics, verdict="pass", gate=gate)
    study.bundle()
    study.ledger.close()
    printed = ""
    for command in (
        ("bundle",),
        ("report",),
        ("watch", "--until", "now"),
        ("calibration", "--json"),
        ("runs", "--json"),
    ):
        done = muscale(capsys, command[0], path, *command[1:])
        assert done.code in (0, 1), done.err
        printed += done.out + done.err
    assert SECRET not in printed
    bundle = path.parent / BUNDLES / plan.key
    written = [bundle / name for name in (WEIGHTS, METRICS, bundle_files.MANIFEST)]
    written += [run / name for name in (PREPARED, RESULT)]
    written += [path.parent / REPORT, path.parent / PLANS / f"{plan.key}.toml", tmp_path / "exported" / "plan.json"]
    assert [file for file in written if not file.is_file()] == [], "there is something to search"
    assert holding(tmp_path) == []
