"""The study file: a tree of settings, read strictly.

Every message names the file, the key, the rule and the value. Nothing is written before a file is valid as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast, get_args, get_type_hints

import pydantic

from muscale.errors import StudyFileError
from muscale.formatting import format_read_error
from muscale.layout import STUDY_FILE
from muscale.settings.cross_field_rules import cross_field_errors
from muscale.settings.strict import FAULTY, StrictTable, format_errors, lists_to_tuples
from muscale.settings.tables import StudyTables
from muscale.settings.toml_file import inline, parse_toml, read_toml
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Space, SpaceError, ready_made

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings that replace those of a study file."""


class StudyConfig(StudyTables):
    """A study file that was read and found valid."""

    @classmethod
    def read(cls, path: Path, overrides: Overrides = ()) -> Self:
        """Read a study file.

        Args:
            path: The file.
            overrides: Each replaces one key: `table.key=value` with a TOML value, or a mapping of `table.key` to a value as
                TOML would hold it; `sweep.space` may be a `Space`.

        Raises:
            StudyFileError: Naming the file, the key, the rule and the value, for each thing that is wrong.
        """
        try:
            values = read_toml(path)
        except FileNotFoundError as error:
            raise StudyFileError(f"{path}: no such file; `muscale init {path.parent}` writes one to edit") from error
        except IsADirectoryError as error:
            raise StudyFileError(f"{path}: is a directory; give the study file in it, {path / STUDY_FILE}") from error
        except OSError as error:
            raise StudyFileError(f"{path}: {format_read_error(error)}") from error
        except ValueError as error:
            raise StudyFileError(f"{path}: {error}") from error
        if {"run", "forecast"} <= values.keys():
            raise StudyFileError(f"{path}: is a plan's file; give the file of the study that the plan was made in")
        for key, value in overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides):
            _override(values, key, value)
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """The configuration of a table as TOML holds it.

        Raises:
            StudyFileError: Naming `where`, the key, the rule and the value, for each thing that is wrong.
        """
        tables = lists_to_tuples(values)
        problems: list[str] = []
        for key, build in (("model", ModelConfig), ("hyperparameters", Hyperparameters)):
            if isinstance(table := tables.get(key), dict):
                tables[key] = _build(build, table, f"{where}: {key}", problems)
        if isinstance(sweep := tables.get("sweep"), dict) and "space" in sweep:
            try:
                sweep["space"] = _space(values["sweep"]["space"], f"{where}: sweep.space")
            except SpaceError as error:
                problems.append(str(error))
                del sweep["space"]
        try:
            config = cls(**tables)
        except pydantic.ValidationError as error:
            raise StudyFileError("\n".join([*problems, *format_errors(error, where, cls)])) from error
        problems += [f"{where}: {problem}" for problem in cross_field_errors(config)]
        if problems:
            raise StudyFileError("\n".join(problems))
        return config


def _space(table: Any, where: str) -> Space:
    """The space of a table, or the ready-made one of a name, or one that is made already."""
    if isinstance(table, Space):
        return table
    if not isinstance(table, str):
        return Space.from_dict(table, where=where)
    try:
        return ready_made(table)
    except SpaceError as error:
        raise SpaceError(f"{where}: {error}") from error


def _build(build: type[Any], table: dict[str, Any], where: str, problems: list[str]) -> Any:
    """An instance of a library's dataclass from a table, with the same strictness as the rest of the file."""
    hints = get_type_hints(build)
    table, n_problems = dict(table), len(problems)
    for name, hint in hints.items():
        entry = next((kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)), None)
        if entry and isinstance(table.get(name), tuple):
            table[name] = tuple(
                _build(cast(type[Any], entry), value, f"{where}.{name}.{number}", problems)
                if isinstance(value, dict)
                else value
                for number, value in enumerate(table[name])
            )
    if len(problems) > n_problems:
        return FAULTY
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(build)
    }
    try:
        valid = pydantic.create_model(build.__name__, __base__=StrictTable, **fields)(**table)
        return build(
            **{name: getattr(valid, name) for name in fields}
        )  # 4 for a float is 4.0: equal settings, equal keys
    except pydantic.ValidationError as error:
        problems += format_errors(error, where, list(fields), separator=".")
    except ValueError as error:
        problems.append(f"{where}: {error}")
    return FAULTY


def as_set(overrides: Overrides) -> tuple[str, ...]:
    """The same settings, each as --set takes it."""
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    plain = {key: value.to_dict() if isinstance(value, Space) else value for key, value in overrides.items()}
    return tuple(f"{key}={_as_toml(value)}" for key, value in plain.items())


def _as_toml(value: Any) -> str:
    try:
        return inline(value).as_string()
    except (TypeError, ValueError):  # None, say, for which TOML has no word
        return str(value)


def _parsed(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator:
        raise StudyFileError(f"--set {override}: write table.key=value")
    try:
        return key.strip(), parse_toml(f"value = {text}")["value"]
    except ValueError:
        return key.strip(), text  # a bare word is a string, so that --set sweep.searcher=random needs no quotes


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    table = values
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise StudyFileError(f"--set {key}={value}: {part} is a value, not a table")
    table[name] = value
