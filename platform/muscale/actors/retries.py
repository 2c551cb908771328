"""Retries of trainings whose workers are lost, in sweeps, grids and ladders; those of full runs: `full_runs.records.retries`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable

MOST_LOST = 3
"""Workers that a training may lose before it comes further; what it had finished is in the ledger (assumed)."""


class LostWorkers:
    """Counts the workers that each training has lost since it last came further."""

    def __init__(self) -> None:
        self._lost: Counter[Hashable] = Counter()

    def came_further(self, what: Hashable) -> None:
        """Forget the workers that a training has lost."""
        self._lost.pop(what, None)

    def lost(self, what: Hashable, label: str, why: str) -> str:
        """Count a lost worker and warn of it; returns why the training is given up, "" while it is started again.

        Args:
            label: Its name, for the warning.
        """
        self._lost[what] += 1
        if (count := self._lost[what]) == MOST_LOST:
            return f"its worker was lost {MOST_LOST} times: {why}"
        logging.getLogger(__name__).warning(
            "%s: its worker was lost (%d of %d): %s; it continues from what it had recorded",
            label,
            count,
            MOST_LOST,
            why,
        )
        return ""
