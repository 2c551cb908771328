"""Another ledger of the same study is added once, only read, and never instead of what is known here."""

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from muscale import StudyDirectoryError
from muscale.layout import CURVES, LEDGER, LEDGER_PLACE, STATES
from muscale.search.prior_runs import runs_of
from muscale.search.record import Record
from muscale.settings.config import StorageSettings
from muscale.store.ledger import Ledger, find
from muscale.store.lineage import Chain
from muscale.store.merge import merge, opened
from muscale.store.open_ledger import open_ledger
from muscale.store.retention import prune
from muscale.store.tables import forecasts, runs, segments, trials
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics

IDENTITY = {"model.d_model": 32}
MODEL = ModelConfig(d_model=32, n_layers=1, context_length=32)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="none", seed=0, evaluation_tokens=512)
RUN = {"d_model": 1, "n_layers": 1, "n_params": 1, "n_tokens": 1, "seed": 0, "learning_rate": 1.0, "stem": "s"}


def chain(seed: int) -> Chain:
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=128).resolve(40 * 128)
    return Chain(numerics=replace(NUMERICS, seed=seed), segments=branch(recipe, 30 * 128, 40 * 128))


def add_run(ledger: Ledger, seed: int, loss: float | None, *, state: bytes | None = None) -> str:
    """A run of two segments with its curve, and with the state of its stem."""
    run = chain(seed)
    assert run.parent is not None
    values: dict[str, Any] = {"trained_from": 0, "source_losses": {}, "seconds": 1.0, "environment": {}}
    for part in (run.parent, run):
        kept = f"{STATES}/{part.key}.pt" if state and part is not run else None
        if kept and state:
            (ledger.directory / kept).parent.mkdir(exist_ok=True)
            (ledger.directory / kept).write_bytes(state)
        (ledger.directory / CURVES).mkdir(exist_ok=True)
        (ledger.directory / CURVES / f"{part.key}.parquet").write_bytes(b"curve")
        ledger.insert(segments, **part.row(), loss=loss, state=kept, **values)
    ledger.insert(runs, purpose="ladder", key=run.key, hyperparameters={}, label="", **RUN)
    return run.key


def add_sweep(ledger: Ledger, sweep: str, loss: float) -> None:
    ledger.add_round(sweep=sweep, round=0, first_trial=0, searcher="random", space={})
    ledger.insert(trials, sweep=sweep, number=0, config={"learning_rate": loss}, until=0)
    ledger.add_rung(sweep=sweep, trial=0, rung=0, tokens=1, segment="", loss=loss, seconds=1.0)
    ledger.add_decision(sweep=sweep, trial=0, rung=0, until=1, path=[[0, {}]], donor=None)


@pytest.fixture
def ledgers(tmp_path: Path) -> tuple[Ledger, Ledger]:
    made = []
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        made.append(Ledger(tmp_path / name / LEDGER))
        made[-1].claim(IDENTITY, {})
    return made[0], made[1]


def fill(ours: Ledger, theirs: Ledger) -> None:
    add_run(ours, 0, 2.0)
    add_run(theirs, 0, 2.0 * (1 + 1e-5))  # the same, on another machine
    add_run(ours, 1, 2.0)
    add_run(theirs, 1, 3.0)
    add_run(theirs, 2, None, state=b"never unpickled")
    for sweep, loss in (("known", 9.0), ("new", 2.0)):
        add_sweep(theirs, sweep, loss)
    add_sweep(ours, "known", 1.0)
    theirs.record_result("check", "k", {"passed": True})
    theirs.insert(forecasts, plan="p", loss=2.0, low=1.9, high=2.1, level=0.9, payload={})


def test_what_is_new_is_added_once_and_what_is_known_stays(ledgers: tuple[Ledger, Ledger]) -> None:
    ours, theirs = ledgers
    fill(ours, theirs)
    theirs.close()
    files = {path: path.read_bytes() for path in theirs.directory.rglob("*") if path.is_file()}
    result = merge(ours, theirs.directory)
    assert result.added == {
        "segments": 2,
        "runs": 1,
        "results": 1,
        "forecasts": 1,
        "sweeps": 1,
        "rounds": 1,
        "trials": 1,
        "rungs": 1,
        "decisions": 1,
        "states": 1,
        "curves": 2,
    }
    stem = chain(1).parent
    assert stem is not None
    assert set(result.conflicts) == {(stem.key, 2.0, 3.0), (chain(1).key, 2.0, 3.0)}
    assert f"conflict: {chain(1).key}: 2 here stays, 3 there" in str(result)
    assert result.known_sweeps == ("known",)
    assert ours.rungs("known")[0]["loss"] == 1.0
    assert ours.rungs("new") == theirs.rungs("new")
    assert ours.segment(chain(2).key) == theirs.segment(chain(2).key)
    theirs.close()
    registered, original = ours.forecast("p"), theirs.forecast("p")
    assert registered == original
    new_stem = chain(2).parent
    assert new_stem is not None
    assert (ours.directory / STATES / f"{new_stem.key}.pt").read_bytes() == b"never unpickled"
    theirs.close()
    again = merge(ours, theirs.directory / LEDGER)
    assert set(again.added.values()) == {0}
    assert again.conflicts == result.conflicts
    assert {path: path.read_bytes() for path in theirs.directory.rglob("*") if path.is_file()} == files


