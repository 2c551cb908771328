"""Commands in messages and pages carry the study file and the settings in force."""

import logging
import shlex
from pathlib import Path

import pytest

from muscale.commands import StudyCommands
from muscale.errors import StageError

COMMANDS = StudyCommands(Path("a b/study.toml"), ("plan.compute_flops=1e21", "transfer.octaves=4"))
ALL = ["--set", "plan.compute_flops=1e21", "--set", "transfer.octaves=4"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("promote", ["promote", "a b/study.toml", *ALL]),
        ("bundle --average 3", ["bundle", "a b/study.toml", *ALL, "--average", "3"]),
        (
            "transfer --set 'transfer.octaves=8'",
            ["transfer", "a b/study.toml", *ALL[:2], "--set", "transfer.octaves=8"],
        ),
        ("data check", ["data", "check", "a b/study.toml", *ALL]),
        ("report other.toml", ["report", "other.toml"]),
        ("init DIRECTORY", ["init", "DIRECTORY"]),
    ],
)
def test_a_command_is_completed_unless_it_names_its_study_or_has_none(named: str, words: list[str]) -> None:
    text, markup = f"run `muscale {named}` first", f"<p><code>muscale {named}</code></p>"
    found = COMMANDS.completed(text)
    assert shlex.split(found.split("`")[1]) == ["muscale", *words]
    assert COMMANDS.completed(found) == found
    assert shlex.split(COMMANDS.completed_markup(markup)[9:-11].replace("&#x27;", "'")) == ["muscale", *words]
    assert COMMANDS.completed_values({"lines": [{"advice": text}], "n": 1}) == {"lines": [{"advice": found}], "n": 1}


def test_a_study_below_the_current_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "inner" / "study.toml"
    for current, named in {"inner": "study.toml", ".": "inner/study.toml", "other": str(study)}.items():
        (tmp_path / current).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / current)
        assert StudyCommands(study).line("plan") == f"muscale plan {named}"
        assert StudyCommands(Path("../study.toml")).line("plan") == "muscale plan ../study.toml"


def test_errors_and_warnings_of_a_command_are_completed(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StageError) as raised, COMMANDS.completing():
        logging.getLogger("muscale.planted").warning("%s; run `muscale sync`", "away")
        raise StageError("no plan; run `muscale plan` first")
    for text in (caplog.messages[0], str(raised.value)):
        assert shlex.split(text.split("`")[1])[2:] == ["a b/study.toml", *ALL]
    logging.getLogger("muscale.planted").warning("run `muscale sync`")
    assert caplog.messages[1] == "run `muscale sync`"
