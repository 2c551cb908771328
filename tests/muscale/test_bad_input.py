"""Input that is wrong in ways that nobody means: one sentence with file, key, rule and value, exit code 2, and nothing written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyConfig, StudyFileError
from muscale.search.prior_runs import runs_of
from muscale.settings.stage_file import StageFile
from muscale.settings.strict import MOST_TOLD
from muscale.settings.toml_file import MOST_DEPTH, parse_toml
from muscale.store.ledger import Ledger
from muscale.store.tables import ResultKind
from tests.fuzz.database_targets import write_ledgers, write_optuna_study
from tests.muscale.command_lines import Done, muscale
from tests.muscale.conftest import MICRO
from tests.muscale.planted_ladder import registered_plan

MakeStudy = Callable[..., Path]
Capture = pytest.CaptureFixture[str]
LADDER = "n_params,n_tokens,loss\n" + "".join(
    f"{n},{d},{1.7 + 400 / n**0.34 + 410 / d**0.28}\n" for n in (10**7, 10**8, 10**9) for d in (10**9, 10**10, 10**11)
)
FIT = ("--n-params", "total")


def refused(capture: Capture, *arguments: str | Path) -> str:
    """What the command says of its input."""
    done: Done = muscale(capture, *arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert "fault of muscale" not in done.err
    assert len(done.err) < 20_000
    return done.err.removeprefix("error: ")


@contextmanager
def somebody_else() -> Iterator[None]:
    """Root may read everything, so its tests are made as a user that has nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


