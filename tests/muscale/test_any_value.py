"""Any value at any place of a file or a database is taken, or refused in words; hypothesis chooses both."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muscale import StudyConfig, StudyFileError
from muscale.settings.toml_file import parse_toml
from tests.fuzz.database_targets import ForeignLedger, OptunaStorage
from tests.fuzz.fuzz import finding
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.muscale.conftest import MICRO

MakeStudy = Callable[..., Path]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_the_place_of_any_other_is_taken_or_refused(make_study: MakeStudy, data: st.DataObject) -> None:
    values = parse_toml(MICRO)
    table = values
    while True:
        key = data.draw(st.sampled_from(sorted(table)))
        if not isinstance(table[key], dict) or data.draw(st.booleans()):
            break
        table = table[key]
    table[key] = data.draw(JSON_VALUES)
    with suppress(StudyFileError):  # hypothesis shows the values at any other error
        assert StudyConfig.from_dict(values, where="study.toml").to_dict()


LITTLE = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
BOUNDED = settings(max_examples=25)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """Readers of the fuzzer, each made once."""

    @cache
    def target(name: str) -> Target:
        folder = tmp_path_factory.mktemp(name) / "given"
        folder.mkdir()
        return TARGETS[name](folder)

    return target


def replaced(values: Any, key: str, value: Any) -> Any:
    """The same tree with another value at one place, `a.0.b`."""
    first, _, rest = key.partition(".")
    inside: Any = value
    if isinstance(values, dict):
        inside = replaced(values[first], rest, value) if rest else value
        return {**values, first: inside}
    inside = replaced(values[int(first)], rest, value) if rest else value
    return [*values[: int(first)], inside, *values[int(first) + 1 :]]


def places(values: Any, before: str = "") -> Iterator[str]:
    """Every place in a tree, as `replaced` takes it."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in items:
        yield f"{before}{name}"
        yield from places(value, f"{before}{name}.")


@BOUNDED
@given(data=st.data())
def test_any_value_at_any_place_of_a_prepared_run_is_taken_or_refused(
    targets: Callable[[str], Target], data: st.DataObject
) -> None:
    target = targets("prepared")
    values = json.loads(target.seeds[0])
    key = data.draw(st.sampled_from(sorted(places(values))))
    assert finding(target, json.dumps(replaced(values, key, data.draw(JSON_VALUES))).encode()) is None


TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@BOUNDED
@given(data=st.data())
def test_any_value_of_any_key_of_a_stage_file_is_taken_or_refused(
    targets: Callable[[str], Target], data: st.DataObject
) -> None:
    target = targets("stage")
    values = parse_toml(data.draw(st.sampled_from(target.seeds)).decode())
    key = data.draw(st.sampled_from(sorted(places(values))))
    assert finding(target, tomlkit.dumps(replaced(values, key, data.draw(TOML_VALUES))).encode()) is None


def updated(target: ForeignLedger | OptunaStorage, place: str, value: Any) -> bytes:
    """The file with another value in the first row of a column, if SQLite takes it there."""
    table, column = place.split(".")
    path = target.file.with_name("updated")
    path.write_bytes(target.seeds[0])
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        with suppress(sqlite3.Error, UnicodeEncodeError):
            connection.execute(
                f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", [value]
            )
    return path.read_bytes()


def columns(target: ForeignLedger | OptunaStorage) -> list[str]:
    with closing(sqlite3.connect(target.file)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {
            name: connection.execute("SELECT name FROM pragma_table_info(?)", [name]).fetchall() for name in tables
        }
    return [f"{table}.{column}" for table, rows in found.items() for (column,) in rows]


@pytest.mark.parametrize("name", ["ledger", "optuna"])
@settings(BOUNDED, max_examples=8)
@given(data=st.data())
def test_any_value_in_any_column_of_a_database_of_others_is_taken_or_refused(
    name: str, targets: Callable[[str], Target], data: st.DataObject
) -> None:
    target = targets(name)
    assert isinstance(target, ForeignLedger | OptunaStorage)
    place = data.draw(st.sampled_from(columns(target)))
    value = data.draw(LITTLE | JSON_VALUES.map(json.dumps))
    assert finding(target, updated(target, place, value)) is None
