"""Schedulers: early stopping as functions of the record.

A scheduler depends only on the record, so the same record gives the same move in any process. Trials wait at a rung without
holding a worker, and a trial that never advances counts as stopped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from muscale.search.protocols import Advance, Start
from muscale.search.record import Record


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
    """Asynchronous successive halving (Li et al., arXiv 1810.05934, algorithm 2): it advances trials and stops none.

    A trial advances from a rung once it is among the best 1/eta of the trials that arrived there. Trials that can advance come
    before new trials, the highest rung first. At the end, when no trial is left to start, the best of a rung advances even
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


def _next_of(record: Record, rung: int, n: int) -> int | None:
    """Return the best waiting trial among the first n of a rung, or None; a cancelled trial keeps its place, and never advances."""
    for _, trial in record.waiting(rung)[:1]:
        if record.place(trial, rung) < n:
            return trial
    return None
