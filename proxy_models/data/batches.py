"""Batches: the sequences of a step depend only on (corpus, seed, tokens seen so far, share).

The training tokens are cut into sequences, and an epoch visits each sequence once in an order that is computed, not stored: a
keyed permutation of the sequence numbers. Any step's batch, or any rank's share of a batch, is therefore found directly, at any
position in a corpus of any length, and a resumed, resharded or replayed run sees the same tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxy_models.data.corpus import ONE_SOURCE, Corpus
from proxy_models.data.mixture import Interleaving, Mixture
from proxy_models.data.record_packing import Packing
from proxy_models.data.tokenizer import Tokens
from proxy_models.data.uncounted import n_counted

_ROUNDS = 4  # rounds of the Feistel network; four suffice (Luby and Rackoff, SIAM J. Comput. 17, 1988)
_BLOCK = 1024  # sequences located at once; step by step this would take as long as the update of a small model


def permute(numbers: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    """Map each of `numbers` (all below `size`) through a permutation of range(size) that `key` chooses.

    The permutation is a Feistel network over the next even number of bits; a value that falls outside is mapped again until
    it is inside (Black and Rogaway, CT-RSA 2002).
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    values = numbers.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, key, turn) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(size)
    return values


def _mix(values: NDArray[np.uint64], key: int, turn: int) -> NDArray[np.uint64]:
    """Return a well-mixed 64-bit value of (values, key, turn) by splitmix64's finalizer (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64((key + (turn + 1) * 0x9E3779B97F4A7C15) % 2**64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


@dataclass(frozen=True, kw_only=True)
class SequencePlace:
    """SequencePlace of a sequence in a corpus.

    Attributes:
        source: Name of the source.
        epoch: Pass over the source, from 1.
        start: First token in the source's training split.
    """

    source: str
    epoch: int
    start: int


class Stream(Protocol):
    """Training batches by position."""

    def batch(self, tokens_seen: int, batch_tokens: int, *, rank: int = 0, world_size: int = 1) -> Tensor:
        """Return the sequences of the step that starts after `tokens_seen` tokens: int64 (sequences, context_length + 1).

        A token that does not count in the loss is the complement of its id (`uncounted`).

        Args:
            tokens_seen: Position in the run, a multiple of the context length.
            batch_tokens: Tokens of the step over all shares; a multiple of the context length.
            rank: Number of the share to return, of `world_size` consecutive shares; they are equal, or the first shares have
                one more sequence.
            world_size: Number of shares, no more than sequences.

        Raises:
            ValueError: If a number is not such a multiple, or there is no such share.
        """

    def places(self, tokens_seen: int, batch_tokens: int) -> list[SequencePlace]:
        """Return the places in the corpus of the sequences of a step, as `batch` returns them for a single share."""

    def starts_before(self, tokens_seen: int) -> dict[str, NDArray[np.int64]]:
        """Return the first token of every sequence before a position of a run, by source, in the order of the run."""

    def stage_begins(self, tokens_seen: int, batch_tokens: int) -> bool:
        """Return whether the proportions of the sources change in a step that starts after `tokens_seen` tokens."""

    def epoch_starts(self, tokens_seen: int, end: int) -> list[tuple[str, int, int]]:
        """Return (source, number of the epoch, tokens) for each epoch after the first that begins between two positions of a run."""


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Training batches of one source.

    Attributes:
        tokens: The training split, one dimension, possibly memory-mapped.
        context_length: Tokens that a sequence predicts; a sequence holds one more.
        seed: Seed of the order.
        packing: Sequences of whole records, if the source has prompts; None: sequences of equal distance.
    """

    tokens: Tokens
    context_length: int
    seed: int
    packing: Packing | None = None
    _kept: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.sequences_per_epoch < 1:
            raise ValueError(
                f"the corpus has {len(self.tokens)} training tokens, less than one sequence of "
                f"context_length + 1 = {self.context_length + 1}"
            )

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences in one pass; one sequence is held back, so that each epoch can cut the corpus at another offset.

        Packed sequences are the same in every epoch.
        """
        if self.packing:
            return len(self.packing.starts)
        sequences = (len(self.tokens) - 1) // self.context_length
        return sequences - 1 if sequences > 1 else sequences

    def batch(self, tokens_seen: int, batch_tokens: int, *, rank: int = 0, world_size: int = 1) -> Tensor:
        """Return the sequences of a step, as `Stream.batch` states."""
        numbers = _share(self.context_length, tokens_seen, batch_tokens, rank, world_size)
        return torch.from_numpy(self._sequences(numbers.astype(np.uint64)))

    def places(self, tokens_seen: int, batch_tokens: int) -> list[SequencePlace]:
        """Return the places of a step's sequences, as `Stream.places` states."""
        return self._places(ONE_SOURCE, _share(self.context_length, tokens_seen, batch_tokens, 0, 1))

    def _places(self, source: str, numbers: NDArray[np.int64]) -> list[SequencePlace]:
        starts, size = self._starts_of(numbers.astype(np.uint64)).tolist(), self.sequences_per_epoch
        return [
            SequencePlace(source=source, epoch=1 + number // size, start=start)
            for number, start in zip(numbers.tolist(), starts, strict=True)
        ]

    def starts_before(self, tokens_seen: int) -> dict[str, NDArray[np.int64]]:
        """Return the starts of sequences, as `Stream.starts_before` states."""
        return {ONE_SOURCE: self._starts(np.arange(tokens_seen // self.context_length, dtype=np.uint64))}

    def stage_begins(self, tokens_seen: int, batch_tokens: int) -> bool:
        """Return False: there is one source."""
        return False

    def epoch_starts(self, tokens_seen: int, end: int) -> list[tuple[str, int, int]]:
        """Return the starts of epochs, as `Stream.epoch_starts` states."""
        epoch_tokens = self.sequences_per_epoch * self.context_length
        first = max(1, -(-tokens_seen // epoch_tokens))
        return [(ONE_SOURCE, 1 + n, n * epoch_tokens) for n in range(first, -(-end // epoch_tokens))]

    def _sequences(self, numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
        starts = self._starts_of(numbers)
        if self.packing:
            return self.packing.sequences(self.tokens, starts, self.context_length)
        sequences: NDArray[np.int64] = self.tokens[starts[:, None] + np.arange(self.context_length + 1)].astype(
            np.int64
        )
        return sequences

    def _starts_of(self, numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
        starts = np.empty(len(numbers), dtype=np.int64)
        blocks, within = np.divmod(numbers.astype(np.int64), _BLOCK)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            starts[chosen] = self._starts_of_block(block)[within[chosen]]
        return starts

    def _starts_of_block(self, block: int) -> NDArray[np.int64]:
        """Return the starts of a block's sequences; the last two blocks are cached, since a step may span their border."""
        if block not in self._kept:
            for old in list(self._kept)[:-1]:
                del self._kept[old]
            self._kept[block] = self._starts(np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64))
        return self._kept[block]

    def _starts(self, numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
        size = self.sequences_per_epoch
        epochs, within = numbers // np.uint64(size), numbers % np.uint64(size)
        starts = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = _key("epoch", self.seed, int(epoch))
            if self.packing:
                starts[chosen] = self.packing.starts[permute(within[chosen], size, key).astype(np.int64)]
                continue
            slack = len(self.tokens) - 1 - size * self.context_length
            offset = key % (min(slack, self.context_length - 1) + 1)
            starts[chosen] = permute(within[chosen], size, key).astype(np.int64) * self.context_length + offset
        return starts


@dataclass(frozen=True, kw_only=True)
class MixtureStream:
    """Training batches of several sources, each read in the order of its `TokenStream`.

    Attributes:
        tokens: The training split of each source.
        mixture: Proportions of the sources, with every end in tokens.
        context_length: Tokens that a sequence predicts; a sequence holds one more.
        seed: Seed of the order.
        packings: Sequences of the sources that have prompts.
    """

    tokens: Mapping[str, Tokens]
    mixture: Mixture
    context_length: int
    seed: int
    packings: Mapping[str, Packing | None] = field(default_factory=dict)

    @cached_property
    def streams(self) -> tuple[TokenStream, ...]:
        """A stream for each of `mixture.names`; the seeds differ, so that sources of equal length have different orders."""
        return tuple(
            TokenStream(
                tokens=self.tokens[name],
                context_length=self.context_length,
                seed=_key("source", self.seed, name),
                packing=self.packings.get(name),
            )
            for name in self.mixture.names
        )

    @cached_property
    def interleaving(self) -> Interleaving:
        return self.mixture.interleave(self.context_length, self.seed)

    def batch(self, tokens_seen: int, batch_tokens: int, *, rank: int = 0, world_size: int = 1) -> Tensor:
        """Return the sequences of a step, as `Stream.batch` states."""
        numbers = _share(self.context_length, tokens_seen, batch_tokens, rank, world_size)
        sources, within = self.interleaving.locate(numbers)
        sequences = np.empty((len(numbers), self.context_length + 1), dtype=np.int64)
        for source in np.unique(sources):
            chosen = sources == source
            sequences[chosen] = self.streams[source]._sequences(within[chosen].astype(np.uint64))
        return torch.from_numpy(sequences)

    def places(self, tokens_seen: int, batch_tokens: int) -> list[SequencePlace]:
        """Return the places of a step's sequences, as `Stream.places` states."""
        sources, within = self.interleaving.locate(_share(self.context_length, tokens_seen, batch_tokens, 0, 1))
        return [
            self.streams[source]._places(self.mixture.names[source], np.array([number]))[0]
            for source, number in zip(sources.tolist(), within.tolist(), strict=True)
        ]

    def starts_before(self, tokens_seen: int) -> dict[str, NDArray[np.int64]]:
        """Return the starts of sequences, as `Stream.starts_before` states; a source that no stage reads is missing."""
        counts = self.interleaving.n_before(tokens_seen // self.context_length).tolist()
        return {
            name: stream._starts(np.arange(count, dtype=np.uint64))
            for name, stream, count in zip(self.mixture.names, self.streams, counts, strict=False)
        }

    def stage_begins(self, tokens_seen: int, batch_tokens: int) -> bool:
        """Return whether a stage begins, as `Stream.stage_begins` states."""
        return any(tokens_seen <= start < tokens_seen + batch_tokens for start in self._changes)

    @cached_property
    def _changes(self) -> list[int]:
        """Tokens after which a stage with other proportions begins."""
        each = pairwise(self.mixture.shares_by_stage)
        starts = (self.interleaving.starts[1:] * self.context_length).tolist()
        return [start for start, (before, after) in zip(starts, each, strict=True) if before != after]

    def epoch_starts(self, tokens_seen: int, end: int) -> list[tuple[str, int, int]]:
        """Return the starts of epochs, as `Stream.epoch_starts` states."""
        sequences = range(tokens_seen // self.context_length, end // self.context_length)
        before, after = (self.interleaving.n_before(number) for number in (sequences.start, sequences.stop))
        found = []
        for source, (stream, first, last) in enumerate(zip(self.streams, before, after, strict=False)):
            size = stream.sequences_per_epoch
            for epoch in range(max(1, -(-int(first) // size)), -(-int(last) // size)):
                found.append(
                    (
                        self.mixture.names[source],
                        1 + epoch,
                        self._at(source, epoch * size, sequences) * self.context_length,
                    )
                )
        return sorted(found, key=lambda start: start[2])

    def _at(self, source: int, number: int, sequences: range) -> int:
        """Return the sequence of the run that is this one of the source's sequences, counted from 0."""
        n_until = self.interleaving.n_before
        return sequences[bisect_left(sequences, number + 1, key=lambda n: int(n_until(n + 1)[source]))]


def _share(context_length: int, tokens_seen: int, batch_tokens: int, rank: int, world_size: int) -> NDArray[np.int64]:
    """Return the numbers, within the run, of a share's sequences."""
    if tokens_seen < 0 or tokens_seen % context_length:
        raise ValueError(f"tokens_seen must be a multiple of context_length = {context_length}, got {tokens_seen}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, world_size = {world_size}), got {rank}")
    if batch_tokens < 1 or batch_tokens % context_length:
        raise ValueError(f"batch_tokens must be a multiple of context_length = {context_length}, got {batch_tokens}")
    sequences = batch_tokens // context_length
    if sequences < world_size:
        raise ValueError(f"a batch of {sequences} sequences has no share for each of {world_size} ranks")
    share, more = divmod(sequences, world_size)
    first = tokens_seen // context_length + rank * share + min(rank, more)
    share += rank < more
    return np.arange(first, first + share, dtype=np.int64)


def training_stream(corpus: Corpus, context_length: int, seed: int, *, run_tokens: int | None = None) -> Stream:
    """Return the training batches of a corpus with one source or a mixture.

    Args:
        context_length: Tokens that a sequence predicts.
        seed: Seed of the order.
        run_tokens: Tokens of the run; needed if a stage ends at a fraction of the run.

    Raises:
        ValueError: If a source is shorter than one sequence, or the run's length is needed and not given.
    """
    mixture = corpus.mixture_of(run_tokens)
    if mixture is None:
        packing = corpus.packing(ONE_SOURCE, "train", context_length)
        return TokenStream(tokens=corpus.train, context_length=context_length, seed=seed, packing=packing)
    stream = MixtureStream(
        tokens={name: files.train for name, files in corpus.sources.items()},
        mixture=mixture,
        context_length=context_length,
        seed=seed,
        packings={name: corpus.packing(name, "train", context_length) for name in corpus.sources},
    )
    _ = stream.streams, stream.interleaving  # raises errors here instead of in the first step
    return stream


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Held-out sequences of one source.

    Attributes:
        sequences: int64 (sequences, context_length + 1), as `Stream.batch` returns them.
        weight: Weight of this source's loss in the corpus's loss; the weights of a corpus sum to 1.
        all_count: Whether every token counts.
    """

    sequences: Tensor
    weight: float
    all_count: bool = True

    @property
    def size(self) -> int:
        """Number of sequences; if some tokens do not count, number of predicted tokens that do."""
        return len(self.sequences) if self.all_count else int(n_counted(self.sequences))

    @property
    def scale(self) -> Tensor | None:
        """Weight of a token that counts, by which `Loss` gives the mean over these sequences; None if every token counts."""
        if self.all_count:
            return None
        targets = self.sequences[:, 1:]
        return torch.tensor(targets.numel() / max(1, self.size), device=targets.device)

    def to(self, device: torch.device) -> EvaluationSet:
        """Return the set with its sequences on a device."""
        return replace(self, sequences=self.sequences.to(device))


def corpus_loss(sets: Mapping[str, EvaluationSet], source_losses: Mapping[str, float]) -> float:
    """Return the corpus's validation loss: the sum of weight · loss over its sources."""
    return sum(held_out.weight * source_losses[name] for name, held_out in sets.items())


def evaluation_sets(corpus: Corpus, context_length: int, n_tokens: int) -> dict[str, EvaluationSet]:
    """Return fixed held-out sequences of each source, equally many of each, by the source's name.

    A single source has weight 1 and all `n_tokens`. Each source of a mixture has an equal part of them, weighted by its share in
    the last stage, which the finished model is for. `corpus.held_out`, if set, provides the sequences.

    Raises:
        ValueError: If a source's validation split is shorter than requested, or none of the tokens counts.
    """
    corpus = corpus.held_out or corpus
    n_each = n_tokens // len(corpus.sources)
    sets = {}
    for name, weight in corpus.evaluation_weights.items():
        files, packing = corpus.sources[name], corpus.packing(name, "validation", context_length)
        try:
            sequences = evaluation_sequences(files.validation, context_length, n_each, packing)
            sets[name] = EvaluationSet(sequences=sequences, weight=weight, all_count=files.all_count)
            if not sets[name].size:
                raise ValueError(
                    f"none of the {n_each} tokens of the evaluation counts in the loss; evaluate more tokens"
                )
        except ValueError as error:
            raise ValueError(f"source {name}: {error}" if corpus.mixture else str(error)) from error
    return sets


def evaluation_sequences(tokens: Tokens, context_length: int, n_tokens: int, packing: Packing | None = None) -> Tensor:
    """Return fixed validation sequences, evenly spread over the split: int64 (n_tokens / context_length, context_length + 1).

    Args:
        packing: Sequences of whole records, as for `TokenStream`.

    Raises:
        ValueError: If the split is shorter than requested.
    """
    count = max(1, n_tokens // context_length)
    available = len(packing.starts) if packing else (len(tokens) - 1) // context_length
    if count > available:
        raise ValueError(
            f"an evaluation of {n_tokens} tokens needs {count} sequences of {context_length}, "
            f"the validation split of {len(tokens)} tokens has {available}"
        )
    numbers = np.arange(count, dtype=np.int64) * available // count
    if packing:
        return torch.from_numpy(packing.sequences(tokens, packing.starts[numbers], context_length))
    starts = numbers * context_length
    return torch.from_numpy(tokens[starts[:, None] + np.arange(context_length + 1)].astype(np.int64))