def test_a_ledger_that_is_being_written_is_read_too(
    ledgers: tuple[Ledger, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ledgers
    add_run(theirs, 0, 2.0)
    assert (theirs.directory / f"{LEDGER}-wal").stat().st_size > 0
    monkeypatch.chdir(theirs.directory.parent)
    for source in (Path("theirs"), Path("theirs/study.toml"), Path("theirs") / LEDGER):
        assert len(runs_of(source)) == 1, "a path from where one is will do"
    assert merge(ours, theirs.directory).added["runs"] == 1


def test_another_study_or_no_ledger_is_refused_with_what_differs(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    ours, theirs = ledgers
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(StudyDirectoryError, match="other/ledger.sqlite: no such ledger"):
        merge(ours, other)
    place = {"ledger": "actor", "host": "node-7", "path": str(theirs.directory / LEDGER)}
    (other / LEDGER_PLACE).write_text(json.dumps(place))
    with pytest.raises(StudyDirectoryError, match="lies on node-7; merge there, or copy it from there"):
        merge(ours, other)
    (other / LEDGER_PLACE).unlink()
    Ledger(other / LEDGER).claim({"model.d_model": 64}, {})
    with pytest.raises(StudyDirectoryError, match="another study's: model.d_model is 32 here but 64 there"):
        merge(ours, other)
    theirs.close()
    with sqlite3.connect(theirs.directory / LEDGER) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(StudyDirectoryError, match="has schema 2"):
        merge(ours, theirs.directory)
    (other / "text.sqlite").write_text("no database at all" * 100)
    with pytest.raises(StudyDirectoryError, match="can't be read as a ledger"):
        merge(ours, other / "text.sqlite")


def test_a_corpus_of_the_same_name_with_other_text_is_refused(ledgers: tuple[Ledger, Ledger]) -> None:
    ours, theirs = ledgers
    add_run(theirs, 0, 2.0)
    assert merge(ours, theirs.directory).added["runs"] == 1, "nothing was trained here yet"
    other = replace(chain(1), numerics=replace(NUMERICS, corpus_key="other"))
    values: dict[str, Any] = {"trained_from": 0, "source_losses": {}, "seconds": 1.0, "environment": {}}
    third = Ledger(ours.directory.parent / "third.sqlite")
    third.claim(IDENTITY, {})
    third.insert(segments, **other.row(), loss=2.0, state=None, **values)
    third.close()
    with pytest.raises(StudyDirectoryError, match="its corpus has the same name, .* key none here but other there"):
        merge(ours, third.directory / "third.sqlite")


def test_what_fails_in_our_own_ledger_is_not_said_of_the_source(ledgers: tuple[Ledger, Ledger]) -> None:
    ours, theirs = ledgers
    add_run(theirs, 0, 2.0)
    with sqlite3.connect(ours.directory / LEDGER) as connection:
        connection.execute("CREATE TRIGGER full BEFORE INSERT ON runs BEGIN SELECT RAISE(ABORT, 'ours is full'); END")
    connection.close()
    with pytest.raises(sa.exc.IntegrityError, match="ours is full"):
        merge(ours, theirs.directory)


def test_a_segment_whose_key_does_not_fit_is_refused(ledgers: tuple[Ledger, Ledger]) -> None:
    ours, theirs = ledgers
    forged = add_run(theirs, 0, 2.0)
    theirs.close()
    with sqlite3.connect(theirs.directory / LEDGER) as connection:
        connection.execute("UPDATE segments SET tokens = tokens + 1 WHERE key = ?", (forged,))
    connection.close()
    result = merge(ours, theirs.directory)
    assert result.refused == (forged,)
    assert (result.added["segments"], result.added["runs"]) == (1, 0)


def test_a_sweep_comes_without_the_rungs_of_refused_segments_and_what_follows_from_them(
    ledgers: tuple[Ledger, Ledger],
) -> None:
    """Trial 0 goes on from a forged rung, trial 1 copies it there, trial 2 has nothing to do with it."""
    ours, theirs = ledgers
    forged = add_run(theirs, 0, 2.0)
    for number in range(3):
        theirs.insert(trials, sweep="s", number=number, config={}, until=0)

    def arrive(trial: int, rung: int, segment: str = "") -> None:
        theirs.add_rung(sweep="s", trial=trial, rung=rung, tokens=1, segment=segment, loss=1.0, seconds=1.0)

    def go_on(trial: int, rung: int, donor: int | None = None) -> None:
        path = [[0, {}]]
        theirs.add_decision(sweep="s", trial=trial, rung=rung, until=rung + 1, path=path, donor=donor)

    for trial in range(3):
        arrive(trial, 0)
        go_on(trial, 0)
    for trial in range(3):
        arrive(trial, 1, forged if trial == 0 else "")
    for trial in range(3):
        go_on(trial, 1, 0 if trial == 1 else None)
        arrive(trial, 2)
    theirs.close()
    with sqlite3.connect(theirs.directory / LEDGER) as connection:
        connection.execute("UPDATE segments SET tokens = tokens + 1 WHERE key = ?", (forged,))
    connection.close()
    merge(ours, theirs.directory)
    assert sorted((row["trial"], row["rung"]) for row in ours.rungs("s")) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert sorted((row["trial"], row["rung"]) for row in ours.decisions("s")) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    record = Record(ours, "s")
    assert record.open == {0: 1}
    assert [record.last_rung(trial) for trial in range(3)] == [0, 1, 2]
    assert prune(ours).retrained == 0, "nothing in it points at what was left out"


def test_results_and_forecasts_that_differ_are_told_and_ours_stay(ledgers: tuple[Ledger, Ledger]) -> None:
    ours, theirs = ledgers
    for ledger, drift, low in ((ours, 0.1, 1.9), (theirs, 0.4, 1.8)):
        ledger.record_result("check", "same", {"passed": True, "losses": [2.0 * (1 + drift * 1e-5), float("nan")]})
        ledger.record_result("transfer", "k", {"passed": True, "transfers": [{"drift": drift, "status": None}]})
        ledger.insert(forecasts, plan="p", loss=2.0, low=low, high=2.1, level=0.9, payload={"low": low})
    theirs.record_result("transfer", "theirs alone", {})
    theirs.close()
    result = merge(ours, theirs.directory)
    assert result.conflicts == (("result transfer k: transfers.0.drift", 0.1, 0.4), ("forecast p: low", 1.9, 1.8))
    assert "conflict: result transfer k: transfers.0.drift: 0.1 here stays, 0.4 there" in str(result)
    assert result.added["results"] == 1
    found = ours.result("transfer", "k")
    assert found is not None
    assert found["transfers"][0]["drift"] == 0.1


def test_a_postgresql_source_is_read_in_one_snapshot(postgres: Any, tmp_path: Path) -> None:
    database = open_ledger(StorageSettings(ledger="postgresql"), tmp_path, "s")
    database.claim(IDENTITY, {})
    with opened(tmp_path, ["results"]) as (_, read):
        assert read(find, "results") == []
        database.record_result("check", "k", {})
        assert read(find, "results") == [], "what is written meanwhile is not seen"
    with opened(tmp_path, ["results"]) as (_, read):
        assert len(read(find, "results")) == 1
    database.close()


def test_a_postgresql_study_is_merged_in_and_out(ledgers: tuple[Ledger, Ledger], postgres: Any, tmp_path: Path) -> None:
    ours, theirs = ledgers
    fill(ours, theirs)
    theirs.close()
    shared = tmp_path / "shared"
    shared.mkdir()
    database = open_ledger(StorageSettings(ledger="postgresql"), shared, "s")
    database.claim(IDENTITY, {})
    assert merge(database, theirs.directory).added["segments"] == 6
    shutil.rmtree(theirs.directory)
    assert merge(ours, shared).added == merge_counts(segments=2, runs=1, states=1, curves=2)
    assert ours.segment(chain(2).key) == database.segment(chain(2).key)
    database.close()


def merge_counts(**added: int) -> dict[str, int]:
    return {"results": 1, "forecasts": 1, "sweeps": 1, "rounds": 1, "trials": 1, "rungs": 1, "decisions": 1, **added}
