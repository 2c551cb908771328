"""Evaluation of a training's points: each measure is taken once, of the weights that an undisturbed training has there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from muscale.actors.worker import Worker
from muscale.layout import CORPUS, LEDGER
from muscale.store import evaluations
from muscale.store.evaluations import Evaluated, missing, score_table
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.evaluation.measure import Measured, Score, Subject
from proxy_models.evaluation.samples import Samples
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics

BATCH = 128


@pytest.fixture
def numerics(worker: Worker) -> Numerics:
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    return Numerics(model=model, base=model, corpus_key=worker.trainer.corpus.key, seed=0, evaluation_tokens=512)


@dataclass(frozen=True)
class Loss:
    """The held-out loss by itself, and a count of its calls."""

    calls: Path
    name = "own loss"
    key = "1"

    def measure(self, subject: Subject) -> Measured:
        with self.calls.open("a") as file:
            file.write(f"{subject.tokens}\n")
        (held_out,) = evaluation_sets(subject.corpus, 32, 512).values()
        with torch.no_grad():
            logits = subject.model(held_out.sequences[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out.sequences[:, 1:].flatten())
        score = Score(
            measure=self.name, name="", metric="loss", value=float(loss), standard_error=None, n=len(held_out.sequences)
        )
        return Measured(scores=(score,))


def run(numerics: Numerics) -> Chain:
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH).resolve(40 * BATCH)
    return Chain(numerics=numerics, segments=branch(recipe, 16 * BATCH, 20 * BATCH))


@pytest.mark.parametrize("tokens", [8, 16, 18, 20])
def test_the_weights_are_those_whose_loss_the_training_records(
    worker: Worker, numerics: Numerics, tmp_path: Path, tokens: int
) -> None:
    point = Evaluated(chain=run(numerics).until(tokens * BATCH), measures=(Loss(tmp_path / "calls"),))
    outcome = worker.evaluate(point)
    (score,) = score_table(worker.ledger).to_dict("records")
    assert score["value"] == pytest.approx(outcome.loss, rel=1e-5)
    assert score["tokens"] == tokens * BATCH
    assert score["anneals"] == (tokens == 20)


def test_a_run_evaluated_on_its_way_ends_as_one_that_is_not(
    worker: Worker, numerics: Numerics, make_study: Callable[..., Path], tmp_path: Path
) -> None:
    chain = run(numerics)
    for tokens in (8, 16, 18, 20):
        worker.evaluate(Evaluated(chain=chain.until(tokens * BATCH), measures=(Loss(tmp_path / "calls"),)))
    directory = make_study("undisturbed").parent
    write_corpus(directory / CORPUS, str(directory / "text"))
    assert Worker(Ledger(directory / LEDGER), compiled=False).reach(chain).loss == worker.reach(chain).loss


def test_each_measure_is_taken_once_also_if_another_comes_later(
    worker: Worker, numerics: Numerics, tmp_path: Path
) -> None:
    chain, counted = run(numerics), Loss(tmp_path / "calls")
    first = Evaluated(chain=chain, measures=(counted,))
    both = Evaluated(chain=chain, measures=(counted, Samples(prompts=("a",), n_tokens=3)))
    worker.evaluate(first)
    assert not missing(worker.ledger, [first])
    assert [point.measures for point in missing(worker.ledger, [both])] == [both.measures[1:]]
    worker.evaluate(both)
    worker.evaluate(both)
    assert (tmp_path / "calls").read_text() == f"{20 * BATCH}\n"
    (sampled,) = [row["payload"] for row in worker.ledger.results(ResultKind.EVALUATION) if row["payload"]["samples"]]
    assert sampled["samples"][0]["prompt"] == "a"


def test_a_run_that_is_known_is_evaluated_later_from_a_repeated_training(
    worker: Worker, numerics: Numerics, tmp_path: Path
) -> None:
    chain = run(numerics)
    known = worker.reach(chain)
    worker.evaluate(Evaluated(chain=chain, measures=(Loss(tmp_path / "calls"),)))
    (score,) = score_table(worker.ledger).to_dict("records")
    assert score["value"] == pytest.approx(known.loss, rel=1e-5)


def test_a_measure_that_fails_leaves_the_others(worker: Worker, numerics: Numerics, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Fails:
        name = "fails"
        key = "1"

        def measure(self, subject: Subject) -> Measured:
            raise ArithmeticError("no")

    point = Evaluated(chain=run(numerics), measures=(Loss(tmp_path / "calls"), Fails()))
    with pytest.raises(ArithmeticError):
        worker.evaluate(point)
    assert [measure.name for measure in missing(worker.ledger, [point])[0].measures] == ["fails"]


def test_a_diverged_run_has_no_scores(worker: Worker, numerics: Numerics, tmp_path: Path) -> None:
    recipe = Hyperparameters(learning_rate=1e30, batch_tokens=BATCH).resolve(40 * BATCH)
    chain = Chain(numerics=numerics, segments=branch(recipe, 16 * BATCH, 20 * BATCH))
    assert worker.evaluate(Evaluated(chain=chain, measures=(Loss(tmp_path / "calls"),))).diverged
    assert score_table(worker.ledger).empty
    assert not (tmp_path / "calls").exists()


def test_the_key_of_a_result_depends_on_weights_and_measure() -> None:
    keys = {
        evaluations.evaluation_key(weights, measure)
        for weights in ("a", "b")
        for measure in (Samples(prompts=("x",)), Samples(prompts=("y",)))
    }
    assert len(keys) == 4
