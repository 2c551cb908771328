"""Goodput: the share of wall time spent on steps that counted, after restarts, repeated steps and waits.

The metrics have the time of steps, evaluations and waits for a checkpoint; a restart drops the rows after its checkpoint and
records their time with the attempts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muscale import json_lines
from muscale.layout import METRICS
from muscale.serialization import Recorded

ATTEMPTS = "attempts.jsonl"  # file in a run's directory: start, first tokens and end of each attempt


@dataclass(frozen=True, kw_only=True)
class Goodput(Recorded):
    """Seconds of wall time, from the first attempt's start to the run's end.

    Attributes:
        wall: Total.
        steps: Time of steps that counted.
        evaluation: Time of evaluations during the run.
        blocked: Time waiting for a checkpoint's copy, or for the previous write.
        repeated: Time of steps that were trained again, as far as recorded.
    """

    DERIVED = ("share", "rest")

    wall: float
    steps: float
    evaluation: float
    blocked: float
    repeated: float

    @property
    def share(self) -> float:
        """Share of wall time spent on steps that counted."""
        return self.steps / self.wall if self.wall else 0.0

    @property
    def rest(self) -> float:
        """Seconds of starting, waiting for workers, and steps lost without a record."""
        return max(0.0, self.wall - self.steps - self.evaluation - self.blocked - self.repeated)

    def __str__(self) -> str:
        parts = {
            "evaluation": self.evaluation,
            "checkpoints": self.blocked,
            "steps trained again": self.repeated,
            "starts and waits": self.rest,
        }
        shares = ", ".join(f"{name} {seconds / self.wall:.1%}" for name, seconds in parts.items()) if self.wall else ""
        return f"goodput {self.share:.1%} of {self.wall:,.0f} s ({shares})"


def record_attempt(directory: Path, event: str, **values: Any) -> None:
    """Record the start or end of an attempt."""
    json_lines.append(directory / ATTEMPTS, {"event": event, "at": time.time(), **values})


def seconds_of(rows: list[dict[str, Any]]) -> float:
    """Seconds in rows of the metrics."""
    return float(
        sum(row.get(name, 0.0) for row in rows for name in ("step_seconds", "evaluation_seconds", "blocked_seconds"))
    )


def measure(directory: Path, *, blocked_at_end: float = 0.0) -> Goodput:
    """The goodput of a run that has just ended."""
    rows, attempts = json_lines.read(directory / METRICS), json_lines.read(directory / ATTEMPTS)

    def total(name: str, records: list[dict[str, Any]]) -> float:
        return float(sum(record.get(name, 0.0) for record in records))

    parts = {
        "steps": total("step_seconds", rows),
        "evaluation": total("evaluation_seconds", rows),
        "blocked": total("blocked_seconds", rows) + blocked_at_end,
        "repeated": total("repeated_seconds", attempts),
    }
    passed = time.time() - min((record["at"] for record in attempts), default=time.time())
    return Goodput(wall=max(passed, sum(parts.values())), **parts)  # the sum is used if a clock was set back
