"""The last lines of a command: the files written, and the next command.

They go to standard error, so that standard output has only the result. In a terminal a path is a link (OSC 8).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

from muscale.formatting import format_path


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Files written and commands to run next.

    Attributes:
        wrote: Paths by label.
        next: Command lines, the most likely first.
    """

    wrote: dict[str, Path] = field(default_factory=dict)
    next: tuple[str, ...] = ()


def print_ending(ending: Ending, console: Console | None = None) -> None:
    """Print the lines, on standard error by default."""
    console = console or Console(stderr=True)
    width = max((len(label) for label in ending.wrote), default=0)
    for label, path in ending.wrote.items():
        line = Text.assemble(
            (f"{label:<{width}}  ", "dim"),
            Text(format_path(path.absolute()), style=Style(link=path.absolute().as_uri())),
        )
        console.print(line, soft_wrap=True)
    for number, command in enumerate(ending.next):
        console.print(Text.assemble(("or:   " if number else "next: ", "dim"), command), soft_wrap=True)


def line(*words: str | Path) -> str:
    """Return a command line that can be pasted into a shell."""
    return shlex.join(("muscale", *map(str, words)))
