"""A smoke test trains, saves and resumes the beginning of the real run elsewhere, and leaves that run alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muscale import StageError, StudyConfig
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.planned_worker import PlannedWorker
from muscale.full_runs.promote.promotion import full_run_of, promote
from muscale.full_runs.promote.smoke_test import SmokeTest, beginning, measured, smoke_test, smoke_test_on_cluster
from muscale.full_runs.train.attempt import train
from muscale.layout import CORPUS, FULL_RUNS, SMOKE_TEST
from muscale.plans.device_lines import disk_line
from muscale.plans.gate import Gate, transfer_line
from muscale.plans.plan import Plan, register
from muscale.plans.planning import Planner
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from tests.muscale.forked_ranks import BATCH, losses, small_run
from tests.muscale.planted import planted_fit, planted_horizon

STEPS = 6


def run_in(folder: Path, corpus: Corpus) -> FullRun:
    """Forty steps with four checkpoints and two evaluations."""
    return small_run(
        corpus,
        folder,
        segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * 40),
        checkpoint_every_tokens=BATCH * 10,
        evaluate_every_tokens=BATCH * 20,
    )


def in_this_process(run: FullRun) -> None:
    measured(run.directory, 0, lambda: train(run))


def test_it_saves_resumes_and_forecasts_the_wall_time(corpus: Corpus, tmp_path: Path) -> None:
    scratch = tmp_path / "run" / SMOKE_TEST
    tried = replace(run_in(scratch, corpus), checkpoint_every_tokens=BATCH * 15)
    found = smoke_test(tried, in_this_process, steps=STEPS, plan="p", estimated_bytes=2**20)
    assert (found.n_tokens, found.evaluations, found.saves) == (BATCH * 40, 2, 3)
    real = run_in(tmp_path / "real", corpus)
    train(real)
    assert list(found.losses) == losses(real)[: 2 * STEPS], "the first steps are the run's own"
    assert found.estimated_bytes == 2**20
    assert found.resumed_from == STEPS * BATCH
    assert (found.world_size, found.batch_tokens, len(found.peak_bytes)) == (1, BATCH, 1)
    assert found.peak_bytes[0] > 2**26, "a process that has torch loaded has more"
    assert found.tokens_per_second == BATCH / found.step_seconds
    waits = 2 * found.evaluation_seconds + 3 * found.save_seconds + found.start_seconds
    assert found.wall_seconds == pytest.approx(40 * found.step_seconds + waits)
    often = replace(found, save_minutes=found.step_seconds / 60)  # a save with each step
    assert often.wall_seconds - found.wall_seconds == pytest.approx((40 - 3) * found.save_seconds)
    assert 0 < found.goodput < 1
    assert not scratch.exists()
    assert SmokeTest.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    for text in ("twice 6 steps of 256 tokens on 1 workers", "resumed   from 1,536 tokens", "goodput"):
        assert text in str(found)


def test_it_takes_the_full_batch_of_a_ramp_from_the_first_step() -> None:
    h = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, batch_doublings=1, batch_ramp_tokens=8 * BATCH)
    ramped = chain(h, BATCH * 40)
    assert ramped[0].recipe.ramp.first_batch_tokens == BATCH // 2
    cut = beginning(ramped, 6 * BATCH)
    assert [step for segment in cut for step in segment.steps()] == [(n * BATCH, BATCH) for n in range(6)]
    assert cut[0].recipe.warmup_tokens == ramped[0].recipe.warmup_tokens


def test_a_run_that_is_too_short_or_did_not_resume_is_reported(corpus: Corpus, tmp_path: Path) -> None:
    run = run_in(tmp_path / SMOKE_TEST, corpus)

    def tried(steps: int, train: Callable[[FullRun], None] = lambda run: None) -> None:
        smoke_test(run, train, plan="p", steps=steps, estimated_bytes=1)

    with pytest.raises(StageError, match=r"steps.*6, got 5"):
        tried(5)
    with pytest.raises(StageError, match=r"40.*21"):
        tried(21)
    with pytest.raises(StageError, match=r"the run ended without a result; its records are in"):
        tried(6)

    def forgets(part: FullRun) -> None:
        in_this_process(part)
        for file in part.directory.glob("checkpoints/*/manifest.json"):
            file.unlink()

    with pytest.raises(StageError, match=r"from 0 tokens, .* 1536"):
        tried(6, forgets)


@pytest.fixture
def planned(make_study: Callable[..., Path], ledger: Ledger) -> tuple[Plan, StudyConfig, Numerics]:
    """A short plan of the micro-study, whose law is planted, with a corpus where the workers look for it."""
    path = make_study("planted")
    corpus = write_corpus(ledger.directory / CORPUS, str(path.parent / "text"))
    config = StudyConfig.read(path, [f"promote.checkpoint_every_tokens={12 * BATCH}"])
    plan = Planner(config, config.hyperparameters, planted_horizon(), planted_fit(), corpus=corpus, winner=0).plan()
    short = register(replace(plan, n_tokens=32 * BATCH), ledger)
    base = config.model
    numerics = Numerics(model=base, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=2048)
    return short, config, numerics


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_smoke_test_with_two_workers_leaves_nothing_to_the_run(
    planned: tuple[Plan, StudyConfig, Numerics], ledger: Ledger
) -> None:
    plan, config, numerics = planned
    before = ledger.forecast(plan.key)
    found = smoke_test_on_cluster(plan, config, ledger, numerics, steps=6)
    assert (found.world_size, len(found.peak_bytes), found.resumed_from) == (2, 2, 6 * BATCH)
    assert found.estimated_bytes == PlannedWorker(plan=plan, config=config).memory().total
    assert ledger.forecast(plan.key) == before
    kept = ledger.latest_result(ResultKind.SMOKE_TEST)
    assert kept is not None
    assert SmokeTest.from_dict(kept["payload"]) == found
    assert list((ledger.directory / FULL_RUNS / plan.key).iterdir()) == []

    closed = Gate(plan=plan.key, lines=(transfer_line("fail", ("drift",)), disk_line(1, 2, kept=1, place="/")))
    closed.record(ledger)
    folder = ledger.directory / FULL_RUNS / plan.key
    real = full_run_of(plan, config, numerics, folder, ledger.directory / CORPUS)
    train(real)  # `promote` records it
    done = promote(plan, config, ledger, numerics, verdict="fail", gate=closed)
    trained = losses(real)
    assert trained[:12] == pytest.approx(list(found.losses), rel=1e-5)
    assert len(trained) == 32
    assert (done.gate, done.forced, done.forced_lines) == (closed.to_dict(), True, ("transfer",))
    assert "forced despite transfer, with a transfer verdict of 'fail'" in str(done)
