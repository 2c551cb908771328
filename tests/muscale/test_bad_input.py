"""Wrong input ends a command with exit code 2, one message that names the file and nothing written; any path will do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError
from muscale.monitoring.external_run import ExternalRun
from muscale.monitoring.losses import LossSource
from muscale.search.prior_runs import runs_of
from muscale.settings.toml_file import parse_toml
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from tests.fuzz.targets import write_ledgers, write_optuna_study
from tests.muscale.command_lines import muscale
from tests.muscale.conftest import MICRO
from tests.muscale.planted_ladder import registered_plan

MakeStudy = Callable[..., Path]
Capture = pytest.CaptureFixture[str]
LADDER = "n_params,n_tokens,loss\n" + "".join(
    f"{n},{d},{1.7 + 400 / n**0.34 + 410 / d**0.28}\n" for n in (10**7, 10**8, 10**9) for d in (10**9, 10**10, 10**11)
)
FIT = ("fit", "--n-params", "total", "--runs")


@pytest.mark.parametrize(
    ("command", "name", "content", "word"),
    [
        (FIT, "a b.csv", LADDER.replace("10000000,", "nan,", 1), "n_params"),
        (FIT, "a b.csv", LADDER.replace("1000000000,", "1,", 1), "1000"),
        (FIT, "a b.csv", LADDER.replace("loss", "losses"), "loss"),
        (FIT, "a b.csv", LADDER + "1,2,3,4,5\n", "table"),
        (FIT, "a b.csv", "", "table"),
        (FIT, "a b.csv", None, "directory"),
        (("import-space",), "sweep.yaml", "method: [a]\nparameters: {a: {value: 1}}", "method"),
        (("import-space",), "sweep.yaml", "method: !!python/object/apply:os.system [touch x]", "YAML"),
        (("import-space",), "sweep.yaml", None, "directory"),
        (("import-space",), "train.py", "param_space = {'lr': 1}", "muscale.tune.space_of"),
        (("train",), "run.json", "{}", ""),
        (("train",), "run.json", None, "directory"),
        (("check",), "study.toml", None, "directory"),
        (("verify",), "bundle", "", ""),
    ],
)
def test_a_file_that_is_none_is_refused(
    command: tuple[str, ...], name: str, content: str | None, word: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_text(content)
    done = muscale(capsys, *command, path)
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("error: ")
    assert str(path) in done.err
    assert word in done.err
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("tokens,loss\n1e400,2\n", "line 2, tokens"),
        ("step,loss\n1e308,2\n", ""),
        ("tokens,loss\n256,0\n", "line 2, loss"),
        ("tokens,train_loss\n256,-2\n", "line 2, train_loss"),
        ("tokens,loss,loss\n256,2,3\n", "loss"),
        ("", ""),
    ],
)
def test_impossible_losses_of_a_run_trained_elsewhere_are_refused(content: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(MICRO)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    plan = registered_plan(tmp_path / "study.toml", ledger)
    path = tmp_path / "losses.csv"
    path.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StageError) as refusal:
        ExternalRun(ledger, LossSource(losses=path)).update()
    assert str(path) in str(refusal.value)
    assert word in str(refusal.value)
    assert ledger.result(ResultKind.EXTERNAL_RUN_STARTED, plan.key) is None
    assert sorted(tmp_path.rglob("*")) == before
    ledger.close()


def test_paths_may_have_anything_in_them(make_study: MakeStudy, capsys: Capture) -> None:
    path = make_study("a b; $(x) 'é' 日本 \u202e #")
    done = muscale(capsys, "sweep", path, "--dry-run")
    assert done.code == 0, done.err
    odd = path.parent / "a?b&c=d%20{x}"
    odd.mkdir()
    write_ledgers(odd / "theirs?mode=rw.sqlite", odd / "ours?.sqlite")
    write_optuna_study(path.with_name("theirs.db"))  # Optuna itself takes no such path
    path.with_name("theirs.db").rename(odd / "theirs.db")
    assert muscale(capsys, "import-space", odd / "theirs.db").code == 0
    assert len(runs_of(odd / "theirs?mode=rw.sqlite")) == 2
    found = {file.name for file in odd.iterdir() if file.is_file()}
    assert found == {"theirs?mode=rw.sqlite", "ours?.sqlite", "theirs.db"}
    ladder = path.with_name("zeilen #1 %20.csv")
    ladder.write_text(LADDER)
    assert muscale(capsys, *FIT, ladder).code == 0


def test_an_imported_space_contains_no_injected_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a\n[storage]\nledger = 1\n.yaml"
    path.write_text('method: grid\nparameters: {"b\\n[storage]\\nx": {value: 1}}\n"c\\n[d]": 1')
    done = muscale(capsys, "import-space", path)
    assert done.code == 0, done.err
    assert list(parse_toml(done.out)) == ["sweep"]
