"""Commands in messages and pages, completed with the study file and the current settings, so that they run as printed.

A message names a command between backticks or at the end of a line, as in "settle it: muscale transfer". The message leaves out
the study, since its writer does not know how the study was opened. The code that prints the message adds it.
"""

from __future__ import annotations

import html
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from muscale.formatting import format_path

_OF_STUDIES = (
    "bundle|check|compare|continue|data check|data clean|evaluate|fit|gallery|gc|ladder|plan|promote|report|run|runs|sweep|sync"
    "|transfer|ui|watch"
)
"""Commands that messages name, whose first argument is the study file."""
_NAMED = rf"muscale ({_OF_STUDIES})((?: -[^`<\n]*)?)"  # a command with an argument is complete
_IN_TEXT = re.compile(f"(?:(?<=`)|(?<= it: )){_NAMED}(?=`|$)", re.MULTILINE)  # "settle it: muscale …" ends a line
_IN_MARKUP = re.compile(f"<code>{_NAMED}</code>")


@dataclass(frozen=True)
class StudyCommands:
    """Completion of commands for a study that was opened from a file with settings."""

    study: Path
    settings: tuple[str, ...] = ()

    def line(self, command: str, *words: str | Path) -> str:
        """Return the command, fit for a shell, with the study and its settings, except settings that the words replace."""
        given = [str(word) for word in words]
        anew = {word.partition("=")[0] for before, word in pairwise(given) if before == "--set"}
        kept = [setting for setting in self.settings if setting.partition("=")[0].strip() not in anew]
        settings = [word for setting in kept for word in ("--set", setting)]
        return shlex.join(["muscale", *command.split(), format_path(self.study), *settings, *given])

    def completed(self, text: str) -> str:
        """Return the text with its commands completed."""
        return _IN_TEXT.sub(lambda found: self._again(*found.groups()), text)

    def completed_markup(self, markup: str) -> str:
        """Complete the commands of a page, like `completed`."""

        def again(found: re.Match[str]) -> str:
            return f"<code>{html.escape(self._again(found[1], html.unescape(found[2])))}</code>"

        return _IN_MARKUP.sub(again, markup)

    def completed_values(self, values: Any) -> Any:
        """Complete the commands of every text in plain values, like `completed`."""
        if isinstance(values, str):
            return self.completed(values)
        if isinstance(values, Mapping):
            return {key: self.completed_values(value) for key, value in values.items()}
        return [self.completed_values(value) for value in values] if isinstance(values, list | tuple) else values

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Complete the commands in errors that leave the block, and in messages logged in it."""
        make = logging.getLogRecordFactory()

        def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            made = make(*args, **kwargs)
            if "`muscale " in str(made.msg):
                made.msg, made.args = self.completed(made.getMessage()), None
            return made

        logging.setLogRecordFactory(record)
        try:
            yield
        except Exception as error:
            error.args = tuple(self.completed_values(list(error.args)))
            raise
        finally:
            logging.setLogRecordFactory(make)

    def _again(self, command: str, rest: str) -> str:
        try:
            return self.line(command, *shlex.split(rest))
        except ValueError:  # a shell could not parse it
            return f"muscale {command}{rest}"
