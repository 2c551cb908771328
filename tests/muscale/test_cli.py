"""The command line: light to start, strict about input, exit codes as documented."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale.layout import LEDGER
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind, retrained
from muscale.study import Study
from tests.muscale.command_lines import muscale

MakeStudy = Callable[..., Path]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from muscale.cli import app; app('--help', result_action='return_value'); "
        "print(*{'torch', 'ray', 'lightning', 'pandas', 'optuna', 'sqlalchemy'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert "promote" in done.stdout


def test_a_study_is_read_and_reported_without_what_trains() -> None:
    code = (
        "import sys, muscale.study, muscale.pages.contents; "
        "print(*{'torch', 'ray', 'lightning', 'optuna', 'wandb'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "sweep.trails=3"), "sweep.trails: unknown key"),
        (("--set", "corpus.source=nowhere"), "corpus.source:"),
        (("--set", "sweep.n_tokens=768"), "the smallest of 2 rungs"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(
    make_study: MakeStudy, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    done = muscale(capsys, "sweep", path, *arguments)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert sorted(path.parent.rglob("*")) == before


def test_an_empty_corpus_exits_with_2_and_writes_nothing(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    for file in (path.parent / "text").iterdir():
        file.unlink()
    done = muscale(capsys, "check", path)
    assert done.code == 2
    assert "the corpus is empty" in done.err
    assert not (path.parent / "ledger.sqlite").exists()


def test_a_directory_of_another_study_is_refused(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    Study.open(path, quiet=True).ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    done = muscale(capsys, "runs", path, "--set", "model.mlp_ratio=3.0")
    assert done.code == 2
    assert "model.mlp_ratio is 3.0 here but 2.75 there" in done.err


def test_init_writes_a_study_file_and_never_over_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert muscale(capsys, "init", tmp_path / "new").code == 0
    path = tmp_path / "new" / "study.toml"
    path.write_text("mine")
    assert muscale(capsys, "init", tmp_path / "new").code == 2
    assert muscale(capsys, "init", tmp_path / "new", "--keep").code == 0
    assert path.read_text() == "mine"


def test_a_dry_run_shows_the_cost_and_writes_nothing(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    done = muscale(capsys, "run", path, "--dry-run", "--json")
    rows = {row["stage"]: row for row in json.loads(done.out)}
    assert rows["sweep"]["runs"] == 4
    assert rows["transfer"]["runs"] == 3 * 5 * 2
    assert rows["promote"]["compute_flops"] == 2.5e10
    assert sorted(path.parent.rglob("*")) == before


def test_a_dry_run_needs_a_plan_and_a_smoke_test_asks_no_gate(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    for options, message in (
        (("--smoke-test", "--force"), "--smoke-test cannot be combined with --force"),
        (("--steps", "50"), "--steps 50 is for --smoke-test"),
        (("--smoke-test", "--dry-run"), "with --dry-run"),
        (
            ("--profile", "25:20", "--dry-run"),
            'promote.profile must be "first:last" with first at most last, got "25:20"',
        ),
    ):
        done = muscale(capsys, "promote", path, *options)
        assert (done.code, message in done.err) == (2, True), done.err
    done = muscale(capsys, "promote", path, "--dry-run")
    assert done.code == 0
    assert "promote" in done.out
    assert sorted(path.parent.rglob("*")) == before
    done = muscale(capsys, "promote", path, "--plan", path.parent / "none.toml", "--dry-run")
    assert done.code == 2
    assert "Traceback" not in done.err


def test_the_coordinate_check_is_a_command(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    done = muscale(capsys, "check", path, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)
    assert muscale(capsys, "check", path).out.startswith("coordinate check passed")


def test_gc_is_a_command(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    ours = make_study("ours")
    orphan = ours.parent / "states" / "orphan.pt"
    orphan.parent.mkdir()
    orphan.write_bytes(bytes(10))
    os.utime(orphan, (0, 0))
    done = muscale(capsys, "gc", ours, "--dry-run", "--json")
    assert json.loads(done.out)["gone"] == {"state without a row": 10}
    assert orphan.exists()
    assert muscale(capsys, "gc", ours).out.startswith("gc: freed 10 B in 1 files")
    assert not orphan.exists()
    ledger = Ledger(ours.parent / LEDGER)
    ledger.insert(retrained, key="key", tokens=1000, seconds=1.0)
    ledger.close()
    assert muscale(capsys, "runs", ours).err.startswith("pruned states were retrained 1 times, 1,000 tokens")


def test_as_a_module_it_exits_with_the_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "muscale", "runs", str(tmp_path / "none.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_runs_are_chosen_compared_and_exported(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    assert muscale(capsys, "runs", path).out == "no runs yet\n"
    for arguments, message in (
        (("--where", "los<2"), "did you mean loss?"),
        (("--compare", "a", "b"), "no run's key begins with 'a'"),
        (("--compare", "a", "b", "--limit", "1"), "--compare shows two runs; leave out --where, --sort, --limit"),
        (("--dry-run",), "--dry-run"),
    ):
        done = muscale(capsys, "runs", path, *arguments)
        assert done.code == 2
        assert message in done.err
    done = muscale(capsys, "runs", path, "--where", "loss<2", "--sort", "-loss", "--export", path.parent / "runs.csv")
    assert (done.code, done.out) == (0, "no runs\n")
    assert str(path.parent / "runs.csv") in done.err
    assert (path.parent / "runs.csv").read_text().startswith("purpose,key,")


def test_a_command_names_the_next_one_with_the_same_settings(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    done = muscale(capsys, "check", path, "--set", "check.seeds=[0,1]", "--set", 'name="a b"')
    assert done.err.splitlines()[-1] == f"next: muscale sweep {path} --set 'check.seeds=[0,1]' --set 'name=\"a b\"'"
    assert "next:" not in done.out
    done = muscale(capsys, "report", path)
    assert done.out == f"{path.parent / 'report.html'}\n"
    assert done.err.splitlines()[-1] == f"report  {path.parent / 'report.html'}"
