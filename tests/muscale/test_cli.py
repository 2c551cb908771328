"""The command line: light to start, strict about input, exit codes as documented."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale.layout import LEDGER
from muscale.ledger import Ledger

MakeStudy = Callable[..., Path]


def muscale(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muscale", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from muscale.cli import app; app('--help', result_action='return_value'); "
        "print(*{'torch', 'ray', 'lightning', 'pandas', 'optuna', 'sqlalchemy'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert "promote" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "sweep.trails=3"), "sweep.trails: unknown key"),
        (("--set", "corpus.source=nowhere"), "corpus.source:"),
        (("--set", "sweep.n_tokens=768"), "the smallest of 2 rungs"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(
    make_study: MakeStudy, arguments: tuple[str, ...], message: str
) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    done = muscale("sweep", path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.parent.rglob("*")) == before


def test_an_empty_corpus_exits_with_2_and_writes_nothing(make_study: MakeStudy) -> None:
    path = make_study()
    for file in (path.parent / "text").iterdir():
        file.unlink()
    done = muscale("check", path)
    assert done.returncode == 2
    assert "the corpus is empty" in done.stderr
    assert not (path.parent / "ledger.sqlite").exists()


def test_a_directory_of_another_study_is_refused(make_study: MakeStudy) -> None:
    path = make_study()
    assert muscale("runs", path).returncode == 0
    done = muscale("runs", path, "--set", "model.mlp_ratio=3.0")
    assert done.returncode == 2
    assert "belongs to another study: model.mlp_ratio is 3.0 here but 2.75 there" in done.stderr


def test_init_writes_a_study_file_and_never_over_one(tmp_path: Path) -> None:
    assert muscale("init", tmp_path / "new").returncode == 0
    path = tmp_path / "new" / "study.toml"
    path.write_text("mine")
    assert muscale("init", tmp_path / "new").returncode == 2
    assert muscale("init", tmp_path / "new", "--keep").returncode == 0
    assert path.read_text() == "mine"


def test_a_dry_run_tells_the_cost_and_writes_nothing(make_study: MakeStudy) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    done = muscale("run", path, "--dry-run", "--json")
    rows = {row["stage"]: row for row in json.loads(done.stdout)}
    assert rows["sweep"]["runs"] == 4
    assert rows["transfer"]["runs"] == 3 * 5 * 2
    assert rows["promote"]["compute_flops"] == 2.5e10
    assert sorted(path.parent.rglob("*")) == before


def test_a_prospect_needs_a_plan_and_a_rehearsal_takes_no_gate(make_study: MakeStudy) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    for options, message in (
        (("--rehearse", "--force"), "--rehearse asks no gate and shows no prospect; leave out --force"),
        (("--rehearse", "--dry-run"), "leave out --dry-run"),
    ):
        done = muscale("promote", path, *options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    done = muscale("promote", path, "--dry-run")
    assert done.returncode == 0
    assert "promote" in done.stdout
    assert sorted(path.parent.rglob("*")) == before
    done = muscale("promote", path, "--plan", path.parent / "none.toml", "--dry-run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_coordinate_check_is_a_command(make_study: MakeStudy) -> None:
    path = make_study()
    done = muscale("check", path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert muscale("check", path).stdout.startswith("coordinate check passed")


def test_gc_and_merge_are_commands(make_study: MakeStudy) -> None:
    ours, theirs = make_study("ours"), make_study("theirs")
    assert muscale("runs", theirs).returncode == 0
    done = muscale("merge", ours, "--from", theirs.parent, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["added"]["segments"] == 0
    orphan = ours.parent / "states" / "orphan.pt"
    orphan.parent.mkdir()
    orphan.write_bytes(bytes(10))
    os.utime(orphan, (0, 0))
    done = muscale("gc", ours, "--dry-run", "--json")
    assert json.loads(done.stdout)["gone"] == {"state without a row": 10}
    assert orphan.exists()
    assert muscale("gc", ours).stdout.startswith("gc: freed 10 B in 1 files")
    assert not orphan.exists()
    ledger = Ledger(ours.parent / LEDGER)
    ledger.record_retrained("key", tokens=1000, seconds=1.0)
    ledger.close()
    assert muscale("runs", ours).stdout.startswith("1 times a pruned state was trained again, 1,000 tokens")
