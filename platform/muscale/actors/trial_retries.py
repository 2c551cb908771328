"""Retries of proxy trainings that lose their process or raise an error; `full_runs.records.retries` has those of full runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

MOST_LOST = 3
"""Processes lost without progress at which a training fails; what it had finished is in the ledger (assumed)."""
MOST_FAILED = 2
"""Errors without progress at which it fails: the second tells a fault of its configuration from one of the moment (assumed)."""


class Attempts:
    """Counts the attempts of each training since its last progress.

    Attributes:
        failures: Reasons for trainings that have used all their attempts.
    """

    def __init__(self) -> None:
        self.failures: dict[Hashable, str] = {}
        self._lost, self._failed = Counter[Hashable](), Counter[Hashable]()

    def succeeded(self, what: Hashable) -> None:
        """Forget the attempts of a training that has made progress."""
        self._lost.pop(what, None)
        self._failed.pop(what, None)

    def lost(self, what: Hashable, label: str, why: str) -> bool:
        """Count a lost process; returns whether the training is tried again, and logs it under its label."""
        return self._again(self._lost, MOST_LOST, "its worker was lost", what, label, why)

    def failed(self, what: Hashable, label: str, why: str) -> bool:
        """Count an error; returns whether the training is tried again, and logs it under its label."""
        return self._again(self._failed, MOST_FAILED, "it failed", what, label, why)

    def describe(self, kind: str, label: Callable[[Any], str]) -> str:
        """Number of trainings that failed, by their kind, with the label and the reason of the first; "" if none."""
        if not self.failures:
            return ""
        n, (what, why) = len(self.failures), next(iter(self.failures.items()))
        return f"{n} {kind}{'s' if n > 1 else ''} failed; {label(what)}: {why}"

    def _again(self, counts: Counter[Hashable], most: int, how: str, what: Hashable, label: str, why: str) -> bool:
        counts[what] += 1
        if counts[what] == most:
            self.succeeded(what)  # in a population, a trial that failed may continue as a copy of another
            self.failures[what] = f"{how} {most} times: {why}"
            return False
        logging.getLogger(__name__).warning(
            "%s: %s (%d of %d): %s; it continues from its last recorded state", label, how, counts[what], most, why
        )
        return True
