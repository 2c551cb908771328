"""FLOPs of a training that keeps documents apart: those that torch counts of each document alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.training.attended import attended_length, mean_length
from tests.proxy_models.families import Recurrent

SEPARATOR = 0
MODEL = ModelConfig(d_model=32, n_layers=2, head_dim=8, vocab_size=16, context_length=40, document_separator=SEPARATOR)


def test_flops_within_documents_are_those_that_torch_counts_of_each_alone() -> None:
    tokens = torch.randint(1, 16, (2, 41), generator=torch.Generator().manual_seed(0))
    tokens[0, [9, 30]] = SEPARATOR
    alone = Decoder(replace(MODEL, document_separator=None))
    parts = [tokens[:1, :10], tokens[:1, 9:31], tokens[:1, 30:], tokens[1:]]  # each from its separator to the next one
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for part in parts:
            next_token_loss(alone, part).backward()  # type: ignore[no-untyped-call]
    attended = mean_length(tokens[:, :-1], SEPARATOR)
    assert attended == (9**2 + 21**2 + 10**2 + 40**2) / 80
    assert counter.get_total_flops() == pytest.approx(MODEL.train_flops_within(attended) * 80)
    assert MODEL.train_flops_within(40.0) == MODEL.train_flops_within(None) == MODEL.train_flops_per_token


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Documents of 17 tokens, the one that closes them included."""
    (tmp_path / "text").mkdir()
    for number in range(300):
        (tmp_path / "text" / f"{number}.txt").write_text("a" * 16)
    return write_corpus(tmp_path / "tokens", str(tmp_path / "text"))


def test_a_token_s_document_is_measured_over_the_run_s_own_sequences(corpus: Corpus) -> None:
    # Sequences of 40 cut documents of 17 at every place, equally often.
    cuts = [[k, *[17] * ((40 - k) // 17), (40 - k) % 17] for k in range(17)]
    expected = sum(length**2 for pieces in cuts for length in pieces) / 17 / 40
    for n_tokens in (40 * 64, 40 * 10_000):
        assert attended_length(replace(MODEL, vocab_size=256), corpus, n_tokens) == pytest.approx(expected, rel=0.02)


def test_where_attention_crosses_documents_there_is_no_such_length(corpus: Corpus) -> None:
    family = Recurrent(vocab_size=256, context_length=32).member(16, 2)
    for model in (replace(MODEL, vocab_size=256, document_separator=None), family):
        assert attended_length(model, corpus, 4000) is None
    assert family.train_flops_within(None) == family.train_flops_per_token
