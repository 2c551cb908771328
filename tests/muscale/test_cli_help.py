"""The help: every command ends with an example that can be typed, commands stand in the order of the loop."""

import re
import shutil
import subprocess

import pytest

from muscale.cli.application import EXIT_CODES, app
from tests.muscale.command_lines import commands, example_of, muscale

GROUPS = ["Search", "Scaling law", "Full run", "Artifacts", "Inspect", "Machine"]


@pytest.mark.parametrize("name", commands())
def test_a_command_ends_its_help_with_an_example_that_can_be_parsed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = example_of(commands()[name])
    assert tokens[: len(name.split())] == name.split()
    assert "--help" not in tokens
    parsed = app.parse_args(tokens, exit_on_error=False, print_error=False)
    assert parsed[0] is commands()[name].default_command
    shown = muscale(capsys, *name.split(), "--help")
    assert shown.code == 0
    last = " ".join(shown.out.split("Example: ")[-1].split())
    assert last.split() == ["muscale", *commands()[name].help_epilogue.partition("Example: muscale ")[2].split()]


@pytest.mark.parametrize("name", commands())
def test_the_help_of_a_command_has_no_tags_which_it_would_not_show(name: str) -> None:
    assert re.findall(r"<\w+>", commands()[name].default_command.__doc__ or "") == []


def test_the_application_shows_groups_exit_codes_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    shown = muscale(capsys, "--help").out
    places = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    text = " ".join(shown.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text
    app.parse_args(example_of(app), exit_on_error=False, print_error=False)
    loop = ["run", "check", "sweep", "transfer", "ladder", "fit", "plan", "promote", "bundle", "runs", "init"]
    shown_at = [shown.index(f"│ {name} ") for name in loop]
    assert shown_at == sorted(shown_at)


def test_completion_for_bash_is_a_valid_script() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    script = app.generate_completion(shell="bash")
    assert all(word in script for name in commands() for word in name.split())
    done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--install-completion" in app
