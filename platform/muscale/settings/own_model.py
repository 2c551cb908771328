"""[model] with a custom family: stages that train import it, readers find its members in the study's record.

The record is a file next to the study file with the table and every counted member, as plain values. Opening anybody's study
therefore imports nothing that its file names.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from muscale.errors import StageError, one_line, refusing
from muscale.layout import MEMBERS
from muscale.settings.strict import StrictTable, TableError, build_strictly
from proxy_models.architecture.counted import counted_at_any_context, remember
from proxy_models.architecture.families import load
from proxy_models.architecture.member import Member, ModuleConfig
from proxy_models.files import read_at_most, write_text

ENTRY_POINTS = "muscale.families"
_MOST_BYTES = 64 << 20  # largest size of a record; a member takes about 500 bytes


class OwnModel(StrictTable):
    """[model] with `family`."""

    family: str  # "package.module:Class", or the name of an entry point of the group muscale.families
    args: dict[str, bool | int | float | str] = Field(default_factory=dict)  # for the class, besides the two sizes
    d_model: PositiveInt
    n_layers: PositiveInt
    vocab_size: PositiveInt = 256
    context_length: PositiveInt = 128

    def imported(self, where: str) -> Member:
        """Import the family and return the member; standard error first shows the family and its file.

        Args:
            where: The file and the table, for messages.

        Raises:
            TableError: If the family can't be imported, or refuses the values.
        """
        with refusing(f"{where}.family", raising=TableError):
            name = self._qualified()
            announce(name)
            found = load(name)
        sizes = {"vocab_size": self.vocab_size, "context_length": self.context_length}
        if both := sorted(sizes.keys() & self.args.keys()):
            raise TableError(f"{where}.args.{both[0]}: belongs directly in [model], got {self.args[both[0]]!r}")
        family = build_strictly(found, {**self.args, **sizes}, f"{where}.args")
        try:
            return family.member(self.d_model, self.n_layers)
        except Exception as error:  # the user's code may raise anything
            raise TableError(
                f"{where}: {name} can't build the member of this width and depth: {type(error).__name__}: {error}"
            ) from error

    def _qualified(self) -> str:
        if ":" in self.family:
            return self.family
        known = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
        if self.family not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(
                f'must be "package.module:Class" or an entry point of the group {ENTRY_POINTS} (here: {names}), '
                f"got {self.family!r}"
            )
        return known[self.family]


def read_record(directory: Path, model: OwnModel | None, where: str) -> ModuleConfig:
    """Load the members of a study's record into memory, and return the one that the table describes.

    Args:
        model: The table; None: accept any recorded table.
        where: The file and the table, for messages.

    Raises:
        TableError: If there is no record of the table.
    """
    path = directory / MEMBERS
    remedy = "reading a study does not import its family; `muscale check`, or with [trainer] `muscale sweep`, counts its members"
    try:
        table, members = _read(path)
    except FileNotFoundError as error:
        raise TableError(
            f"{where}.family: its members have not been counted yet ({path} is missing): {remedy}"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise TableError(f"{path}: not a record of members: {one_line(error)}: {remedy}") from error
    if model is not None and table != model.model_dump():
        raise TableError(f"{where}: {path} was recorded for {table}, got {model.model_dump()}: {remedy}")
    remember(members)
    return members[0]


def write_record(directory: Path, model: OwnModel, base: ModuleConfig) -> None:
    """Write the members counted so far, including those already in the record."""
    with suppress(TableError):
        read_record(directory, model, "")
    members = [base, *(member for member in counted_at_any_context(base) if member != base)]
    values = {"model": model.model_dump(), "members": [member.to_dict() for member in members]}
    write_text(directory / MEMBERS, json.dumps(values, indent=1) + "\n")


def require_same_family(model: Member, base: Member) -> None:
    """Refuse to train a model of another family than the study file's, which was announced: raise StageError."""
    found, named = (
        member.family if isinstance(member, ModuleConfig) else "the built-in decoder" for member in (model, base)
    )
    if found != named:
        raise StageError(f"a model of {found} is not of the study file's family, {named}, so it is not trained")


def announce(name: str) -> None:
    """Print on standard error which family is about to be imported, and so run, and from which file."""
    sys.stderr.write(f"importing the model family {name} from {_file_of(name)}\n")
    sys.stderr.flush()


def announce_family(member: Member) -> None:
    """`announce` the family of a custom member."""
    if isinstance(member, ModuleConfig):
        announce(member.family)


def _file_of(name: str) -> str:
    """Find the file of a family without importing any package that contains it."""
    first, *inner = name.partition(":")[0].split(".")
    try:
        spec = find_spec(first)
        # Leave out the parent's name: with it, a folder without __init__.py is found only if its parent was imported.
        for part in inner:
            spec = PathFinder.find_spec(part, spec.submodule_search_locations) if spec else None
    except (ImportError, ValueError):  # an empty part of a name, or a module that was made by hand
        spec = None
    return (spec and spec.origin) or "an unknown file"


def _read(path: Path) -> tuple[dict[str, Any], list[ModuleConfig]]:
    values = json.loads(read_at_most(path, _MOST_BYTES))
    members = [ModuleConfig.from_dict(member) for member in values["members"]]
    if not members:
        raise ValueError("members: must not be empty")
    return values["model"], members
