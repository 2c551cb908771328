"""Every error has a one-line message: users' errors, our own bugs, output that nobody reads; and a terminal's links."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from muscale.cli import application, entry
from muscale.cli.ending import Ending, line, print_ending
from muscale.errors import EXIT_BROKEN_PIPE, EXIT_FAULT
from tests.muscale.command_lines import muscale

MakeStudy = Callable[..., Path]
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|38|4[0-7]|48|9[0-7])[;m]")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application fails in a way that nobody foresaw."""

    def fail(_tokens: object) -> int:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(entry, "app", fail)


def test_a_users_error_has_no_trace_but_with_debug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = muscale(capsys, "check", tmp_path / "none.toml")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {tmp_path}/none.toml: no such file")
    for arguments in (("--debug", "check"), ("check", "--debug")):
        shown = muscale(capsys, *arguments, tmp_path / "none.toml")
        assert shown.code == 2
        assert "Traceback" in shown.err
        assert shown.err.endswith(done.err)
    monkeypatch.setenv("MUSCALE_DEBUG", "1")
    assert "Traceback" in muscale(capsys, "check", tmp_path / "none.toml").err
    monkeypatch.setenv("MUSCALE_DEBUG", "0")
    assert "Traceback" not in muscale(capsys, "check", tmp_path / "none.toml").err


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["ui", "STUDY", "--port", "99999999"], "--port", "99999999"),
        (["ui", "STUDY", "--port", "-1"], "--port", "-1"),
        (["ui", "STUDY", "--port", "80.5"], "--port", "80.5"),
        (["runs", "STUDY", "--limit", "2.5"], "--limit", "2.5"),
        (["sweep", "STUDY", "--cancel", "999999999999999999999"], "--cancel", "999999999999999999999"),
        (["sweep", "STUDY", "--cancel", "2.5"], "--cancel", "2.5"),
        (["compare", "STUDY", "--worth", "inf"], "worth", "inf"),
        (["plan", "STUDY", "--set", "plan.compute_flops=1e99", "--dry-run"], "plan", "1e+99"),
        (["run", "STUDY", "--set", "transfer.widths=[]", "--dry-run"], "transfer.widths", "[]"),
        (["run", "STUDY", "--set", "transfer.horizons=[]", "--dry-run"], "transfer.horizons", "[]"),
        (["fit", "--runs", "TABLE", "--n-params", "total", "--compute-flops", "0"], "compute_flops", "0"),
        (["fit", "--runs", "TABLE", "--n-params", "total", "--compute-flops", "-1"], "compute_flops", "-1"),
    ],
)
def test_an_odd_number_is_a_users_error_that_names_key_and_value(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str], words: list[str], key: str, value: str
) -> None:
    path = make_study()
    table = path.parent / "runs.csv"
    table.write_text("n_params,n_tokens,loss\n1e6,2e7,4.0\n")
    done = muscale(capsys, *({"STUDY": str(path), "TABLE": str(table)}.get(word, word) for word in words))
    assert done.code == 2
    assert key in done.err
    assert value in done.err


def test_what_comes_after_two_hyphens_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert muscale(capsys, "check", "--", "--debug").err.startswith("error: --debug: no such file")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["swep"], 'Did you mean "sweep"?'),
        (["sweep"], "STUDY is missing"),
        (["fit", "--runs"], "--runs needs a value"),
        (["check", "study.toml", "more"], "unexpected argument: more"),
        (["watch", "study.toml", "--until", "tomorrow"], '"now", "alarm", "end"'),
    ],
)
def test_a_line_that_cannot_be_parsed_gets_the_reason_and_a_pointer_to_help(
    tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = muscale(capsys, *tokens)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "--help`" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("continue", "STUDY", "none.toml"), "none.toml: "),
        (("continue", "STUDY", "."), ".: "),
        (("train", "none.json"), "none.json: "),
        (("verify", "none"), "none: "),
        (("sweep", "STUDY", "--learn-from", "none"), "--learn-from none: "),
        (("sweep", "STUDY", "--learn-from", "none.db#it"), "--learn-from none.db#it: "),
        (("watch", "STUDY", "--every", "0"), "--every: "),
        (("fit", "STUDY", "--loss-unit", "bits per token"), "--loss-unit"),
        (("bundle", "STUDY", "--dry-run"), "--dry-run"),
        (("plan", "STUDY", "--export", "STUDY"), "study.toml"),
    ],
)
def test_wrong_paths_and_options_get_a_readable_message(
    arguments: tuple[str, ...], message: str, make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_study())
    done = muscale(capsys, *(path if part == "STUDY" else part for part in arguments))
    assert done.code == 2
    assert message in done.err
    assert "Errno" not in done.err