DEEP = 3000
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "name: missing, a value is required"),
    "of zeros": (bytes(100), "can't be read as TOML"),
    "no text": (b'name = "\xff\xfe"', "can't be read as TOML: 'utf-8' codec can't decode byte 0xff"),
    "deep lists": (b"name = " + b"[" * DEEP + b"]" * DEEP, f"must lie at most {MOST_DEPTH} deep"),
    "deep tables": (b"[" + b".".join([b"a"] * DEEP) + b"]", f"must lie at most {MOST_DEPTH} deep"),
    "a deep key": (b'"a" . b.' + b" 'c'\t. " * DEEP + b"d = 1", f"must lie at most {MOST_DEPTH} deep"),
    "too deep for settings": (b"a = " + b"[" * 60 + b"]" * 60, f"must lie at most {MOST_DEPTH} deep"),
    "ten thousand keys": (b"".join(b"key%d = 1\n" % n for n in range(10_000)), "more"),
    "a key twice": (b'name = "a"\nname = "b"', "can't be read as TOML: Cannot overwrite a value"),
    "a number of 65 bits": (
        b"[sweep]\ntrials = 9223372036854775808",
        "sweep.trials: a whole number must fit into 64 bits",
    ),
    "a number of 5,000 digits": (b"name = " + b"9" * 5000, "can't be read as TOML: Exceeds the limit"),
    "a day that is none": (b"name = 2026-02-31", "can't be read as TOML"),
    "too long": (b"#" * (1 << 20) + b"#", "must have at most 1,048,576 bytes"),
    "a long value": (
        b'name = "' + b"x" * 100_000 + b'"\nnone = "' + b"y" * 100_000 + b'"',
        "none: unknown key (value 'yyy",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_study_file_that_is_none_is_refused_in_words(kind: str, tmp_path: Path, capsys: Capture) -> None:
    content, message = FILES[kind]
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    told = refused(capsys, "check", path)
    assert told.startswith(f"{path}: ")
    assert message in told
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", FILES)
def test_a_stage_file_that_is_none_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    content, message = FILES[kind]
    path = tmp_path / "stage.toml"
    path.write_bytes(content)
    with pytest.raises(StudyFileError) as refusal:
        StageFile.read(path, vocab_size=256)
    told = str(refusal.value)
    assert told.startswith(f"{path}: ")
    assert message in told
    assert len(told) < 20_000


def test_of_many_problems_the_first_are_told_and_the_others_counted(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "study.toml"
    path.write_text(MICRO + "[tracking]\n" + "".join(f"key{n} = 1\n" for n in range(10_000)))
    told = refused(capsys, "check", path).splitlines()
    assert len(told) == MOST_TOLD + 1
    assert told[-1] == f"and {10_000 - MOST_TOLD:,} more"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sweep.trials=1e400", "sweep.trials: Input should be a valid integer, got inf"),
        ("sweep.n_tokens=-1", "sweep.n_tokens: Input should be greater than 0, got -1"),
        ("sweep.n_tokens=0", "sweep.n_tokens: Input should be greater than 0, got 0"),
        ("sweep.rungs=1000000000", "sweep.rungs: Input should be less than or equal to 100, got 1000000000"),
        (
            "sweep.reduction_factor=1e300",
            "sweep.reduction_factor: Input should be less than or equal to 1000, got 1e+300",
        ),
        (
            "ladder.stems=[{ width = 16, n_tokens = 16384, branches = 100000000000 }]",
            "ladder.stems.0.branches: Input should be less than or equal to 100, got 100000000000",
        ),
        (
            "hyperparameters={ learning_rate = 0.01, batch_tokens = 256, batch_doublings = 100000000000, batch_ramp_tokens = 1 }",
            "hyperparameters: batch_tokens must be a multiple of 2^100000000000 to double so often, got 256",
        ),
        ("corpus.source='~nobody-of-this-name/text'", "corpus.source: "),
        (f"corpus.source='{'a' * 300}'", "no such file or folder, as none has so long a name"),
        ("transfer.horizons=[1.0, 1e308]", "transfer.n_tokens: a run must have fewer than 2^63 tokens, got one of inf"),
        ("fit.max_regret=nan", "fit.max_regret: Input should be greater than 0, got nan"),
        ("resources.stall_minutes=nan", "resources.stall_minutes: Input should be greater than 0, got nan"),
        ("hyperparameters.clip_norm=inf", "hyperparameters.clip_norm: Input should be a finite number, got inf"),
        ("model.mlp_ratio=nan", "model.mlp_ratio: Input should be a finite number, got nan"),
        (
            'sweep.space.learning_rate={distribution="choice", values=["a", "b"]}',
            "sweep.space.learning_rate: each of its values must be one that [hyperparameters] takes, got 'a'",
        ),
        (
            'sweep.space.batch_tokens={distribution="ordinal", values=[0, 256]}',
            "sweep.space.batch_tokens: a batch must be a whole number of tokens, at least 1, got 0",
        ),
        (
            'sweep.space.batch_tokens={distribution="choice", values=[256.0, 512.0]}',
            "sweep.space.batch_tokens: a batch must be a whole number of tokens, at least 1, got 256.0",
        ),
        (f"{'a.' * 3000}b=1", f"tables must lie at most {MOST_DEPTH} deep"),
        (f"sweep.seed={'[' * 3000}", "sweep.seed: Input should be a valid integer, got '[[["),
    ],
)
def test_a_setting_beyond_its_bounds_is_refused(
    setting: str, message: str, make_study: MakeStudy, capsys: Capture
) -> None:
    path = make_study()
    before = sorted(path.parent.rglob("*"))
    assert message in refused(capsys, "check", path, "--set", setting)
    assert sorted(path.parent.rglob("*")) == before


