"""Protocols between Ray Tune and its source of jobs: a sweep's search, or the runs of a stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from muscale.store.evaluations import Evaluated
    from muscale.store.lineage import Chain
    from muscale.store.outcome import Outcome


class Trains(Protocol):
    """The calls of a job on its worker."""

    def reach(self, chain: Chain, *, goes_on: bool = False) -> Outcome:
        """Train a chain to its end, as far as the ledger does not know it; keep its weights if work on them goes on."""
        ...

    def evaluate(self, point: Evaluated) -> Outcome:
        """Reach a point, and take its measures that the ledger lacks."""
        ...


Steps: TypeAlias = "Callable[[Mapping[str, Any], Trains], Iterator[dict[str, Any]]]"
"""Trains one job, given the config of its Tune trial; yields a report after each step, with the loss as `LOSS`."""

LOSS = "loss"
WORST_LOSS = 1e9  # reported for a divergence: Tune refuses NaN, and nothing ranks by it


def report(loss: float | None, **values: Any) -> dict[str, Any]:
    """Return a step's report, with the loss for Tune."""
    return {LOSS: WORST_LOSS if loss is None else loss, "diverged": loss is None, **values}


class Next(StrEnum):
    """State of a Tune trial after a step: it continues, waits to be continued later, or has ended."""

    CONTINUE = "continue"
    WAIT = "wait"
    END = "end"


class TuneJob(Protocol):
    """One piece of work for a Tune trial."""

    @property
    def suggestion(self) -> Hashable | None:
        """Identity of the suggestion that this job continues; all its jobs form one Tune trial. None for a separate job."""
        ...

    def tune_config(self) -> dict[str, Any]:
        """Config of its Tune trial: plain values."""
        ...


class Work(Protocol):
    """Jobs and their outcomes.

    Attributes:
        stage: Name for messages.
        interrupted: Once set, no further job starts.
        refusal: Reason why no worker can train for it, so that no further job starts.
        failure: Job that failed at every attempt and is not recorded as failed, with the reason; "" if there is none.
    """

    interrupted: bool

    @property
    def stage(self) -> str: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def failure(self) -> str: ...

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way."""
        ...

    def next(self) -> Any:
        """The next job, a `TuneJob`; None if there is none to start now."""
        ...

    def note(self, job: Any, report: Mapping[str, Any]) -> Next:
        """Record what a step of a job reported."""
        ...

    def withdraws(self, job: Any) -> bool:
        """Whether a job that has no process yet should not begin any more; such a job has ended."""
        ...

    def lost(self, job: Any, why: str) -> None:
        """Note that the process of a job died."""
        ...

    def failed(self, job: Any, why: str) -> None:
        """Note that a job raised, for another reason than divergence."""
        ...

    def refuse(self, job: Any, why: str) -> None:
        """Note that no worker can train, as this job found."""
        ...
