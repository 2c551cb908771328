"""Schedulers: early stopping as functions of the record.

A scheduler depends only on the record, so the same record gives the same move in any process. Trials wait at a rung without
holding a worker, and a trial that never advances counts as stopped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from muscale.search.protocols import Advance, Start
from muscale.search.record import Record

MIN_PEERS = 3
"""Trials that the median rule needs at a rung before it stops a trial there (assumed; Tune's default)."""


@dataclass(frozen=True, kw_only=True)
class PreferenceScheduler:
    """A scheduler that offers further moves if the preferred one does not fit the budget."""

    top: int

    def next(self, record: Record, *, may_start: bool) -> Start | Advance | None:
        """Return the preferred move, or None if nothing can be done before another result arrives, or at all."""
        return next(self.moves(record, may_start=may_start), None)

    @abstractmethod
    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield all moves that can be made now, the preferred one first."""
        ...

    def last_moves(self, record: Record) -> Iterator[Advance]:
        """Yield continuations of the best trial of each rung, highest rung first, once no trial is running.

        They serve to bring one trial to the last rung, so there are none once a trial has a loss there.
        """
        ended = (math.isfinite(loss) and trial not in record.cancelled for loss, trial in record.ranking(self.top))
        if record.open or any(ended):
            return
        for rung in reversed(range(self.top)):
            for _, trial in record.waiting(rung)[:1]:
                yield Advance(trial=trial, until=rung + 1)


@dataclass(frozen=True, kw_only=True)
class ToTheEnd(PreferenceScheduler):
    """No early stopping."""

    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield a new trial, to the last rung."""
        if may_start:
            yield Start(until=self.top)


@dataclass(frozen=True, kw_only=True)
class Asha(PreferenceScheduler):
    """Asynchronous successive halving (Li et al., arXiv 1810.05934, algorithm 2): it advances trials, and stops none.

    A trial advances from a rung once it is among the best 1/eta of the trials that arrived there. Trials that can advance come
    before new trials, the highest rung first. At the end, when nothing is left to begin, the best of a rung advances even
    if fewer than eta trials arrived, so that at least one trial reaches the last rung.

    Attributes:
        eta: Of the trials at a rung, one in eta advances.
    """

    eta: float

    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield trials that advance to the next rung, then a new one."""
        for rung in reversed(range(self.top)):
            ranking = record.ranking(rung)
            if (trial := _next_of(record, rung, int(len(ranking) / self.eta))) is not None:
                yield Advance(trial=trial, until=rung + 1)
        if may_start:
            yield Start(until=0)
        else:
            yield from self.last_moves(record)


@dataclass(frozen=True, kw_only=True)
class MedianStopping(PreferenceScheduler):
    """The median rule (Golovin et al., KDD 2017, section 3.2.2).

    A trial advances while its best loss so far is no worse than the median of the other trials' mean losses up to its rung.
    """

    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield trials that may continue, then a new one."""
        for rung in reversed(range(self.top)):
            if (trial := self._passing(record, rung)) is not None:
                yield Advance(trial=trial, until=rung + 1)
        if may_start:
            yield Start(until=0)
        else:
            yield from self.last_moves(record)

    def _passing(self, record: Record, rung: int) -> int | None:
        """The trial with the least loss of those that wait at a rung and may continue."""
        if not (waiting := record.waiting(rung)):
            return None
        means = record.means(rung)
        if len(means) <= MIN_PEERS:
            return waiting[0][1]
        highest = _median_without(means, means[0])  # the highest median that any trial is compared with
        passing = [
            (record.loss(trial, rung), trial)
            for best, trial in takewhile(lambda entry: entry[0] <= highest, record.waiting_by_best(rung))
            if best <= _median_without(means, record.mean(trial, rung))
        ]
        return min(passing)[1] if passing else None


@dataclass(frozen=True, kw_only=True)
class Hyperband(PreferenceScheduler):
    """Brackets of successive halving (Li et al., arXiv 1603.06560, algorithm 1), one after the other in the order of trials.

    Bracket s begins at rung top − s with ceil((top + 1)/(s + 1) · eta^s) trials; when all of them have arrived, the best
    1/eta advance to the next rung together. After the last bracket the first begins again, as long as trials are left.
    """

    eta: float

    def sizes(self) -> list[tuple[int, int]]:
        """(first rung, trials) of each bracket."""
        return [
            (self.top - s, math.ceil((self.top + 1) / (s + 1) * self.eta**s)) for s in reversed(range(self.top + 1))
        ]

    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield trials that advance within a full bracket, then a new one."""
        started = len(record.configs)
        first, sizes = 0, self.sizes()
        bracket = 0
        while first < started:
            rung, size = sizes[bracket % len(sizes)]
            full = first + size <= started
            if first not in record.settled and (full or not may_start):
                members = range(first, min(first + size, started))
                if move := self._advance(record, rung, members):
                    yield move
                elif full and not any(trial in record.open for trial in members):
                    record.settled.add(first)
            first, bracket = first + size, bracket + 1
        if not may_start:
            yield from self.last_moves(record)
            return
        rung, _ = sizes[bracket % len(sizes)] if first == started else sizes[(bracket - 1) % len(sizes)]
        yield Start(until=rung)

    def _advance(self, record: Record, rung: int, members: range) -> Advance | None:
        """Return an advance of the best at the bracket's current rung, once all its trials have arrived there."""
        field = list(members)
        for here in range(rung, self.top):
            live = [trial for trial in field if trial not in record.cancelled]
            if not all((trial, here) in record.results for trial in live if not record.diverged(trial)):
                return None
            ranked = sorted((record.loss(trial, here), trial) for trial in live if (trial, here) in record.results)
            kept = [trial for loss, trial in ranked if math.isfinite(loss)][: max(1, int(len(field) / self.eta))]
            for trial in kept:
                if (trial, here) not in record.advanced:
                    return Advance(trial=trial, until=here + 1)
            field = kept
        return None


def _next_of(record: Record, rung: int, n: int) -> int | None:
    """Return the best waiting trial among the first n of a rung, or None; cancelled trials are not counted."""
    for _, trial in record.waiting(rung)[:1]:
        if record.place(trial, rung) < n:
            return trial
    return None


def _median_without(ordered: list[float], value: float) -> float:
    """Return the median of sorted values without one of them."""
    place, n = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[k + (k >= place)] for k in ((n - 1) // 2, n // 2))
    return (low + high) / 2
