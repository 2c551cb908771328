"""States that a training may resume from are kept, the rest goes; what is needed after all is trained again, and counted."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muscale import Study
from muscale.actors.worker import Worker
from muscale.layout import CORPUS, CURVES, LEDGER, STATES
from muscale.search.run_sweep import _prune
from muscale.search.sweep import Sweep
from muscale.store import lease as leases
from muscale.store import retention
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import decisions, rungs, runs, segments, trials
from muscale.store.lineage import Chain
from muscale.store.retention import prune
from muscale.store.statements import insert_once
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics

RUN = {"d_model": 1, "n_layers": 1, "n_params": 1, "n_tokens": 1, "seed": 0, "learning_rate": 1.0}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    for folder in (STATES, CURVES):
        (tmp_path / folder).mkdir()
    return Ledger(tmp_path / LEDGER)


def add(ledger: Ledger, key: str, *, line: str = "", tokens: int = 1, parent: str | None = None) -> Path:
    """A segment with a state of 100 bytes."""
    state = ledger.directory / STATES / f"{key}.pt"
    state.write_bytes(bytes(100))
    values: dict[str, Any] = {"numerics": {}, "segment": {}, "environment": {}, "source_losses": {}, "seconds": 1.0}
    values |= {"key": key, "line": line or f"line of {key}", "parent": parent, "tokens": tokens, "trained_from": 0}
    ledger.insert(segments, **values, loss=2.0, state=f"{STATES}/{key}.pt")
    return state


def add_rung(ledger: Ledger, trial: int, key: str, loss: float | None, rung: int = 0) -> None:
    ledger.insert(rungs, sweep="s", trial=trial, rung=rung, tokens=1, segment=key, loss=loss, seconds=1.0)


def aged(path: Path) -> Path:
    path.write_bytes(bytes(10))
    os.utime(path, (time.time() - 4000, time.time() - 4000))
    return path


def test_each_rule_keeps_what_it_names_and_the_rest_goes(ledger: Ledger) -> None:
    for number, loss in enumerate([2.0, 1.0, 3.0, None, 4.0]):
        until = 1 if number == 4 else 0  # the last one has another rung before it
        ledger.insert(trials, sweep="s", number=number, config={}, until=until)
        add(ledger, f"t{number}", line=f"trial {number}", parent="start" if number == 1 else None)
        add_rung(ledger, number, f"t{number}", loss)
    add(ledger, "t4later", line="trial 4", tokens=2)
    add(ledger, "start")
    for key, tokens in (("short", 1), ("long", 2)):
        add(ledger, key, line="stem", tokens=tokens)
    ledger.insert(runs, purpose="ladder", key="long", stem="stem", hyperparameters={}, label="", **RUN)
    planned = prune(ledger, top_k=2, dry_run=True)
    assert all(path.exists() for path in (ledger.directory / STATES / f"{key}.pt" for key in ("t2", "t3", "short")))
    done = prune(ledger, top_k=2)
    assert done.gone == planned.gone == {"state that no rule keeps": 300}
    assert done.kept == {
        "running trial": 200,
        "best of a rung": 200,
        "end of a ladder stem": 100,
        "parent of a kept state": 100,
    }
    gone = {"t2", "t3", "short"}
    for key in ("t0", "t1", "t2", "t3", "t4", "t4later", "start", "short", "long"):
        row = ledger.segment(key)
        assert row is not None
        assert (row["state"] is None) == (key in gone)
        assert (ledger.directory / STATES / f"{key}.pt").exists() == (key not in gone)
    again = prune(ledger, top_k=2)
    assert (again.gone, again.kept) == ({}, done.kept)
    assert "freed 0 B in 0 files" in str(again)
    json.dumps(again.to_dict())


def test_whatever_a_kept_one_started_from_stays_through_those_that_have_no_state(ledger: Ledger) -> None:
    add(ledger, "first")
    add(ledger, "second", parent="first").unlink()
    ledger.forget_states(["second"])
    add(ledger, "third", parent="second")
    ledger.insert(trials, sweep="s", number=0, config={}, until=0)
    add_rung(ledger, 0, "third", 1.0)
    add(ledger, "other", parent="first")
    done = prune(ledger)
    assert done.kept == {"best of a rung": 100, "parent of a kept state": 100}
    assert [key for key in ("first", "third", "other") if (ledger.segment(key) or {})["state"]] == ["first", "third"]


def test_what_a_living_worker_may_need_stays(ledger: Ledger) -> None:
    leased, recent = add(ledger, "leased", line="line"), add(ledger, "recent")
    writing = aged(ledger.directory / STATES / f"new.pt.{os.getpid()}.unfinished")
    with leases.lease(ledger, "line"):
        done = prune(ledger)
        assert done.kept == {"held by a worker": 100, "recent, while workers train": 100}
        assert leased.exists()
        assert recent.exists()
        assert writing.exists()
    assert prune(ledger).files == {"state that no rule keeps": 2, "unfinished file": 1}


def test_a_sweep_that_runs_keeps_all_its_rungs_and_a_worker_the_end_of_each_stem(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of a population wait for the others, and each rung is annealed at the end."""
    monkeypatch.setattr(retention, "RECENT_SECONDS", 0.0)
    for number in range(4):
        ledger.insert(trials, sweep="s", number=number, config={}, until=0)
        for rung in range(2):
            add(ledger, f"t{number}{rung}", line=f"trial {number}", tokens=1 + rung)
            add_rung(ledger, number, f"t{number}{rung}", 1.0 + number, rung)
    ledger.insert(trials, sweep="other", number=0, config={}, until=0)
    add(ledger, "other")
    ledger.insert(rungs, sweep="other", trial=0, rung=0, tokens=1, segment="other", loss=1.0, seconds=1.0)
    # of a transfer check, say, whose branch trains for more than an hour
    for key, tokens in (
        ("short", 1),
        ("long", 2),
    ):
        add(ledger, key, line="stem", tokens=tokens)
    with leases.lease(ledger, leases.sweep_lease("s")):
        assert prune(ledger, top_k=0, dry_run=True).kept == {
            "sweep that runs": 800,
            "end of a stem, while workers train": 100,
        }
        assert prune(ledger, top_k=1, dry_run=True, finished="s").kept == {"best of a rung": 300}
    with leases.lease(ledger, "line of the branch"):
        assert prune(ledger, top_k=0).kept == {"end of a stem, while workers train": 100}
    assert (ledger.segment("long") or {})["state"]
    assert prune(ledger, top_k=0).kept == {}


