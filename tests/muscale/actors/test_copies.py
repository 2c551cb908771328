"""A member that continues from another's state: trained for real, by a worker alone.

Two members of three generations; after the first, one goes on from the other's state with another rate and beta.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from muscale.actors.worker import Worker
from muscale.search.sweep_jobs import ConfigHistory, history_of
from muscale.search.trial import TrialPlan
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState
from search_spaces import Config

BATCH = 128
DONOR: Config = {"learning_rate": 0.011, "beta1": 0.9}
CHANGED: Config = {"learning_rate": 0.011 * 0.8, "beta1": 0.8}
COPY: ConfigHistory = ((0, DONOR), (1, CHANGED))


@pytest.fixture
def plan(worker: Worker) -> TrialPlan:
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    numerics = Numerics(model=model, base=model, corpus_key=worker.trainer.corpus.key, seed=0, evaluation_tokens=512)
    defaults = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH)
    rungs = (17 * BATCH, 34 * BATCH, 51 * BATCH)
    return TrialPlan(numerics=numerics, defaults=defaults, n_tokens=60 * BATCH, rung_tokens=rungs)


def state(worker: Worker, reached: Chain) -> TrainState:
    row = worker.ledger.segment(reached.key)
    assert row is not None
    return TrainState.load(worker.directory / row["state"])


def assert_same(one: TrainState, other: TrainState) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_a_copy_is_the_donor_s_training_gone_on_with_bit_for_bit(worker: Worker, plan: TrialPlan) -> None:
    donor, copy = plan.rung(history_of(DONOR), 0), plan.rung(COPY, 1)
    worker.reach(donor)
    assert copy.parent is not None
    assert copy.parent.key == donor.key
    worker.reach(plan.rung(history_of(DONOR), 1))  # that the donor has gone on meanwhile takes nothing away
    worker.reach(copy)
    row = worker.ledger.segment(copy.key)
    assert row is not None
    assert row["trained_from"] == donor.last.end
    trainer = worker.trainer
    first = trainer.train(plan.numerics, donor.last)
    # Weights, moments and batches are the donor's; rate, decay and beta are the copy's own.
    second = trainer.train(plan.numerics, copy.last, first.state, averaged=True)
    assert second.state is not None
    assert_same(state(worker, copy), second.state)
    assert (row["loss"], row["averaged_loss"]) == (second.loss, second.averaged_loss)
    assert copy.last.recipe == plan.hyperparameters(CHANGED).resolve(plan.n_tokens)
    assert row["loss"] != worker.reach(plan.rung(history_of(DONOR), 1)).loss


def test_a_donor_s_pruned_state_is_trained_again_and_counted(worker: Worker, plan: TrialPlan) -> None:
    donor, copy = plan.rung(history_of(DONOR), 0), plan.rung(COPY, 1)
    worker.reach(donor)
    kept = state(worker, donor)
    row = worker.ledger.segment(donor.key)
    assert row is not None
    (worker.directory / row["state"]).unlink()
    worker.ledger.forget_states([donor.key])
    outcome = worker.reach(copy)
    (again,) = worker.ledger.retrained()
    assert (again["key"], again["tokens"]) == (donor.key, donor.last.end)
    undisturbed = worker.trainer.train(plan.numerics, copy.last, kept)
    assert outcome.loss == undisturbed.loss


def test_every_member_is_ranked_by_averaged_weights_whether_it_copied_or_not(worker: Worker, plan: TrialPlan) -> None:
    again: ConfigHistory = (*COPY, (2, {**CHANGED, "beta1": 0.7}))
    for path in (history_of(DONOR), COPY, again):
        for rung in range(3):
            outcome = worker.reach(plan.rung(path, rung))
            assert outcome.averaged_loss is not None
            assert outcome.averaged_loss != outcome.loss


def test_the_run_of_a_member_is_the_planned_run_of_the_schedule_that_it_followed(
    worker: Worker, plan: TrialPlan
) -> None:
    again: ConfigHistory = (*COPY, (2, {**CHANGED, "beta1": 0.7}))
    run = plan.branch(again, 2)
    best = plan.given(again, 2)
    assert [str(stage) for stage in best.stages] == [
        "after 33%: learning_rate × 0.8, beta1 = 0.8",
        "after 67%: beta1 = 0.7",
    ]
    assert (best.learning_rate, best.beta1) == (0.011, 0.9)
    assert run.last.end == plan.n_tokens
    planned = Chain(numerics=plan.numerics, segments=chain(best, plan.n_tokens))
    assert planned.key == run.key
    assert run.parent is not None
    assert run.parent.key == plan.rung(again, 2).key
    assert run.stem == plan.rung(history_of(DONOR), 0).stem
    outcome = worker.reach(run)
    assert worker.reach(planned) == outcome
    # A wider model and a longer run follow the same course.
    wide = replace(plan.numerics, model=replace(plan.numerics.model, d_model=32))
    longer = Chain(numerics=wide, segments=chain(replace(best, learning_rate=0.005), 120 * BATCH))
    assert [s.end // BATCH for s in longer.segments] == [34, 68, 102, 120]
    assert [s.recipe.learning_rate for s in longer.segments] == pytest.approx([0.005, 0.004, 0.004, 0.004])
