"""The study file: a tree of settings, read strictly.

Every message names the file, the key, the rule and the value. Nothing is written before a file is valid as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pydantic

from muscale.errors import StudyFileError, refusing
from muscale.layout import STUDY_FILE
from muscale.settings.cross_field_rules import cross_field_errors
from muscale.settings.overrides import Overrides, override
from muscale.settings.own_model import OwnModel, read_record
from muscale.settings.strict import TableError, build_strictly, collecting, format_errors, lists_to_tuples
from muscale.settings.tables import StudyTables
from muscale.settings.toml_file import read_toml
from muscale.settings.trainer import ProgramShape, TrainerSettings, described_member, program_model
from muscale.settings.variant_models import own_models
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Space, SpaceError, mup_adamw, ready_made


class StudyConfig(StudyTables):
    """A study file that was read and is valid."""

    @classmethod
    def read(cls, path: Path, overrides: Overrides = (), *, trains: bool = False) -> Self:
        """Read a study file.

        Args:
            overrides: Each replaces one key: `table.key=value` with a TOML value, or a mapping from `table.key` to a TOML value;
                numpy numbers, arrays and paths are converted, and `sweep.space` may be a `Space`.
            trains: Import the custom model family that the file names, which runs its module, or run its [trainer]; otherwise
                the record of members next to the study file is read.

        Raises:
            StudyFileError: Naming file, key, rule and value of each error.
        """
        missing = f"no such file; `muscale init {path.parent}` writes one to edit"
        is_folder = f"is a directory; give the study file in it: {path / STUDY_FILE}"
        values = read_toml(path, StudyFileError, missing=missing, is_folder=is_folder)
        if {"run", "forecast"} <= values.keys():
            raise StudyFileError(f"{path}: is a plan file; give the study file of the study that made the plan")
        override(values, overrides)
        return cls.from_dict(values, where=str(path), directory=path.parent, trains=trains)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, where: str, directory: Path | None = None, trains: bool = False
    ) -> Self:
        """Build the configuration from a table in TOML's types.

        Args:
            where: The file, for messages.
            directory: Folder of the study, with its record of members.
            trains: As for `read`.

        Raises:
            StudyFileError: Naming `where`, key, rule and value of each error.
        """
        tables = lists_to_tuples(values)
        problems: list[str] = []
        if isinstance(table := tables.get("hyperparameters"), dict):
            del tables["hyperparameters"]
            with collecting(problems):
                tables["hyperparameters"] = build_strictly(Hyperparameters, table, f"{where}: hyperparameters")
        own, folder, place = None, directory or Path(), f"{where}: model"
        if isinstance(table := tables.get("model"), dict):
            del tables["model"]
            with collecting(problems):
                if "trainer" in tables:
                    own, tables["model"] = _program_member(tables["trainer"], table, where, folder, trains=trains)
                elif "family" in table:
                    own = build_strictly(OwnModel, table, place)
                    tables["model"] = own.imported(place) if trains else read_record(folder, own, place)
                else:
                    tables["model"] = build_strictly(ModelConfig, table, place)
        if isinstance(sweep := tables.get("sweep"), dict) and "space" in sweep:
            try:
                sweep["space"] = _space(values["sweep"]["space"], f"{where}: sweep.space")
            except SpaceError as error:
                problems.append(str(error))
                del sweep["space"]
        elif isinstance(sweep, dict) and "initial_weights" in tables:
            sweep["space"] = Space({name: of for name, of in mup_adamw().items() if name != "init_scale"})
        try:
            config = cls(**tables)
        except pydantic.ValidationError as error:
            problems += format_errors(error, where, cls, listed=values.keys() - tables.keys())
            missing = [fault["loc"] for fault in error.errors() if fault["type"] == "missing"]
            if any(len(keys) == 1 and keys[0] not in values for keys in missing):
                problems.append(f"{where}: `muscale init DIRECTORY` writes a complete study file to copy tables from")
            raise StudyFileError("\n".join(problems)) from error
        if trains:
            config._own_model = own
            config._variant_models = own_models(config, own, where, folder, problems)
        problems += [f"{where}: {problem}" for problem in cross_field_errors(config)]
        if problems:
            raise StudyFileError("\n".join(dict.fromkeys(problems)))
        return config


def _program_member(
    trainer: Any, table: dict[str, Any], where: str, directory: Path, *, trains: bool
) -> tuple[OwnModel, Member]:
    """[model] with [trainer], and its member: described by the program, or read from the record."""
    try:
        settings = TrainerSettings.model_validate(trainer)
    except pydantic.ValidationError as error:
        raise TableError from error  # errors of [trainer] are reported with the other tables
    shape = build_strictly(ProgramShape, table, f"{where}: model")
    own = program_model(settings, shape, directory, f"{where}: trainer")
    if not trains:
        return own, read_record(directory, own, f"{where}: model")
    with suppress(TableError):
        read_record(directory, own, "")  # recorded descriptions are not requested again
    return own, described_member(own, directory, f"{where}: trainer")


def _space(table: Any, where: str) -> Space:
    """The space of a table, or a ready-made space by name; a `Space` is returned unchanged."""
    if isinstance(table, Space):
        return table
    if not isinstance(table, str):
        return Space.from_dict(table, where=where)
    with refusing(where, SpaceError, raising=SpaceError):
        return ready_made(table)
