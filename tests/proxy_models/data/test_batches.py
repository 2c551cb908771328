from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxy_models.data.batches import (
    MixtureStream,
    TokenStream,
    evaluation_sequences,
    evaluation_sets,
    permute,
    training_stream,
)
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture, MixtureStage
from proxy_models.data.sources import Source

CONTEXT = 8


def numbered(n_tokens: int) -> NDArray[np.uint8]:
    """Tokens that encode their position, up to 65536 of them, in two alternating digits."""
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


@settings(max_examples=40)
@given(n_tokens=st.integers(CONTEXT + 1, 300), seed=st.integers(0, 5), epoch=st.integers(0, 3))
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


@settings(max_examples=40)
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
    with pytest.raises(ValueError, match="needs 11.*8.*88.*10"):
        evaluation_sequences(numbered(88), CONTEXT, 88)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_seen": 5}, "tokens_seen must be a multiple of context_length = 8, got 5"),
        ({"tokens_seen": -8}, "tokens_seen must be a multiple of context_length = 8, got -8"),
        ({"batch_tokens": 20}, "batch_tokens must be a multiple of context_length = 8, got 20"),
        ({"batch_tokens": 24, "world_size": 4}, "a batch of 3 sequences has no share for each of 4 ranks"),
        ({"batch_tokens": 0}, "got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, world_size = 2\), got 2"),
        ({"rank": -1}, "got -1"),
    ],
)
def test_remainders_are_refused_and_not_dropped(arguments: dict[str, int], message: str) -> None:
    for source in (stream(), mixed(0)):
        with pytest.raises(ValueError, match=message):
            source.batch(**{"tokens_seen": 0, "batch_tokens": 32, **arguments})


# Mixtures

SOURCES = {"a": 8 * 30 + 3, "b": 8 * 200 + 1, "c": 8 * 77}


def mixed(seed: int) -> MixtureStream:
    """Tokens of a source lie in a range of its own."""
    tokens = {
        name: (numbered(n_tokens).astype(np.uint16) + 1000 * number).astype(np.uint16)
        for number, (name, n_tokens) in enumerate(SOURCES.items())
    }
    mixture = Mixture(
        stages=(
            MixtureStage(weights={"a": 0.5, "b": 0.5, "c": 0}, until_tokens=8 * 90),
            MixtureStage(weights={"a": 0.2, "b": 0.3, "c": 0.5}),
        )
    )
    return MixtureStream(tokens=tokens, mixture=mixture, context_length=CONTEXT, seed=seed)


@settings(max_examples=25)
@given(batch=st.integers(1, 40), position=st.integers(0, 10**7), seed=st.integers(0, 3))
def test_a_mixed_sequence_is_found_by_its_position_whatever_the_batch(batch: int, position: int, seed: int) -> None:
    source = mixed(seed)
    one_by_one = torch.cat([source.batch((position + n) * CONTEXT, CONTEXT) for n in range(batch)])
    assert torch.equal(source.batch(position * CONTEXT, batch * CONTEXT), one_by_one)
    assert torch.equal(mixed(seed).batch(position * CONTEXT, batch * CONTEXT), one_by_one)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_the_shares_of_a_mixed_batch_are_the_batch(world_size: int) -> None:
    source, seen, batch = mixed(0), 84 * CONTEXT, 12 * CONTEXT  # crosses the end of the first stage
    shares = [source.batch(seen, batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(shares), source.batch(seen, batch))


@settings(max_examples=25)
@given(n=st.integers(1, 900), seed=st.integers(0, 3))
def test_each_source_of_a_mixture_is_read_in_the_order_of_its_own_stream(n: int, seed: int) -> None:
    source = mixed(seed)
    sequences = source.batch(0, n * CONTEXT)
    of_source = sequences[:, 0] // 1000
    for number, alone in enumerate(source.streams):
        seen = sequences[of_source == number]
        if len(seen):
            assert torch.equal(seen, alone.batch(0, len(seen) * CONTEXT))


@pytest.mark.parametrize("n", [0, 1, 84, 900])
def test_the_starts_before_a_position_are_the_places_of_its_sequences(n: int) -> None:
    alone = TokenStream(tokens=numbered(8 * 30 + 3), context_length=CONTEXT, seed=2)
    for source in (mixed(1), alone):
        places = source.places(0, n * CONTEXT) if n else []
        starts = source.starts_before(n * CONTEXT)
        for name in {place.source for place in places} | starts.keys():
            assert starts[name].tolist() == [place.start for place in places if place.source == name]


@pytest.fixture(scope="module")
def mixed_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("mixed")
    for name, letter in (("a", "a"), ("b", "b")):
        (root / name).mkdir()
        for number in range(30):
            (root / name / f"{number}.txt").write_text(letter * 200)
    mixture = Mixture(
        stages=(
            MixtureStage(weights={"a": 1, "b": 0}, until_fraction=0.5),
            MixtureStage(weights={"a": 0.25, "b": 0.75}),
        )
    )
    sources = {name: Source(path=str(root / name)) for name in ("a", "b")}
    return write_mixture(root / "tokens", sources, mixture)


def test_the_stream_of_a_corpus_follows_its_mixture(mixed_corpus: Corpus, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="run_tokens"):
        training_stream(mixed_corpus, CONTEXT, 0)
    batch = training_stream(mixed_corpus, CONTEXT, 0, run_tokens=80 * CONTEXT).batch(0, 80 * CONTEXT)
    is_b = (batch == ord("b")).any(dim=1)
    assert not is_b[:40].any()
    assert int(is_b[40:].sum()) == pytest.approx(30, abs=2)
    alone = TokenStream(tokens=corpus.train, context_length=CONTEXT, seed=3)
    assert torch.equal(training_stream(corpus, CONTEXT, 3).batch(80, 160), alone.batch(80, 160))


def test_every_source_is_evaluated_and_weighed_as_at_the_end(mixed_corpus: Corpus, corpus: Corpus) -> None:
    sets = evaluation_sets(mixed_corpus, CONTEXT, 40 * CONTEXT)
    assert {name: (len(s.sequences), s.weight) for name, s in sets.items()} == {"a": (20, 0.25), "b": (20, 0.75)}
    for name, evaluation in sets.items():
        assert set(evaluation.sequences.flatten().tolist()) <= {0, ord(name)}
    (one,) = evaluation_sets(corpus, CONTEXT, 40 * CONTEXT).values()
    assert torch.equal(one.sequences, evaluation_sequences(corpus.validation, CONTEXT, 40 * CONTEXT))
    assert one.weight == 1
    with pytest.raises(ValueError, match="source a: an evaluation of 400000 tokens needs 50000 sequences"):
        evaluation_sets(mixed_corpus, CONTEXT, 800_000)


def test_batches_of_one_source_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """The numbers were drawn when bytes were the only tokens; results in ledgers stand on them."""
    for number in range(20):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number:02}.txt").write_text(f"text number {number}\n" * 30)
    corpus = write_corpus(tmp_path / "tokens", str(tmp_path / "text"))
    assert corpus.key == "0705423e0d5386de"
    batch = training_stream(corpus, CONTEXT, 1).batch(400 * CONTEXT, 4 * CONTEXT)
    assert [bytes(row.tolist()).decode() for row in batch] == ["xt number", "text numb", "\ntext num", "er 13\ntex"]
