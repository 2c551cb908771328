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
from proxy_models.training.attended import attended_length, mean_attended
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
    attended = mean_attended(tokens[:, :-1], MODEL)
    assert attended == (9**2 + 21**2 + 10**2 + 40**2) / 80
    assert counter.get_total_flops() == pytest.approx(MODEL.train_flops_within(attended) * 80)
    assert MODEL.train_flops_within(40.0) == MODEL.train_flops_within(None) == MODEL.train_flops_per_token


@pytest.mark.parametrize("documents", [False, True])
def test_a_window_s_flops_are_twice_those_of_the_distances_to_the_first_attended_token(documents: bool) -> None:
    tokens = torch.randint(1, 16, (2, 40), generator=torch.Generator().manual_seed(0))
    tokens[0, [9, 30]] = SEPARATOR
    lengths = [9, 21, 10, 40] if documents else [40, 40]
    for window, every, n_local in ((1, None, 2), (7, None, 2), (12, 2, 1), (40, None, 2)):
        separator = SEPARATOR if documents else None
        model = replace(MODEL, attention_window=window, global_attention_every=every, document_separator=separator)
        pairs = 0.0  # a token attends to itself and, as without a window, half of that is masked
        for length in lengths:
            positions = range(1, length + 1)
            local = sum(min(position, window) - 0.5 * (position <= window) for position in positions)
            pairs += n_local * local + (2 - n_local) * sum(position - 0.5 for position in positions)
        expected = 6 * (model.n_matrix_entries + 16 * 32) + 12 * 32 * 2 * pairs / 80
        attended = mean_attended(tokens, model) if documents else None
        assert model.train_flops_within(attended) == pytest.approx(expected)


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