def test_a_worker_that_died_on_another_machine_keeps_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.3)
    add(ledger, "leased", line="line")
    ledger.write(insert_once, "leases", [{"name": "line", "token": 1, "owner": "elsewhere/1/0.00/aa", "beat": 3}])
    assert prune(ledger, expired=()).kept == {"held by a worker": 100}
    assert prune(ledger).files == {"state that no rule keeps": 1}


def test_a_sweep_s_end_prunes_although_a_worker_died_elsewhere_but_not_while_one_lives(
    make_study: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.6)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    study = Study.open(make_study(), quiet=True)
    search = Sweep.of(study.config, study.ledger, study.corpus)
    states = search.ledger.directory / STATES
    states.mkdir()
    dead = {"name": "line", "token": 1, "owner": "elsewhere/1/0.00/aa", "beat": 3}
    search.ledger.write(insert_once, "leases", [dead])
    orphan = aged(states / "orphan.pt")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(leases, "_me", lambda: "another-machine/1/0.00")
        with leases.lease(search.ledger, "other line"):
            elsewhere.undo()
            _prune(search)
            assert orphan.exists()
    with leases.lease(search.ledger, f"sweep {search.key}"):
        _prune(search)
    assert not orphan.exists()


def test_only_old_files_that_no_row_knows_go_and_curves_never(ledger: Ledger) -> None:
    states, curves = ledger.directory / STATES, ledger.directory / CURVES
    old = [aged(states / "orphan.pt"), aged(states / "a.pt.7.unfinished"), aged(curves / "b.parquet.7.unfinished")]
    kept = [aged(curves / "c.parquet"), aged(states / "notes.txt")]
    for name in ("young.pt", "young.pt.7.unfinished"):
        (states / name).write_bytes(b"")
        kept.append(states / name)
    assert prune(ledger).gone == {"state without a row": 10, "unfinished file": 20}
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in kept)


def test_a_pruned_state_comes_back_with_its_loss_and_is_counted(make_study: Callable[..., Path]) -> None:
    torch.set_num_threads(1)
    directory = make_study().parent
    corpus = write_corpus(directory / CORPUS, str(directory / "text"))
    worker = Worker(Ledger(directory / LEDGER), compiled=False)
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    numerics = Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=128).resolve(40 * 128)
    run = Chain(numerics=numerics, segments=branch(recipe, 10 * 128, 14 * 128))
    stem = run.parent
    assert stem is not None
    worker.reach(stem)
    assert prune(worker.ledger).files == {"state that no rule keeps": 1}
    assert not list((directory / STATES).iterdir())
    assert worker.reach(run).loss is not None
    after = prune(worker.ledger, dry_run=True)
    assert (after.retrained, after.retrained_tokens) == (1, 10 * 128)
    assert "1 times, 1,280 tokens" in str(after)
    longer = Chain(numerics=numerics, segments=branch(recipe, 20 * 128, 24 * 128)).parent
    assert longer is not None
    worker.reach(longer)
    assert [row["key"] for row in worker.ledger.retrained()] == [stem.key, stem.key], (
        "the way to a longer end counts too"
    )


def test_the_state_that_a_copy_is_to_start_from_is_kept(ledger: Ledger) -> None:
    for number, loss in enumerate([1.0, 2.0, None]):
        ledger.insert(trials, sweep="s", number=number, config={}, until=0)
        add(ledger, f"t{number}", line=f"trial {number}")
        add_rung(ledger, number, f"t{number}", loss)
    path = [[0, {}], [1, {}]]
    for trial in (1, 2):  # one was worse, one diverged: both continue from trial 0's state
        ledger.insert(decisions, sweep="s", trial=trial, rung=0, until=1, path=path, donor=0)
    assert prune(ledger, top_k=0).kept == {"running trial": 100}
    assert (ledger.segment("t0") or {})["state"]
    assert (ledger.segment("t1") or {})["state"] is None
