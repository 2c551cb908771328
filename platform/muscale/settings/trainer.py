"""[trainer] of the study file: a program that trains instead of the built-in loop."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, cast

import pydantic
from pydantic import Field, PositiveInt

from muscale.errors import TrainerError, refusing
from muscale.formatting import format_read_error
from muscale.programs.program_family import Program, digest_of
from muscale.programs.protocol import fill
from muscale.settings.own_model import OwnModel
from muscale.settings.strict import StrictTable, TableError
from proxy_models.architecture.family import qualified_name
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_own_data


class TrainerSettings(StrictTable):
    """[trainer]: the program, and the values that enter its keys."""

    # words of the command, with {config} and {state}; run in the study's folder
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    version: str = ""  # change it if the program changes but its files in the study's folder do not
    data: str = ""  # name of the data that the program reads
    width_step: PositiveInt = 1  # every width is a multiple of it

    @pydantic.field_validator("command")
    @classmethod
    def _is_a_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        try:
            fill(command, Path(), Path())
        except TrainerError as error:
            raise ValueError(str(error)) from error
        return command

    def write_corpus(self, folder: Path) -> Corpus:
        """A corpus that represents the program's data; raises CorpusError if the folder holds another corpus."""
        return write_own_data(folder, self.data)


class ProgramShape(StrictTable):
    """[model] of a study with [trainer]: the base shape, in the program's units."""

    d_model: PositiveInt
    n_layers: PositiveInt


def program_model(settings: TrainerSettings, shape: ProgramShape | Member, directory: Path, where: str) -> OwnModel:
    """[model] of a study with [trainer], as a family whose only code is the program.

    Args:
        where: The file and the table of the settings, for messages.

    Raises:
        TableError: If a file that the command names can't be read.
    """
    try:
        digest = digest_of(settings.command, directory)
    except OSError as error:
        raise TableError(f"{where}.command: {error.filename}: {format_read_error(error)}") from error
    return OwnModel(
        family=qualified_name(Program),
        args={
            "command": shlex.join(settings.command),
            "digest": digest,
            "release": settings.version,
            "step": settings.width_step,
        },
        vocab_size=1,
        context_length=1,
        d_model=shape.d_model,
        n_layers=shape.n_layers,
    )


def described_member(own: OwnModel, directory: Path, where: str) -> Member:
    """Run the program, and return the member that a table of `program_model` describes.

    Raises:
        TableError: If there is no such member, the program breaks the protocol, or its files differ from those that the table names.
    """
    with refusing(f"{where}.command", ValueError, TrainerError, raising=TableError):
        program = Program(**cast(dict[str, Any], own.args))
        program.allow(directory.resolve())
        return program.member(own.d_model, own.n_layers)
