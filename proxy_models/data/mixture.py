"""Mixtures of sources in stated proportions that may change along a run: the source of each sequence.

A stage repeats one pattern of `SLOTS` slots. The slots of each source are spread evenly, so that every part of a run has the
stated proportions up to a sequence or two. Arithmetic alone gives the source of the n-th sequence of a run, and its number
among that source's sequences: each source is read in its own order, without gaps, at any position.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import takewhile
from typing import Self

import numpy as np
from cattrs.gen import make_dict_unstructure_fn
from numpy.typing import NDArray

from proxy_models.serialization import Serializable, converter

SLOTS = 10_000  # so that proportions of four decimals are exact
MAX_EPOCHS = 4.0  # repeated data is almost as good as new up to here (Muennighoff et al., arXiv 2305.16264, section 5)


@dataclass(frozen=True, kw_only=True)
class MixtureStage(Serializable):
    """A part of a run with fixed proportions.

    Attributes:
        weights: Weight of each source, in tokens, on any common scale; 0 leaves a source out.
        until_tokens: End of the stage, in tokens of the run, rounded down to a multiple of a sequence.
        until_fraction: End of the stage as a fraction of the run, for `Mixture.resolve`. The last stage has neither end.
    """

    weights: Mapping[str, float]
    until_tokens: int | None = None
    until_fraction: float | None = None

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("weights must name at least one source, got none")
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name} must be a number of at least 0, got {weight}")
        if not sum(self.weights.values()) > 0:
            raise ValueError("the weights must not all be 0")
        if self.until_tokens is not None and self.until_fraction is not None:
            raise ValueError("until_tokens and until_fraction exclude each other")
        if self.until_tokens is not None and self.until_tokens < 1:
            raise ValueError(f"until_tokens must be at least 1, got {self.until_tokens}")
        if self.until_fraction is not None and not 0 < self.until_fraction < 1:
            raise ValueError(f"until_fraction must lie between 0 and 1, got {self.until_fraction}")
        for name, slots in self.slots.items():
            if self.weights[name] and not slots:
                raise ValueError(
                    f"the weight of {name} must be at least {1 / SLOTS:g} of the sum, "
                    f"got {self.weights[name] / sum(self.weights.values()):.3g}"
                )

    @property
    def slots(self) -> dict[str, int]:
        """Number of sequences of each source per `SLOTS` sequences, rounded by the largest remainder."""
        total = sum(map(Fraction, self.weights.values()))
        exact = {name: Fraction(weight) / total * SLOTS for name, weight in self.weights.items()}
        slots = {name: math.floor(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: slots[name] - exact[name])
        for name in by_remainder[: SLOTS - sum(slots.values())]:
            slots[name] += 1
        return slots

    @property
    def shares(self) -> dict[str, float]:
        """Share of each source in the stage's tokens after rounding to slots."""
        return {name: slots / SLOTS for name, slots in self.slots.items()}


converter.register_unstructure_hook(
    MixtureStage, make_dict_unstructure_fn(MixtureStage, converter, _cattrs_omit_if_default=True)
)