@pytest.mark.usefixtures("faulty")
def test_a_bug_is_reported_as_one_and_its_traceback_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    done = muscale(capsys, "check", "study.toml")
    assert done.code == EXIT_FAULT
    assert "internal error of muscale: ZeroDivisionError: nobody thought of this" in done.err
    assert "in fail" in done.err
    assert "please report it" in done.err


def test_an_error_that_an_interruption_led_to_is_no_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(_tokens: object) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise ConnectionError("the head is gone")

    monkeypatch.setattr(entry, "app", leave)
    assert muscale(capsys, "check", "study.toml").code == 130


@pytest.mark.usefixtures("faulty")
def test_in_a_terminal_the_trace_of_a_fault_goes_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = muscale(capsys, "check", "study.toml")
    assert done.code == EXIT_FAULT
    assert "Traceback" not in done.err
    (file,) = tmp_path.iterdir()
    assert str(file) in done.err
    kept = file.read_text()
    assert "muscale check study.toml" in kept
    assert "ZeroDivisionError: nobody thought of this" in kept
    assert "in fail" in kept
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_no_secret_of_the_environment_stands_in_an_error_or_its_stack(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSCALE_LEDGER_URL", "postgresql://me:pa%2Fss-word@db/muscale")
    monkeypatch.setenv("WANDB_API_KEY", "k3y" * 10)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)

    def fail(_tokens: object) -> int:
        raise ValueError("postgresql://me:pa%2Fss-word@db/muscale or pa/ss-word or " + "k3y" * 10)

    monkeypatch.setattr(entry, "app", fail)
    done = muscale(capsys, "check", "study.toml", "--set", "a.b=" + "k3y" * 10)
    assert done.code == EXIT_FAULT
    output = done.err + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "$MUSCALE_LEDGER_URL or $MUSCALE_LEDGER_URL or $WANDB_API_KEY" in output
    assert not [secret for secret in ("ss-word", "k3yk3y") if secret in output.replace('k3y" * 10', "")]


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    code = (
        "import sys; from muscale.cli import entry; entry.app = lambda tokens: print('line\\n' * 100_000); "
        "sys.argv = ['muscale']; entry.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == EXIT_BROKEN_PIPE


def test_a_rank_ends_with_its_code_whatever_python_s_end_would_do() -> None:
    code = (
        "import atexit, os, sys; from muscale.cli import entry; atexit.register(os.abort); "
        "entry.app = lambda tokens: print('said') or 75; sys.argv = ['muscale', 'train', 'prepared.json']; entry.main()"
    )
    rank = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | {"WORLD_SIZE": "2"})
    assert (rank.returncode, rank.stdout) == (75, b"said\n")


def in_terminal(arguments: list[str], **variables: str) -> str:
    """What a real terminal receives from the command."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "muscale", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        received = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            received += part
        process.wait(60)
    os.close(ours)
    return received.decode()


def test_a_terminal_gets_colours_unless_no_color_is_set() -> None:
    assert COLOUR.search(in_terminal(["sweep", "--help"]))
    plain = in_terminal(["sweep", "--help"], NO_COLOR="1")
    assert "Search the hyperparameter space" in plain
    assert not COLOUR.search(plain)


def test_a_summary_links_its_paths_in_a_terminal_only(tmp_path: Path) -> None:
    shown = in_terminal(["init", str(tmp_path / "a b")])
    path = tmp_path / "a b" / "study.toml"
    assert f"wrote {path}" in shown
    assert f"muscale doctor '{path}'" in shown.replace("\r\n", "")
    assert application.app.name == ("muscale",)
    ending = Ending(wrote={"report": path}, next=(line("run", path),))
    for terminal in (True, False):
        console = Console(
            force_terminal=terminal, width=200, color_system="standard" if terminal else None, no_color=True
        )
        with console.capture() as captured:
            print_ending(ending, console)
        output = captured.get()
        assert str(path) in output
        assert ("\x1b]8;id=" in output and path.as_uri() in output) is terminal
        assert ("\x1b" in output) is terminal
