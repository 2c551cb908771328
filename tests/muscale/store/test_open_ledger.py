"""Where a ledger lies is noted once and whole, whatever the file system can do; of several processes one is the first."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg
import pytest

from muscale import StudyDirectoryError
from muscale.layout import LEDGER_PLACE
from muscale.settings.tables import StorageSettings
from muscale.store import open_ledger as opening
from muscale.store.ledger_actor import ActorStorage
from muscale.store.open_ledger import open_ledger
from muscale.store.postgresql import PostgresStorage

SCHEMAS = "SELECT schema_name FROM information_schema.schemata WHERE schema_name LIKE 'study_%%'"
N = 6


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


def begin_at_once(directory: Path, settings: list[StorageSettings]) -> list[Any]:
    """The storages that so many threads come to, which open the ledger together."""
    together = Barrier(len(settings))

    def begin(one: StorageSettings) -> Any:
        together.wait()
        return opening._storage(opening._begin(one, directory, "s"))

    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(begin, settings))


@pytest.mark.usefixtures("no_hard_links")
def test_without_hard_links_one_is_the_first_too(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    paths = [str(tmp_path / f"{n}.sqlite") for n in range(N)]
    found = begin_at_once(study, [StorageSettings(ledger="actor", path=path) for path in paths])
    (path,) = {storage.path for storage in found}
    assert str(path) in paths
    assert [file.name for file in study.iterdir()] == [LEDGER_PLACE]
    again = open_ledger(StorageSettings(ledger="actor"), study, "s").storage
    assert isinstance(again, ActorStorage)
    assert again.path == path


@pytest.mark.usefixtures("no_hard_links")
def test_a_process_that_ended_while_it_noted_the_place_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_MARK_SECONDS", 0.2)
    settings = StorageSettings(ledger="actor")
    mark = tmp_path / f"{LEDGER_PLACE}.begun"
    mark.touch()
    with pytest.raises(StudyDirectoryError, match="ledger.json.begun: another process .* remove this file"):
        open_ledger(settings, tmp_path, "s")
    mark.unlink()
    assert isinstance(open_ledger(settings, tmp_path, "s").storage, ActorStorage)


def test_who_loses_the_race_leaves_no_schema_behind(tmp_path: Path, postgres: Any) -> None:
    with psycopg.connect(postgres.url) as connection:
        before = set(connection.execute(SCHEMAS).fetchall())
    found = begin_at_once(tmp_path, [StorageSettings(ledger="postgresql")] * N)
    (schema,) = {storage.schema for storage in found}
    with psycopg.connect(postgres.url) as connection:
        assert set(connection.execute(SCHEMAS).fetchall()) - before == {(schema,)}


def test_a_study_s_schema_is_not_dropped(tmp_path: Path, postgres: Any) -> None:
    ledger = open_ledger(StorageSettings(ledger="postgresql"), tmp_path, "s")
    ledger.claim({"model.d_model": 32}, {})
    assert isinstance(ledger.storage, PostgresStorage)
    ledger.storage.drop_unclaimed()
    assert ledger.identity() == {"model.d_model": 32}
    ledger.close()


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"ledger": "postgresql", "schema": "a; DROP SCHEMA b"}',
        '{"ledger": "actor", "host": "h"}',
        '{"ledger": [], "schema": "s"}',
    ],
)
def test_a_note_without_a_place_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / LEDGER_PLACE).write_text(content)
    with pytest.raises(StudyDirectoryError, match=rf"{LEDGER_PLACE}:"):
        open_ledger(StorageSettings(), tmp_path, "s")
    assert [file.name for file in tmp_path.iterdir()] == [LEDGER_PLACE]