@dataclass(frozen=True, kw_only=True)
class Mixture(Serializable):
    """Data of a run: one stage, or a curriculum of several."""

    stages: tuple[MixtureStage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a mixture needs at least one stage, got none")
        names = set(self.stages[0].weights)
        for number, stage in enumerate(self.stages):
            if set(stage.weights) != names:
                raise ValueError(
                    f"every stage must weigh the same sources: stage 0 has {', '.join(sorted(names))}, "
                    f"stage {number} has {', '.join(sorted(stage.weights))}"
                )
            ends = stage.until_tokens is not None or stage.until_fraction is not None
            if ends == (number == len(self.stages) - 1):
                rule = "the last stage must have no end" if ends else "a stage before the last must have an end"
                raise ValueError(f"{rule}, until_tokens or until_fraction, got stage {number} of {len(self.stages)}")
        for ends_at in (
            [stage.until_tokens for stage in self.stages if stage.until_tokens is not None],
            [stage.until_fraction for stage in self.stages if stage.until_fraction is not None],
        ):
            if list(ends_at) != sorted(set(ends_at)):
                raise ValueError(f"stages must end one after another, got {ends_at}")

    @classmethod
    def constant(cls, weights: Mapping[str, float]) -> Self:
        """Make a mixture with constant proportions."""
        return cls(stages=(MixtureStage(weights=dict(weights)),))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.stages[0].weights))

    @property
    def is_resolved(self) -> bool:
        """True if every end is stated in tokens, so that the position alone determines the source."""
        return all(stage.until_fraction is None for stage in self.stages)

    def resolve(self, n_tokens: int) -> Self:
        """Return the mixture with every end in tokens, for a run of `n_tokens`.

        Raises:
            ValueError: If the stages' ends do not ascend within that run.
        """
        return type(self)(
            stages=tuple(
                stage
                if stage.until_fraction is None
                else MixtureStage(weights=stage.weights, until_tokens=max(1, round(stage.until_fraction * n_tokens)))
                for stage in self.stages
            )
        )

    def reweighted(self, weights: Mapping[str, float], after: int) -> Self:
        """Return the mixture that equals this one up to `after` tokens, and then has other weights to its end.

        Raises:
            ValueError: If the weights name other sources.
        """
        if set(weights) != set(self.names):
            raise ValueError(
                f"new weights must name the sources {', '.join(self.names)}, got {', '.join(sorted(weights))}"
            )
        stages = takewhile(lambda stage: stage.until_tokens is not None and stage.until_tokens < after, self.stages)
        kept = tuple(stages)
        cut = MixtureStage(weights=self.stages[len(kept)].weights, until_tokens=after)
        return type(self)(stages=(*kept, cut, MixtureStage(weights=dict(weights))))

    def with_last_stage(self, begins: int) -> Self:
        """Return the mixture whose last stage begins after so many tokens.

        Raises:
            ValueError: If there is one stage, or an earlier one ends later.
        """
        if len(self.stages) < 2:
            raise ValueError("there is only one stage")
        *kept, cut, last = self.stages
        return type(self)(stages=(*kept, replace(cut, until_tokens=begins), last))

    @property
    def shares_by_stage(self) -> list[dict[str, float]]:
        """Shares of the sources in each stage."""
        return [stage.shares for stage in self.stages]

    @property
    def last_stage_fraction(self) -> float | None:
        """Fraction of each run at which the last stage begins; None if it begins after a number of tokens."""
        return self.stages[-2].until_fraction if len(self.stages) > 1 else 0.0

    @property
    def last_stage_begins(self) -> int:
        """Tokens of the run after which the last stage begins, 0 for the only one; ends must be in tokens."""
        return (self.stages[-2].until_tokens or 0) if len(self.stages) > 1 else 0

    def last_stage_share(self, n_tokens: int) -> float:
        """Return the share of a run's tokens in the last stage; ends must be in tokens."""
        return max(0.0, 1 - self.last_stage_begins / n_tokens)

    def tokens(self, n_tokens: int) -> dict[str, float]:
        """Return the tokens of each source in a run of `n_tokens`."""
        ends = [min(stage.until_tokens or n_tokens, n_tokens) for stage in self.resolve(n_tokens).stages]
        lengths = np.diff([0, *ends]).tolist()
        return {
            name: sum(length * stage.shares[name] for length, stage in zip(lengths, self.stages, strict=True))
            for name in self.names
        }

    def interleave(self, context_length: int, seed: int) -> Interleaving:
        """Assign a source to each sequence of `context_length` tokens.

        Raises:
            ValueError: If an end is a fraction and so depends on the run's length.
        """
        if not self.is_resolved:
            raise ValueError("until_fraction needs the run's length: call resolve(n_tokens) first")
        starts = [0, *(stage.until_tokens // context_length for stage in self.stages[:-1] if stage.until_tokens)]
        return Interleaving(
            starts=np.array(starts, dtype=np.int64),
            patterns=tuple(_pattern(stage, self.names, f"{seed}/{number}") for number, stage in enumerate(self.stages)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Interleaving:
    """The source of each sequence, and its number among that source's sequences.

    Attributes:
        starts: First sequence of each stage, int64 (stages,).
        patterns: Source of each slot as an index into `Mixture.names`, int64 (SLOTS,) for each stage.
    """

    starts: NDArray[np.int64]
    patterns: tuple[NDArray[np.int64], ...]

    @cached_property
    def _before(self) -> tuple[NDArray[np.int64], ...]:
        """Number of sequences of each source before each slot, (SLOTS + 1, sources) for each stage."""
        n_sources = max(int(pattern.max()) for pattern in self.patterns) + 1
        counts = [pattern[:, None] == np.arange(n_sources) for pattern in self.patterns]
        return tuple(np.concatenate([np.zeros((1, n_sources), np.int64), np.cumsum(c, axis=0)]) for c in counts)

    @cached_property
    def _firsts(self) -> tuple[NDArray[np.int64], ...]:
        """Number of sequences of each source before each stage."""
        firsts = [np.zeros_like(self._before[0][0])]
        for length, before in zip(np.diff(self.starts), self._before, strict=False):
            firsts.append(firsts[-1] + length // SLOTS * before[-1] + before[length % SLOTS])
        return tuple(firsts)

    def n_before(self, number: int) -> NDArray[np.int64]:
        """Return the sequences of each source before a sequence of the run."""
        stage = int(np.searchsorted(self.starts, number, side="right")) - 1
        rounds, slots = divmod(number - int(self.starts[stage]), SLOTS)
        before = self._before[stage]
        counts: NDArray[np.int64] = self._firsts[stage] + rounds * before[-1] + before[slots]
        return counts

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sequence of the run and its number within the source, both in the shape of `numbers`."""
        sources, within = np.empty_like(numbers), np.empty_like(numbers)
        stages = np.searchsorted(self.starts, numbers, side="right") - 1
        for stage in np.unique(stages):
            chosen = stages == stage
            rounds, slots = np.divmod(numbers[chosen] - self.starts[stage], SLOTS)
            source = self.patterns[stage][slots]
            sources[chosen] = source
            before = self._before[stage]
            within[chosen] = self._firsts[stage][source] + rounds * before[-1][source] + before[slots, source]
        return sources, within


def _pattern(stage: MixtureStage, names: tuple[str, ...], seed: str) -> NDArray[np.int64]:
    """Place each source's slots at even distances, each source from its own offset, and return the sources in that order."""
    places, sources = [], []
    for number, name in enumerate(names):
        slots = stage.slots[name]
        digest = hashlib.sha256(f"pattern/{seed}/{name}".encode()).digest()
        offset = int.from_bytes(digest[:8], "little") / 2**64
        places.append((np.arange(slots) + offset) / max(1, slots))
        sources.append(np.full(slots, number))
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(sources)[order].astype(np.int64)
