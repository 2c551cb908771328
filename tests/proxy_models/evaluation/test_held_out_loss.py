"""The held-out loss is the trainer's, and its standard error that of the means of passes."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import next_token_loss
from proxy_models.data.batches import evaluation_sequences, evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.held_out_loss import HeldOutLoss, HeldOutLosses
from proxy_models.evaluation.measure import Score, Subject
from proxy_models.evaluation.memorisation import Memorisation
from proxy_models.training.trainer import SegmentResult
from tests.proxy_models.evaluation.conftest import numerics_of, trained
from tests.proxy_models.families import Recurrent
from tests.proxy_models.prompted import prompted_corpus


def by_name(scores: tuple[Score, ...]) -> dict[tuple[str, str], Score]:
    return {(score.name, score.metric): score for score in scores}


def test_the_loss_is_the_trainer_s_with_the_error_of_its_passes(once_trained: tuple[Subject, SegmentResult]) -> None:
    subject, result = once_trained
    found = by_name(HeldOutLoss().measure(subject).scores)
    loss = found["", "loss"]
    assert loss.value == pytest.approx(result.loss, rel=1e-6)
    assert loss.n == 40
    sequences = evaluation_sequences(subject.corpus.validation, 32, 40 * 32)
    with torch.no_grad():  # 40 sequences make passes of two
        means = [float(next_token_loss(subject.model, sequences[first : first + 2])) for first in range(0, 40, 2)]
    assert loss.standard_error == pytest.approx(np.std(means, ddof=1) / math.sqrt(20), rel=1e-4)
    text = subject.corpus.manifest["text"]
    per_token = subject.corpus.n_validation_tokens / (math.log(2) * text["held_out_bytes"])
    bits = found["", "bits_per_byte"]
    assert bits.value == pytest.approx(loss.value * per_token)
    assert bits.standard_error == pytest.approx(loss.standard_error * per_token)
    assert set(found) == {("", "loss"), ("", "bits_per_byte")}


def test_the_losses_of_a_mixture_are_those_of_its_sources(mixed: Corpus) -> None:
    subject, result = trained(
        numerics_of(ModelConfig(d_model=16, n_layers=1, context_length=16, head_dim=8), mixed), mixed, 10
    )
    found = by_name(HeldOutLoss().measure(subject).scores)
    for name, loss in result.source_losses.items():
        assert found[name, "loss"].value == pytest.approx(loss, rel=1e-6)
        assert found[name, "loss"].n == 20
        n_bytes = mixed.sources[name].manifest["text"]["held_out_bytes"]
        n_tokens = mixed.sources[name].n_validation_tokens
        assert found[name, "bits_per_byte"].value == pytest.approx(loss * n_tokens / n_bytes / math.log(2), rel=1e-6)
    assert found["", "loss"].value == pytest.approx(result.loss, rel=1e-6)
    errors = [found[name, "loss"].standard_error or 0 for name in ("words", "digits")]
    assert found["", "loss"].standard_error == pytest.approx(math.hypot(0.75 * errors[0], 0.25 * errors[1]))
    several = [found[name, "bits_per_byte"].value for name in ("words", "digits")]
    assert min(several) < found["", "bits_per_byte"].value < max(several)


def test_a_custom_family_is_measured_and_stays_in_its_mode(corpus: Corpus) -> None:
    member = Recurrent(vocab_size=256, context_length=16).member(16, 1)
    subject, result = trained(numerics_of(member, corpus), corpus, 5)
    subject.model.train()
    assert HeldOutLoss().measure(subject).scores[0].value == pytest.approx(result.loss, rel=1e-6)
    assert subject.model.training


def losses(means: list[float], sizes: list[float]) -> HeldOutLosses:
    return HeldOutLosses(weights={"one": 1.0}, sizes={"one": np.array(sizes)}, means={"one": np.array(means)})


def test_passes_count_by_their_sequences() -> None:
    score = losses([1.0, 2.0, 4.0], [2, 2, 1]).score("m", "n", "loss")
    assert score.value == pytest.approx(2.0)
    assert score.standard_error == pytest.approx(math.sqrt(3 / 2 * (0.4**2 + 0.2**2 * 4)))
    assert score.n == 5
    assert losses([1.0], [3]).score("m", "n", "loss").standard_error is None


def test_a_difference_has_the_error_of_pairs() -> None:
    difference = (losses([2.0, 5.0, 9.0], [1, 1, 1]) - losses([1.0, 4.0, 8.0], [1, 1, 1])).score(
        "m", "n", "loss_increase"
    )
    assert (difference.value, difference.standard_error) == (1.0, 0.0)


def test_the_measure_is_picklable_and_has_a_key() -> None:
    measure = HeldOutLoss()
    assert pickle.loads(pickle.dumps(measure)) == measure
    assert measure.key == replace(measure).key


def test_with_prompts_it_is_over_the_tokens_and_bytes_that_count(tmp_path: Path) -> None:
    corpus = prompted_corpus(tmp_path, 600)
    numerics = numerics_of(ModelConfig(d_model=16, n_layers=1, context_length=16, head_dim=8), corpus)
    subject, result = trained(numerics, corpus, 10)
    found = by_name(HeldOutLoss().measure(subject).scores)
    loss, bits = found["", "loss"], found["", "bits_per_byte"]
    (held_out,) = evaluation_sets(corpus, 16, 40 * 16).values()
    sequences, counts = held_out.sequences, held_out.sequences[:, 1:] >= 0
    plain = torch.where(sequences < 0, -1 - sequences, sequences)
    with torch.no_grad():
        logits = subject.model(plain[:, :-1])[counts]
    expected = torch.nn.functional.cross_entropy(logits, plain[:, 1:][counts]).item()
    assert loss.value == pytest.approx(expected, rel=1e-5)
    assert loss.value == pytest.approx(result.loss, rel=1e-5)
    assert loss.n == int(counts.sum())
    assert (loss.standard_error or 0) > 0
    counted = corpus.manifest["counted"]
    assert bits.value == pytest.approx(
        loss.value * counted["validation"] / (math.log(2) * counted["held_out_bytes"]), rel=1e-6
    )
    with pytest.raises(ValueError, match="prompts"):
        Memorisation(prefix_tokens=4, continuation_tokens=4).measure(subject)
