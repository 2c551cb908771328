"""A disk that is full, read-only or gone: the file is named, nothing is half written, and work continues once there is room."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from muscale import json_lines
from muscale.actors.worker import Worker
from muscale.cli.entry import _user_message
from muscale.errors import LedgerUnavailableError
from muscale.layout import CORPUS, CURVES, LEDGER, STATES
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus_writing import write_corpus
from tests.faults.conftest import SmallDisk
from tests.faults.lean import assert_kept, begin, chains, losses, rows
from tests.muscale.conftest import write_text


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob("*.unfinished"))


def message_of(error: BaseException) -> str:
    assert isinstance(error, Exception)
    return _user_message(error)


def test_a_corpus_that_does_not_fit_is_written_again_once_there_is_room(small_disk: SmallDisk) -> None:
    folder = small_disk.folder
    write_text(folder / "text", documents=40, words=600)
    small_disk.fill(leave=40_000)
    with pytest.raises(OSError, match="No space left") as full:
        write_corpus(folder / CORPUS, str(folder / "text"))
    assert message_of(full.value).startswith(f"{folder / CORPUS}")
    assert "check the disk and run the same command again" in message_of(full.value)
    small_disk.empty()
    assert write_corpus(folder / CORPUS, str(folder / "text")).n_tokens > 10_000


def test_a_worker_whose_disk_becomes_full_continues_once_there_is_room(small_disk: SmallDisk, trained: Path) -> None:
    directory = begin(small_disk.folder / "study")
    wanted = chains(directory)
    worker = Worker(Ledger(directory / LEDGER), compiled=False)
    worker.reach(wanted[0])
    before = rows(directory / LEDGER)
    small_disk.fill(leave=20_000)  # less than a state
    with pytest.raises(OSError, match="No space left") as full:
        worker.reach(wanted[2])
    assert f"{directory / STATES}" in message_of(full.value)
    assert leftovers(directory) == []
    small_disk.empty()
    assert_kept(before, rows(directory / LEDGER))
    for chain in wanted:
        worker.reach(chain)
    assert losses(directory / LEDGER) == losses(trained / LEDGER)
    assert worker.ledger.retrained() == []


def test_a_ledger_without_room_or_on_a_read_only_disk_is_reported_and_usable_afterwards(small_disk: SmallDisk) -> None:
    ledger = Ledger(small_disk.folder / LEDGER)
    ledger.record_result(ResultKind.CHECK, "first", {"kept": True})
    small_disk.fill()
    with pytest.raises(LedgerUnavailableError, match=r"ledger.sqlite: "):
        for number in range(200):
            ledger.record_result(ResultKind.CHECK, f"{number}", {"text": "x" * 4000})
    known = len(rows(small_disk.folder / LEDGER)["results"])
    small_disk.empty()
    ledger.record_result(ResultKind.CHECK, "later", {"kept": True})
    assert len(rows(small_disk.folder / LEDGER)["results"]) == known + 1
    ledger.close()
    small_disk.read_only(True)
    with pytest.raises(LedgerUnavailableError, match=r"ledger.sqlite: .*(readonly|read-only|unable to open)"):
        ledger.record_result(ResultKind.CHECK, "none", {})
    small_disk.read_only(False)
    ledger.record_result(ResultKind.CHECK, "writable", {})
    assert ledger.result(ResultKind.CHECK, "first") == {"kept": True}


def test_a_line_that_a_full_disk_tore_costs_no_line_after_it(small_disk: SmallDisk) -> None:
    path = small_disk.folder / "incidents.jsonl"
    json_lines.append(path, {"step": 1, "reason": "x" * 4000})
    small_disk.fill()
    with pytest.raises(OSError, match="No space left") as full:
        json_lines.append(path, {"step": 2, "reason": "x" * 4000})
    assert full.value.filename == str(path)
    small_disk.empty()
    json_lines.append(path, {"step": 3, "reason": ""})
    assert [record["step"] for record in json_lines.read(path)] == [1, 3]


def test_a_disk_that_became_read_only_ends_a_training_with_its_name_and_it_resumes_later(
    small_disk: SmallDisk, trained: Path
) -> None:
    directory = begin(small_disk.folder / "study")
    wanted = chains(directory)
    ledger = Ledger(directory / LEDGER)
    Worker(ledger, compiled=False).reach(wanted[0])
    ledger.close()
    small_disk.read_only(True)
    with pytest.raises((OSError, LedgerUnavailableError), match=r"ledger.sqlite"):
        Worker(Ledger(directory / LEDGER), compiled=False).reach(wanted[2])
    small_disk.read_only(False)
    worker = Worker(Ledger(directory / LEDGER), compiled=False)
    for chain in wanted:
        worker.reach(chain)
    assert losses(directory / LEDGER) == losses(trained / LEDGER)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_disk_errors_are_not_bugs_of_muscale(code: int) -> None:
    assert "check the disk" in _user_message(OSError(code, "raised by a write, without a name"))
    assert _user_message(OSError(errno.EINVAL, "of a program")) == ""


def test_vanished_storage_is_reported_and_usable_once_it_is_back(tmp_path: Path, trained: Path) -> None:
    directory = begin(tmp_path / "study")
    wanted = chains(directory)
    ledger = Ledger(directory / LEDGER)
    Worker(ledger, compiled=False).reach(wanted[0])
    ledger.close()
    away = directory.rename(tmp_path / "away")
    with pytest.raises(LedgerUnavailableError, match=r"ledger.sqlite: the ledger can't be opened"):
        ledger.line("l")
    away.rename(directory)
    assert (directory / CURVES).exists()
    worker = Worker(Ledger(directory / LEDGER), compiled=False)
    for chain in wanted:
        worker.reach(chain)
    assert losses(directory / LEDGER) == losses(trained / LEDGER)
