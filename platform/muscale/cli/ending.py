"""The last lines of a command, for a person: what it wrote and where, and which command comes next.

They go to standard error, so that standard output holds the result alone. In a terminal a path is also a link (OSC 8).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a person wants to know once a command is done.

    Attributes:
        wrote: Path of each artefact by what it is.
        next: Command lines, the first one the likeliest.
    """

    wrote: dict[str, Path] = field(default_factory=dict)
    next: tuple[str, ...] = ()


def tell(ending: Ending, console: Console | None = None) -> None:
    """Print the lines, on standard error by default."""
    console = console or Console(stderr=True)
    wide = max((len(what) for what in ending.wrote), default=0)
    for what, path in ending.wrote.items():
        line = Text.assemble(
            (f"{what:<{wide}}  ", "dim"), Text(_short(path), style=Style(link=path.absolute().as_uri()))
        )
        console.print(line, soft_wrap=True)
    for number, command in enumerate(ending.next):
        console.print(Text.assemble(("or:   " if number else "next: ", "dim"), command), soft_wrap=True)


def line(*words: str | Path) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(("muscale", *map(str, words)))


def _short(path: Path) -> str:
    """The path from here if it lies below, else the whole of it."""
    whole = path.absolute()
    return str(whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole)
