"""Options that many commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from muscale.commands import StudyCommands

_JSON = "Print the result as JSON, and nothing else on standard output."
_SET = "Replace a setting of the study file, `table.key=value`; may be repeated."


def _whole(_kind: object, tokens: Sequence[Token]) -> int:
    """Read a whole number; cyclopts itself rounds 80.5 to 80."""
    value = float(text := tokens[0].value)
    if not value.is_integer():
        raise ValueError(f"must be a whole number, got {text}")
    if abs(value) >= 2**63:
        raise ValueError(f"must fit into 64 bits, got {text}")
    return int(text) if text.lstrip("+-").isdigit() else int(value)


Whole = Annotated[int, Parameter(converter=_whole)]
Port = Annotated[int, Parameter(converter=_whole, validator=Number(gte=0, lte=65_535))]
StudyFile = Annotated[Path, Parameter(help="The study file.")]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), show_default=False, help=_JSON)]
Words = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]
Settings = Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False, help=_SET)]
Numbers = Annotated[tuple[Whole, ...], Parameter(negative=(), show_default=False)]
Paths = Annotated[tuple[Path, ...], Parameter(negative=(), show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command on a study."""

    set: Settings = ()
    json: AsJson = False

    def line(self, command: str, study: Path, *words: str | Path) -> str:
        """Return the command line of another command on the study, with the same settings."""
        return self.commands(study).line(command, *words)

    def commands(self, study: Path) -> StudyCommands:
        """Return the study's commands, with the same settings."""
        return StudyCommands(study, self.set)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Columns:
    """Column names of a table whose columns do not have their usual names.

    Attributes:
        loss: Column with the losses, in a table of runs.
        params: Column with n_params, in a table of runs.
        tokens: Column with n_tokens, in a table of runs.
        run: Column with the name of the run that a row belongs to; only the last row of each run counts.
    """

    loss: str | None = None
    params: str | None = None
    tokens: str | None = None
    run: str | None = None

    def to_dict(self) -> dict[str, str]:
        """Return the table's column names, keyed by muscale's."""
        names = {"loss": self.loss, "n_params": self.params, "n_tokens": self.tokens, "run": self.run}
        return {column: name for column, name in names.items() if name is not None}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StageOptions(Options):
    """Options of commands that cost compute.

    Attributes:
        dry_run: Train nothing; print an upper bound of the cost, including the stages before this one.
    """

    dry_run: Annotated[bool, Parameter(name="--dry-run", negative=(), show_default=False)] = False
