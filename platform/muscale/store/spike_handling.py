"""Incidents of a full run, kept forever: batches left out, returns to a checkpoint, restarts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from muscale import json_lines
from muscale.settings.promote import SpikePolicy
from proxy_models.serialization import Serializable

INCIDENTS = "incidents.jsonl"  # file in a run's directory

Action = Literal["skip", "rollback", "restart"]


@dataclass(frozen=True, kw_only=True)
class Incident(Serializable):
    """One event of a run.

    Attributes:
        step: The step that was not taken, or the first step after a restart.
        left_out: Positions [from, to) in tokens at which no step is taken.
        back_to: Tokens of the checkpoint to which training returned; None if it did not return.
        at: Time in UTC.
    """

    step: int
    reason: str
    action: Action
    left_out: tuple[int, int] | None = None
    back_to: int | None = None
    at: str

    def __str__(self) -> str:
        went = f", back to {self.back_to:,} tokens" if self.back_to is not None else ""
        return f"step {self.step}: {self.action}{went}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class SpikeHandling:
    """The handling of a run's spikes: with the guard's settings and the segments, it determines the results.

    The policy alone does not determine which checkpoint a run returned to, since that depends on where its checkpoints were; and a
    run that left batches out differs from a run that saw them. So both enter the key of the run in the ledger.

    Attributes:
        interventions: Interventions in order; without restarts, which change no results.
    """

    policy: SpikePolicy
    interventions: tuple[Incident, ...] = ()

    @classmethod
    def of(cls, policy: SpikePolicy | None, incidents: Iterable[Incident]) -> Self | None:
        """The spike handling of a finished run; None if the run had no policy."""
        done = tuple(incident for incident in incidents if incident.action != "restart")
        return cls(policy=policy, interventions=done) if policy else None

    def within(self, start: int, end: int) -> dict[str, Any]:
        """Plain values: the policy, and the interventions that take effect in [start, end) tokens."""
        done = [
            {"action": one.action, "left_out": one.left_out and list(one.left_out), "back_to": one.back_to}
            for one in self.interventions
            if start <= min(place for place in (one.back_to, *(one.left_out or ())) if place is not None) < end
        ]
        return {**self.policy.identity, "interventions": done}


def read_incidents(directory: Path) -> list[Incident]:
    """The incidents of a run, oldest first."""
    return [Incident.from_dict(record) for record in json_lines.read(directory / INCIDENTS)]


def record_incident(directory: Path, incident: Incident) -> None:
    """Append an incident to the run's record."""
    json_lines.append(directory / INCIDENTS, incident.to_dict())


def utc_now() -> str:
    """The current time in an incident's format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
