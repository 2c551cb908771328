"""Opens the ledger of a study where it was begun; a new ledger is never begun silently.

A ledger outside the study's directory leaves a small file there with its location: a host and a path, or the schema of a
PostgreSQL database. Neither holds a secret.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from muscale.errors import StudyDirectoryError
from muscale.layout import LEDGER, LEDGER_PLACE
from muscale.settings.tables import StorageSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_actor import ActorStorage
from muscale.store.postgresql import SCHEMA_NAME, PostgresStorage
from muscale.store.storage import SqliteStorage

_MARK_SECONDS = 10.0  # far longer than a rename takes (assumed)
_POLL_SECONDS = 0.05
_RAYS_COPIES = "runtime_resources"  # folder of a Ray session into which Ray copies working directories of jobs


def open_ledger(settings: StorageSettings, directory: Path, name: str) -> Ledger:
    """Open the ledger of the study called `name` in a directory.

    Raises:
        StudyDirectoryError: If it was begun in another kind of storage, or is no longer where it was.
        LedgerUnavailableError: If the database does not answer.
    """
    directory = directory.absolute()
    if _RAYS_COPIES in directory.parts:
        raise StudyDirectoryError(
            f"{directory}: is Ray's copy of the job's working directory, which is deleted after the job; give the "
            "study file by its absolute path on a file system that every node has"
        )
    place = read_place(directory)
    begun = str(place["ledger"]) if place else "sqlite" if (directory / LEDGER).exists() else None
    at_hand = settings.ledger == "actor" and begun == "sqlite" and settings.path in (None, str(directory / LEDGER))
    if begun not in (None, settings.ledger) and not at_hand:
        raise StudyDirectoryError(
            f'{directory}: the study\'s ledger was created with storage.ledger = "{begun}", got "{settings.ledger}"; '
            "restore the setting, or start a study in a new directory, whose sweeps may learn from this one (sweep.learn_from)"
        )
    if settings.ledger == "sqlite":
        return Ledger(SqliteStorage(directory / LEDGER), directory)
    if place is None:
        place = _begin(settings, directory, name)
    if settings.ledger == "actor" and settings.path not in (None, place["path"]):
        raise StudyDirectoryError(
            f"{directory}: the ledger is at {place['path']} of {place['host']}, got storage.path = {settings.path!r}; restore it"
        )
    return Ledger(_storage(place), directory)


def read_place(directory: Path) -> dict[str, Any] | None:
    """Location of a study's ledger, None if its directory has no such file; raises StudyDirectoryError if the file can't be used."""
    path = directory / LEDGER_PLACE
    if not path.exists():
        return None
    wanted = {"actor": ("host", "path"), "postgresql": ("schema",)}
    try:
        place = dict(json.loads(path.read_text()))
        if all(isinstance(place[key], str) for key in wanted[place["ledger"]]) and (
            place["ledger"] != "postgresql" or SCHEMA_NAME.fullmatch(place["schema"])
        ):
            return place
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise StudyDirectoryError(
        f"{path}: does not name the ledger's location; restore the file from a copy of the directory"
    )


def _storage(place: dict[str, Any]) -> ActorStorage | PostgresStorage:
    if place["ledger"] == "actor":
        return ActorStorage(place["host"], Path(place["path"]))
    return PostgresStorage(None, place["schema"], must_exist=True)


def _begin(settings: StorageSettings, directory: Path, name: str) -> dict[str, Any]:
    """Create the ledger and record its location; of two processes that do so at once, one wins."""
    place: dict[str, Any]
    if settings.ledger == "actor":
        path = Path(settings.path or directory / LEDGER)
        path.parent.mkdir(parents=True, exist_ok=True)
        place = {"ledger": "actor", "host": socket.gethostname(), "path": str(path)}
        begun: SqliteStorage | PostgresStorage = SqliteStorage(path)
    else:
        slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:40]
        place = {"ledger": "postgresql", "schema": f"study_{slug}_{secrets.token_hex(4)}"}
        begun = PostgresStorage(None, place["schema"])
    begun.read(_nothing)
    try:
        return _note(directory, place)
    finally:
        if isinstance(begun, PostgresStorage) and read_place(directory) != place:
            begun.drop_unclaimed()  # another process was first, and no other process knows this schema's name
        begun.close()


def _note(directory: Path, place: dict[str, Any]) -> dict[str, Any]:
    """Write the ledger's location atomically unless another process was first; return the recorded location."""
    noted = directory / LEDGER_PLACE
    unfinished = directory / f"{LEDGER_PLACE}.{secrets.token_hex(4)}.unfinished"
    try:
        unfinished.write_text(json.dumps(place, indent=1) + "\n")
        try:
            os.link(unfinished, noted)
        except FileExistsError:
            pass  # another process was first
        except OSError:  # the file system has no hard links
            _rename_first(unfinished, noted)
    finally:
        unfinished.unlink(missing_ok=True)
    return read_place(directory) or place


def _rename_first(unfinished: Path, noted: Path) -> None:
    """Rename a file to an unused name, or wait for the creator of the mark to do so; raise StudyDirectoryError if that one did not."""
    mark = noted.with_name(f"{noted.name}.begun")
    given_up = time.monotonic() + _MARK_SECONDS
    while not noted.exists():
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            if time.monotonic() > given_up:
                raise StudyDirectoryError(
                    f"{mark}: another process has been creating the ledger for {_MARK_SECONDS:.0f} s; if it no longer runs, "
                    "remove this file and run the same command again"
                ) from None
            time.sleep(_POLL_SECONDS)
            continue
        try:
            if not noted.exists():  # otherwise another process created it between our check and our mark
                unfinished.rename(noted)
        finally:
            mark.unlink(missing_ok=True)


def _nothing(_connection: object) -> None:
    """Do nothing; running this function opens a storage and so creates its tables."""
