"""The engine of a sweep: asks rule and sampler for the next leg, and notes what came of it. Knows no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muscale.search.budget import Budget
from muscale.search.observations import KnownOf
from muscale.search.path import Path
from muscale.search.record import Arrival, Record
from muscale.search.rules import GoOn, Rule, Start
from muscale.search.samplers import Sampler


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What one Tune trial trains: a trial of the sweep, from the rung where it is to another."""

    trial: int
    path: Path
    first: int
    until: int


class Engine:
    """Hands out legs until nothing is left to do: those left open first, then what the rule says."""

    def __init__(
        self,
        record: Record,
        rule: Rule,
        sampler: Sampler,
        budget: Budget,
        *,
        top: int,
        on_arrival: Callable[[Arrival], None],
    ) -> None:
        self.record, self.budget = record, budget
        self.stopping = False  # once set, no leg is begun
        self._rule, self._sampler, self._top = rule, sampler, top
        self._on_arrival = on_arrival
        self._flying: set[int] = set()
        self._failed: set[int] = set()  # not flown again by this process

    @property
    def is_idle(self) -> bool:
        """Whether no leg is at work."""
        return not self._flying

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to search."""
        return not self.record.open and self._move() is None

    def next(self) -> Leg | None:
        """The next leg, or None if there is none to begin now."""
        if self.stopping:
            return None
        record = self.record
        for trial in record.open:
            if trial not in self._flying and trial not in self._failed:
                return self._leg(trial)
        match self._move():
            case Start(until=until):
                number = len(record.configs)
                config = self._sampler.propose(number, KnownOf(record, self._top))
                record.start(config, until)
                return self._leg(number)
            case GoOn() as move:
                record.go_on(move.trial, move.until, move.path, move.donor)
                return self._leg(move.trial)
        return None

    def arrived(self, arrival: Arrival) -> None:
        """Note a result."""
        if (arrival.trial, arrival.rung) not in self.record.arrivals:
            self.record.arrive(arrival)
            self._on_arrival(arrival)

    def landed(self, trial: int, *, failed: bool) -> None:
        """Note that a leg has ended; one that failed stays open, for the next time that the sweep is run."""
        self._flying.discard(trial)
        if failed:
            self._failed.add(trial)

    def _move(self) -> Start | GoOn | None:
        """What the rule wants, if the budget allows it."""
        record, budget = self.record, self.budget
        move = self._rule.next(record, may_start=budget.allows_trial(record))
        if move is None:
            return None
        rung = record.last_rung(move.trial) if isinstance(move, GoOn) else -1
        return move if budget.allows(record, rung, move.until) else None

    def _leg(self, trial: int) -> Leg:
        self._flying.add(trial)
        record = self.record
        return Leg(trial=trial, path=record.paths[trial], first=record.last_rung(trial) + 1, until=record.open[trial])
