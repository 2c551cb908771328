"""A run that is prepared here is trained without Ray, and then recorded as any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from muscale import StageError, Study, StudyFileError
from muscale.cli.entry import run
from muscale.errors import LeaseHeldError
from muscale.full_runs.promote.prepared import commands_of, prepare, read, train_here
from muscale.full_runs.promote.promotion import begin, promote
from muscale.layout import FAILURE, FULL_RUNS, RESULT
from muscale.plans.gate import Gate
from muscale.store.lease import full_run_lease, lease
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus_writing import write_corpus
from tests.muscale.gloo_ranks import GlooRanks
from tests.muscale.planted_ladder import registered_plan
from tests.muscale.planted_secrets import PLANTED, holding, leaking_processes
from tests.quick import quick_and_soak

MakeStudy = Callable[..., Path]
SMALL = ("ladder.stems=[{width=16, n_tokens=16384}]", "plan.compute_flops=2e9")
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train_together(prepared: str, log: Path) -> str:
    """Two ranks with secrets in their environment, of which none is seen while they train; returns what they say."""
    with log.open("w") as file:
        ranks = subprocess.Popen(
            [*RANKS, "-m", "muscale", "train", prepared],
            env={**os.environ, **PLANTED, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
        most, deadline = 0, time.monotonic() + 600
        try:
            while ranks.poll() is None and time.monotonic() < deadline:
                assert leaking_processes() == []
                most = max(most, len(psutil.Process(ranks.pid).children(recursive=True)))
                time.sleep(1)
        finally:
            ranks.terminate()  # nothing, if they have ended
            ranks.wait(timeout=60)
    assert ranks.returncode == 0, log.read_text()
    assert most >= 2, "both ranks were looked at"
    return log.read_text()


@pytest.mark.parametrize("by_torchrun", quick_and_soak((False, True), False))
def test_ranks_train_as_one_process_does_and_the_promotion_is_recorded(
    make_study: MakeStudy, gloo_ranks: GlooRanks, by_torchrun: bool
) -> None:
    path = make_study()
    study = Study.open(path, SMALL, quiet=True)
    plan = registered_plan(path, study.ledger, *SMALL)
    gate = Gate(plan=plan.key, lines=())
    begin(plan, study.config, study.ledger, verdict="pass", gate=gate)
    directory = study.directory / FULL_RUNS / plan.key
    commands = study.contents.commands
    prepared = prepare(
        plan, study.config, study.config.shared_numerics(study.corpus, study.directory), directory, commands
    )
    assert f"torchrun --nproc-per-node 2 -m muscale train {prepared.path}" in str(prepared)
    moved = study.directory.with_name("elsewhere")  # as to the machine that trains
    shutil.copytree(study.directory, moved)

    if by_torchrun:
        log = train_together(prepared.path, directory / "ranks.log")
        assert log.count(f"`{commands.line('promote')}` records it") == 1
        assert holding(study.directory) == []
    else:
        gloo_ranks.call(train_here, Path(prepared.path), world_size=2)
    result = json.loads((directory / RESULT).read_text())
    single = train_here(moved / FULL_RUNS / plan.key / "prepared.json")
    assert (result["environment"]["world_size"], single["environment"]["world_size"]) == (2, 1)
    assert result["loss"] == pytest.approx(single["loss"], rel=1e-5)

    numerics = study.config.shared_numerics(study.corpus, study.directory)
    promotion = promote(plan, study.config, study.ledger, numerics, verdict="pass", gate=gate)
    assert (promotion.loss, promotion.world_size) == (result["loss"], 2)
    assert study.ledger.result(ResultKind.PROMOTION, plan.key) is not None


def test_a_run_that_another_process_trains_is_refused_and_nothing_is_written(make_study: MakeStudy) -> None:
    path = make_study()
    study = Study.open(path, SMALL, quiet=True)
    plan = registered_plan(path, study.ledger, *SMALL)
    directory = study.directory / FULL_RUNS / plan.key
    prepared = prepare(plan, study.config, study.config.shared_numerics(study.corpus, study.directory), directory)
    with lease(study.ledger, full_run_lease(plan.key)):
        with pytest.raises(LeaseHeldError):
            train_here(Path(prepared.path))
        assert run(["train", prepared.path]) == 2
    assert [file.name for file in directory.iterdir()] == ["prepared.json"]


def test_another_corpus_is_refused_and_the_failure_kept_for_watch(make_study: MakeStudy) -> None:
    path = make_study()
    study = Study.open(path, SMALL, quiet=True)
    plan = registered_plan(path, study.ledger, *SMALL)
    directory = study.directory / FULL_RUNS / plan.key
    prepared = prepare(plan, study.config, study.config.shared_numerics(study.corpus, study.directory), directory)
    shutil.move(study.corpus.folder, tmp := study.directory / "kept")
    for file in (study.directory / "text").iterdir():
        file.write_text(file.read_text().upper())
    write_corpus(study.corpus.folder, str(study.directory / "text"))
    with pytest.raises(StageError, match=study.corpus.key):
        train_here(Path(prepared.path))
    assert study.corpus.key in (directory / FAILURE).read_text()
    shutil.rmtree(study.corpus.folder)
    shutil.move(tmp, study.corpus.folder)
    assert train_here(Path(prepared.path))["tokens"] == plan.n_tokens
    assert not (directory / FAILURE).exists()


def test_a_file_that_is_no_prepared_run_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "prepared.json"
    path.write_text('{"plan": 3}')
    with pytest.raises(StageError, match=r"prepared\.json: "):
        read(path)
    with pytest.raises(StageError, match=r"nothing\.json: "):
        read(path.with_name("nothing.json"))


def test_a_prepared_run_that_was_edited_is_refused_and_its_settings_may_be(make_study: MakeStudy) -> None:
    path = make_study()
    study = Study.open(path, SMALL, quiet=True)
    plan = registered_plan(path, study.ledger, *SMALL)
    directory = study.directory / FULL_RUNS / plan.key
    numerics, commands = study.config.shared_numerics(study.corpus, study.directory), study.contents.commands
    file = Path(prepare(plan, study.config, numerics, directory, commands).path)
    study.ledger.close()
    assert commands_of(file) == commands
    assert [part.name for part in directory.iterdir()] == [file.name]
    written = json.loads(file.read_text())
    written["config"]["promote"]["checkpoint_every_tokens"] = 4096
    file.write_text(json.dumps(written))
    assert read(file).checkpoint_every_tokens == 4096, "where and how is nobody's but the owner's"
    written["config"]["promote"]["tensor_parallel"] = 3
    file.write_text(json.dumps(written))
    with pytest.raises((StageError, StudyFileError), match=r"prepared\.json: .*tensor_parallel"):
        read(file)
    written["config"]["promote"]["tensor_parallel"] = 1
    written["plan"]["hyperparameters"]["learning_rate"] *= 2
    file.write_text(json.dumps(written))
    with pytest.raises(StageError, match=r"prepared\.json: run: .*[0-9a-f]{16}"):
        read(file)