def numbers(values: Any, key: str = "") -> Iterator[str]:
    """The keys of all numbers with a fraction, as --set takes them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{key}{name}.")
        elif isinstance(value, float):
            yield f"{key}{name}"


def test_no_setting_takes_what_is_no_number(make_study: MakeStudy) -> None:
    path = make_study()
    found = list(numbers(StudyConfig.read(path).to_dict()))
    assert len(found) > 40
    for key in found:
        for value in ("nan", "-inf", "inf"):
            if value == "inf" and key in ("fit.max_regret", "resources.stall_minutes"):
                continue  # means: without bound
            with pytest.raises(StudyFileError, match=key.rpartition(".")[2]):
                StudyConfig.read(path, [f"{key}={value}"])


@pytest.mark.parametrize(
    "command",
    [
        ("check", "LOOP.toml"),
        ("promote", "STUDY", "--plan", "LOOP.toml"),
        ("continue", "STUDY", "LOOP.toml"),
        ("watch", "STUDY", "--losses", "LOOP.csv"),
        ("calibration", "STUDY", "LOOP"),
        ("train", "LOOP.json"),
        ("import-space", "LOOP.yaml"),
        ("import-space", "LOOP.db"),
        ("fit", "--runs", "LOOP.csv", *FIT),
        ("verify", "LOOP"),
        ("generate", "LOOP"),
    ],
)
def test_a_link_to_itself_is_no_file(
    command: tuple[str, ...], make_study: MakeStudy, tmp_path: Path, capsys: Capture
) -> None:
    path = make_study()
    if "watch" in command:  # which reads nothing before a plan is registered
        ledger = Ledger(path.parent / "ledger.sqlite")
        registered_plan(path, ledger)
        ledger.close()
    loop = tmp_path / next(part for part in command if part.startswith("LOOP")).replace("LOOP", "lo op")
    loop.symlink_to(loop)
    filled = (str(loop) if part.startswith("LOOP") else part.replace("STUDY", str(path)) for part in command)
    done = muscale(capsys, *filled)
    assert (done.code, done.out) == (2, ""), done.err
    told = done.err.splitlines()[-1]  # a study's corpus is written, and told, before a stage file is read
    assert told.startswith("error: ")
    assert str(loop) in told


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("check", "PLACE"), "is a directory; give the study file in it"),
        (("promote", "STUDY", "--plan", "PLACE"), "is a directory, not a file"),
        (("train", "PLACE"), "is a directory, not a file"),
        (("import-space", "PLACE.yaml"), "no such file"),
        (("fit", "--runs", "PLACE.csv", *FIT), "no such file"),
        (("verify", "PLACE"), "there is no such file"),
    ],
)
def test_a_directory_is_no_file(
    command: tuple[str, ...], message: str, make_study: MakeStudy, tmp_path: Path, capsys: Capture
) -> None:
    study = str(make_study())
    place = tmp_path / "ä b"
    place.mkdir()
    told = refused(capsys, *(part.replace("PLACE", str(place)).replace("STUDY", study) for part in command))
    assert str(place) in told
    assert message in told


@pytest.mark.parametrize(
    ("command", "content"),
    [
        (("check", "FILE.toml"), MICRO),
        (("fit", "--runs", "FILE.csv", *FIT), LADDER),
        (("import-space", "FILE.yaml"), "method: grid"),
        (("train", "FILE.json"), "{}"),
    ],
)
def test_a_file_that_may_not_be_read_is_told(
    command: tuple[str, ...], content: str, tmp_path: Path, capsys: Capture
) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / next(part for part in command if part.startswith("FILE"))
    arguments = [part.replace(path.name, str(path)) for part in command]
    path.write_text("")
    refused(capsys, *arguments)  # imports what it needs while it may be read
    path.write_text(content)
    path.chmod(0)
    with somebody_else():
        told = refused(capsys, *arguments)
    assert str(path) in told
    assert "may not read" in told or "Permission denied" in told or "permission denied" in told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.replace("10000000,", "nan,", 1), "n_params must be finite and above 0, got nan"),
        (lambda rows: rows.replace("10000000,", "inf,", 1), "n_params must be finite and above 0, got inf"),
        (lambda rows: rows.replace("10000000,", "-10000000,", 1), "n_params must be finite and above 0, got -1e+07"),
        (lambda rows: rows.replace("10000000,", "0,", 1), "n_params must be finite and above 0, got 0"),
        (lambda rows: rows.replace("1000000000,", "1,", 1), "must be a plain count of at least 1000"),
        (lambda rows: rows.replace("loss", "losses"), "missing column loss"),
        (lambda _: "", "can't be read as a table"),
        (lambda _: "n_params,n_tokens,loss\n", "at least"),
        (lambda rows: rows + "1,2,3,4,5\n", "can't be read as a table"),
        (lambda rows: rows.replace("n_params", "loss", 1), "missing column n_params"),
        (lambda _: "\x00" * 1000, "missing column"),
    ],
)
def test_a_ladder_that_tells_no_law_is_refused(
    change: Callable[[str], str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "a ladder.csv"
    path.write_text(change(LADDER))
    told = refused(capsys, "fit", "--runs", path, *FIT)
    assert told.startswith(f"fit: {path}: ")
    assert message in told


def test_counts_beyond_64_bits_are_numbers_like_others(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "ladder.csv"
    path.write_text(LADDER.replace("00,", "00" + "0" * 15 + ","))
    done = muscale(capsys, "fit", "--runs", path, *FIT)
    assert done.code == 0, done.err
    assert "E  " in done.out


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
    assert muscale(capsys, "fit", "--runs", ladder, *FIT).code == 0


def test_a_loop_of_links_in_a_corpus_is_passed_over(make_study: MakeStudy, capsys: Capture) -> None:
    from proxy_models.data.sources import Source

    path = make_study()
    text = path.parent / "text"
    whole = Source(path=str(text)).fingerprint()
    (text / "up").symlink_to(text)
    (text / "self").symlink_to(text / "self")
    assert Source(path=str(text)).fingerprint() == whole
    with pytest.raises(ValueError, match="self: no such file or folder"):
        Source(path=str(text / "self")).files()


YAML: dict[str, tuple[str, str]] = {
    "deep": ("[" * DEEP, "can't be read as YAML"),
    "an unhashable method": (
        "method: [a]\nparameters: {a: {value: 1}}",
        "method: must be one of grid, random, bayes, got ['a']",
    ),
    "a number that is none": ("method: !!int x\nparameters: {}", "can't be read as YAML"),
    "a time that is none": ("method: !!timestamp x\nparameters: {}", "can't be read as YAML"),
    "a day that is none": ("method: 2026-02-31\nparameters: {}", "can't be read as YAML"),
    "an object": ("method: !!python/object/apply:os.system [touch x]", "could not determine a constructor"),
    "an infinite eta": (
        "method: grid\nparameters: {a: {value: 1}}\nearly_terminate: {type: hyperband, eta: .inf}",
        "early_terminate.eta: must be above 1",
    ),
}


@pytest.mark.parametrize("kind", YAML)
def test_a_sweep_of_others_that_is_none_is_refused(kind: str, tmp_path: Path, capsys: Capture) -> None:
    content, message = YAML[kind]
    path = tmp_path / "sweep.yaml"
    path.write_text(content)
    told = refused(capsys, "import-space", path)
    assert told.startswith(f"import-space: {path}: ")
    assert message in told


def test_an_imported_space_holds_no_line_that_its_names_smuggle_in(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a\n[storage]\nledger = 1\n.yaml"
    path.write_text('method: grid\nparameters: {"b\\n[storage]\\nx": {value: 1}}\n"c\\n[d]": 1')
    done = muscale(capsys, "import-space", path)
    assert done.code == 0, done.err
    assert list(parse_toml(done.out)) == ["sweep"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tokens,loss\n1e400,2\n", "line 2, tokens: must be finite and not negative, got inf"),
        ("step,loss\ninf,2\n", "line 2, step: must be finite and not negative, got inf"),
        ("step,loss\n1e308,2\n", "must be a run of the"),
        ("tokens,loss\n-1,2\n", "line 2, tokens: must be finite and not negative, got -1.0"),
        ("tokens,loss\n256,0\n", "line 2, loss: must be above 0 (or NaN: diverged), got 0.0"),
        ("tokens,train_loss\n256,-2\n", "line 2, train_loss: must be above 0 (or NaN: diverged), got -2.0"),
        ("tokens,loss,loss\n256,2,3\n", "column loss must occur once, got it 2 times"),
        ("tokens,loss\n256," + "9" * 140_000 + "\n", "not valid CSV: field larger than field limit"),
        ("", "the columns are none"),
    ],
)
def test_impossible_losses_of_a_run_trained_elsewhere_are_refused(content: str, message: str, tmp_path: Path) -> None:
    from muscale import StageError
    from muscale.monitoring.external_run import ExternalRun
    from muscale.monitoring.losses import LossFile

    (tmp_path / "study.toml").write_text(MICRO)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    plan = registered_plan(tmp_path / "study.toml", ledger)
    path = tmp_path / "losses.csv"
    path.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StageError) as refusal:
        ExternalRun(ledger, LossFile(path=path)).update()
    assert str(path) in str(refusal.value)
    assert message in str(refusal.value)
    assert ledger.result(ResultKind.OBSERVATION_STARTED, plan.key) is None
    assert sorted(tmp_path.rglob("*")) == before
    ledger.close()
