"""What the trials of a sweep tell a sampler: each the loss that it would have ended at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from muscale.search.record import Record
from search_spaces import Config


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A configuration and the loss that it would end at, None if it diverged."""

    config: Config
    loss: float | None


class Known(Protocol):
    """What a sampler may look at."""

    @property
    def observations(self) -> Sequence[Observation]:
        """Configurations whose loss is known, oldest first."""
        ...

    @property
    def pending(self) -> Sequence[Config]:
        """Configurations that are at work."""
        ...


class KnownOf:
    """What a record tells, worked out when it is asked for: a grid never asks."""

    def __init__(self, record: Record, top: int) -> None:
        self._record, self._top = record, top

    @cached_property
    def pending(self) -> list[Config]:
        """Configurations of the trials that have arrived nowhere."""
        record = self._record
        return [
            config
            for trial, config in record.configs.items()
            if record.last_rung(trial) < 0 and trial not in record.cancelled
        ]

    @cached_property
    def observations(self) -> list[Observation]:
        """Every trial that arrived somewhere, oldest first; one that waits at a lower rung with its loss corrected to the last.

        The correction is the median change of log loss from rung to rung of the trials that went on, so losses of different
        horizons are not mixed. Of the ways tried it has the least error (.048 of log loss, where a rung's loss as it is has .28);
        to tell nothing of stopped trials is the worst for what is suggested next (tests/benchmarks/rungs.py).
        """
        record, steps = self._record, self._steps()
        seen = []
        for trial in record.configs:
            if (rung := record.last_rung(trial)) >= 0:
                loss = record.loss(trial, rung)
                corrected = None if math.isinf(loss) else loss * math.exp(sum(steps[rung:]))
                seen.append(Observation(config=record.config_at(trial, rung), loss=corrected))
        return seen

    def _steps(self) -> list[float]:
        """Median change of log loss from each rung to the next; none where nobody has made the step."""
        return [self._step(rung) for rung in range(self._top)]

    def _step(self, rung: int) -> float:
        record = self._record
        changes = [
            math.log(after / record.loss(trial, rung))
            for after, trial in record.ranking(rung + 1)
            if math.isfinite(after) and (trial, rung) in record.arrivals and math.isfinite(record.loss(trial, rung))
        ]
        return statistics.median(changes) if changes else 0.0
