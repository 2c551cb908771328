from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxy_models.batches import TokenStream, evaluation_sequences, permute

CONTEXT = 8


def numbered(n_tokens: int) -> NDArray[np.uint8]:
    """Tokens that tell their position, up to 65536 of them, in two alternating digits."""
    positions = np.arange(n_tokens)
    return np.where(positions % 2, positions // 2 // 256, positions // 2 % 256).astype(np.uint8)


def stream(n_tokens: int = 8 * 50 + 3, seed: int = 0) -> TokenStream:
    return TokenStream(tokens=numbered(n_tokens), context_length=CONTEXT, seed=seed)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, key).tolist()) == list(range(size))


def test_permute_depends_on_its_key_and_looks_shuffled() -> None:
    numbers = np.arange(2000, dtype=np.uint64)
    orders = [permute(numbers, 2000, key).astype(float) for key in range(6)]
    correlations = np.corrcoef([numbers.astype(float), *orders])
    assert np.abs(correlations - np.eye(7)).max() < 5 / np.sqrt(2000)


@given(n_tokens=st.integers(CONTEXT + 1, 600), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_covers_each_sequence_once(n_tokens: int, seed: int, epoch: int) -> None:
    source = stream(n_tokens, seed)
    size = source.sequences_per_epoch
    sequences = source.batch(epoch * size * CONTEXT, size * CONTEXT)
    tokens = source.tokens
    windows = np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)
    starts = [int((windows == row).all(axis=1).argmax()) for row in sequences.numpy()]
    assert all((tokens[s : s + CONTEXT + 1] == row).all() for s, row in zip(starts, sequences.numpy(), strict=True))
    # Neighbours share one token: the last target of one is the first input of the next.
    assert set(np.diff(sorted(starts)).tolist()) <= {CONTEXT}


def test_epochs_and_seeds_differ_in_order_and_cut() -> None:
    source = stream(8 * 500)
    epoch = source.sequences_per_epoch * CONTEXT
    first, second = source.batch(0, epoch), source.batch(epoch, epoch)
    other = stream(8 * 500, seed=1).batch(0, epoch)
    for another in (second, other):
        assert not torch.equal(first, another)
        assert not torch.equal(first.sort(dim=0).values, another.sort(dim=0).values)


@given(batch=st.integers(1, 60), position=st.integers(0, 200))
def test_a_sequence_is_found_by_its_position_whatever_the_batch(batch: int, position: int) -> None:
    source = stream()
    one_by_one = torch.cat([source.batch((position + n) * CONTEXT, CONTEXT) for n in range(batch)])
    assert torch.equal(source.batch(position * CONTEXT, batch * CONTEXT), one_by_one)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_the_shares_of_all_ranks_are_the_whole_batch(world_size: int) -> None:
    source, seen, batch = stream(), 40 * CONTEXT, 12 * CONTEXT  # crosses the end of the first epoch
    assert seen < source.sequences_per_epoch * CONTEXT < seen + batch
    shares = [source.batch(seen, batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(share) for share in shares} == {12 // world_size}
    assert torch.equal(torch.cat(shares), source.batch(seen, batch))


def test_batches_are_what_the_loss_takes() -> None:
    batch = stream().batch(0, 4 * CONTEXT)
    assert batch.dtype == torch.int64
    assert batch.shape == (4, CONTEXT + 1)


def test_a_corpus_shorter_than_one_sequence_is_refused() -> None:
    assert stream(CONTEXT + 1).sequences_per_epoch == 1
    with pytest.raises(ValueError, match=r"the corpus has 8 training tokens, .* context_length \+ 1 = 9"):
        stream(CONTEXT)


def test_evaluation_sequences_are_apart_and_spread_over_the_split() -> None:
    tokens = numbered(100 * CONTEXT + 1)
    sequences = evaluation_sequences(tokens, CONTEXT, 10 * CONTEXT)
    starts = [10 * n * CONTEXT for n in range(10)]
    assert torch.equal(sequences, torch.from_numpy(np.stack([tokens[s : s + CONTEXT + 1] for s in starts])).long())
    everything = evaluation_sequences(tokens, CONTEXT, 100 * CONTEXT)
    assert torch.equal(everything[:, :-1].flatten(), torch.from_numpy(tokens[:-1]).long())


def test_an_evaluation_longer_than_the_split_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 11 sequences of 8, the validation split of 88 tokens has 10"):
        evaluation_sequences(numbered(88), CONTEXT, 88)
