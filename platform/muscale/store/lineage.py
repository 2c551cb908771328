"""Keys: a training is identified by all that determines it.

A run is a chain of segments. A segment's key hashes its parent's key, the segment's training and its end, so that two chains with
an equal beginning share the keys of that beginning. The hash without the end is the line: all lengths of one training, so that a
longer training can continue from a shorter one's state. The line does not depend on the positions of rungs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from muscale.store.spike_handling import SpikeHandling
from proxy_models.hashing import content_key
from proxy_models.recipes.schedule import Constant
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A training from its initial values to the end of its last segment.

    Attributes:
        spike_handling: Interventions in a full run's steps; None without a policy about spikes, as for proxies.
    """

    numerics: Numerics
    segments: tuple[Segment, ...]
    spike_handling: SpikeHandling | None = None

    def __post_init__(self) -> None:
        ends = [0, *(segment.end for segment in self.segments)]
        if not self.segments or any(s.start != end for s, end in zip(self.segments, ends, strict=False)):
            raise ValueError(f"a chain starts at 0 and has no gaps, got {[(s.start, s.end) for s in self.segments]}")
        self.numerics.require_known_length()

    @property
    def last(self) -> Segment:
        """The last segment of the chain."""
        return self.segments[-1]

    @property
    def parent(self) -> Chain | None:
        """The chain before the last segment."""
        return replace(self, segments=self.segments[:-1]) if len(self.segments) > 1 else None

    def until(self, tokens: int) -> Chain:
        """The beginning of the chain, up to so many tokens; a segment that ends later is cut."""
        kept = [segment for segment in self.segments if segment.start < tokens]
        return replace(self, segments=(*kept[:-1], replace(kept[-1], end=min(kept[-1].end, tokens))))

    def _last_to_dict(self) -> dict[str, Any]:
        own = self.last.to_dict()
        return (
            own | {"spike_handling": self.spike_handling.within(self.last.start, self.last.end)}
            if self.spike_handling
            else own
        )

    @cached_property
    def line(self) -> str:
        """Hash of everything except the end."""
        before = self.parent.key if self.parent else self.numerics.key
        return content_key([before, {**self._last_to_dict(), "end": None}])

    @cached_property
    def key(self) -> str:
        """Hash of the chain, including its end."""
        return content_key([self.line, self.last.end])

    @property
    def stem(self) -> str:
        """Line of the first segment: chains that share it share weights, so their losses are not independent."""
        return replace(self, segments=self.segments[:1]).line

    @property
    def anneals(self) -> bool:
        """Whether the chain ends a run: its rate has decayed, and its loss may enter a law."""
        return not isinstance(self.last.phase, Constant) and getattr(self.last.phase, "end", None) == self.last.end

    def row(self) -> dict[str, Any]:
        """The chain's columns in the ledger."""
        return {
            "key": self.key,
            "line": self.line,
            "parent": self.parent.key if self.parent else None,
            "numerics": self.numerics.to_dict(),
            "segment": self._last_to_dict(),
            "tokens": self.last.end,
        }

    @property
    def compute_flops(self) -> float:
        """6·N·D of all segments."""
        return 6.0 * self.numerics.model.n_params * self.last.end


def input_key(*inputs: Any) -> str:
    """Hash of a stage's inputs, which are plain values."""
    return content_key(list(inputs))


def stems(chains: Sequence[Chain]) -> dict[str, list[Chain]]:
    """Chains by stem, shorter chains first: each continues where the previous chain stopped."""
    grouped: dict[str, list[Chain]] = {}
    for chain in sorted(chains, key=lambda chain: chain.last.end):
        grouped.setdefault(chain.stem, []).append(chain)
    return grouped
