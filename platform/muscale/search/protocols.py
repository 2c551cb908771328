"""Protocols of searchers and schedulers, and the values that they exchange with the engine.

Both are functions of the record: they hold no state between calls, so an interrupted sweep continues from its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from search_spaces import Config, Space

if TYPE_CHECKING:
    from muscale.search.record import Record
    from muscale.search.sweep_jobs import ConfigHistory


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A configuration and its expected loss at the end, in nats per token; None if it diverged."""

    config: Config
    loss: float | None


class Known(Protocol):
    """The record as a searcher reads it."""

    @property
    def space(self) -> Space:
        """The space that is searched; after a narrowing, the narrower one."""
        ...

    @property
    def observations(self) -> Sequence[Observation]:
        """Configurations with their losses, oldest first; a trial that was stopped early has the loss expected at the end."""
        ...

    @property
    def pending(self) -> Sequence[Config]:
        """Configurations of running trials without a loss yet."""
        ...


class Searcher(Protocol):
    """Suggests configurations."""

    def propose(self, number: int, known: Known) -> Config:
        """Return the configuration of trial `number`, counted from 0 over the whole sweep; it must lie in `known.space`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start a new trial and train it up to a rung."""

    until: int


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Train a trial that waits at a rung up to a higher rung.

    Attributes:
        until: The rung where it ends.
        path: In a population, the trial's configurations: the donor's up to this rung, then a new one.
        donor: In a population, the trial whose state it continues from.
    """

    trial: int
    until: int
    path: ConfigHistory | None = None
    donor: int | None = None


class Scheduler(Protocol):
    """Early stopping or a population: chooses the next trial to train, and how far. A trial that it never continues is stopped."""

    def next(self, record: Record, *, may_start: bool) -> Start | Advance | None:
        """Return the next move, or None if nothing can be done before another result arrives, or at all.

        Args:
            record: Suggestions, results and decisions so far, to be read only.
            may_start: Whether the budget allows a new trial; if not, a `Start` is refused.
        """
        ...
