"""What befell a full run and what was done about it: batches left out, returns to a checkpoint, restarts; a line each, kept for ever.

Leaving a batch out is leaving a position out: the tokens are counted, the schedule goes on, no step is taken. Positions are read
from the record, so a run that is resumed, or returns to a checkpoint, leaves out the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from muscale import json_lines
from proxy_models.batch_ramp import BatchRamp
from proxy_models.schedule import warmup_factor

INCIDENTS = "incidents.jsonl"  # in a run's directory

Action = Literal["skip", "rollback", "restart"]


@dataclass(frozen=True, kw_only=True)
class SpikePolicy:
    """What is done about a step whose loss or gradient norm the guard finds out of the ordinary, or which is not finite.

    Attributes:
        action: "skip" leaves the batch out; "rollback" returns to the last checkpoint, and leaves it out on the way, as was
            done for PaLM by hand (Chowdhery et al., arXiv 2204.02311, section 5.1).
        max_interventions: In the whole run; one more spike ends it as diverged.
        margin_tokens: Left out before and after the batch, too; "rollback" only, rounded up to whole batches.
        rewarm_tokens: Of a linear warmup of the rate from the checkpoint that was returned to; 0: none.
    """

    action: Literal["skip", "rollback"]
    max_interventions: int = 3
    margin_tokens: int = 0
    rewarm_tokens: int = 0

    def __post_init__(self) -> None:
        if self.action not in ("skip", "rollback"):
            raise ValueError(f'action must be "skip" or "rollback", got {self.action!r}')
        for name in ("max_interventions", "margin_tokens", "rewarm_tokens"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One thing that befell a run.

    Attributes:
        step: The step that was not taken, or the first one after a restart.
        reason: In words.
        action: What was done.
        left_out: Positions [from, to) in tokens at which no step is taken.
        back_to: Tokens of the checkpoint that training goes on from; None where it just goes on.
        at: UTC.
    """

    step: int
    reason: str
    action: Action
    left_out: tuple[int, int] | None = None
    back_to: int | None = None
    at: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `asdict` gave, from JSON."""
        left_out = values.get("left_out")
        return cls(**{**values, "left_out": tuple(left_out) if left_out else None})

    def __str__(self) -> str:
        went = f", back to {self.back_to:,} tokens" if self.back_to is not None else ""
        return f"step {self.step}: {self.action}{went}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Mending:
    """What a policy about spikes made of a run: with the guard's settings, what determines its numbers beside its segments.

    The policy alone does not tell where a run went back to, as that is where its checkpoints happened to lie; and a run that left
    batches out is another training than one that saw them. So both are part of the key that the ledger knows the run by.

    Attributes:
        policy: Of the run.
        interventions: What was done, in order; no restarts, which change no number.
    """

    policy: SpikePolicy
    interventions: tuple[Incident, ...] = ()

    @classmethod
    def of(cls, policy: SpikePolicy | None, incidents: Iterable[Incident]) -> Self | None:
        """Of a run that ended; None where it had no policy."""
        done = tuple(incident for incident in incidents if incident.action != "restart")
        return cls(policy=policy, interventions=done) if policy else None

    def within(self, start: int, end: int) -> dict[str, Any]:
        """Plain values: the policy, and what was done whose effect begins in [start, end) tokens."""
        done = [
            {"action": one.action, "left_out": one.left_out and list(one.left_out), "back_to": one.back_to}
            for one in self.interventions
            if start <= min(place for place in (one.back_to, *(one.left_out or ())) if place is not None) < end
        ]
        return {**asdict(self.policy), "interventions": done}


class Interventions:
    """The incidents of one run, its policy, and what they mean for the steps to come; all ranks hold the same."""

    def __init__(self, policy: SpikePolicy | None, ramp: BatchRamp, incidents: list[Incident]) -> None:
        self.policy, self.incidents = policy, incidents
        self._ramp = ramp

    @property
    def is_spent(self) -> bool:
        """Whether one more spike ends the run."""
        if self.policy is None:
            return True
        taken = sum(incident.action != "restart" for incident in self.incidents)
        return taken >= self.policy.max_interventions

    def position(self, tokens: int) -> int:
        """The first position at or after `tokens` that is not left out."""
        while later := [end for start, end in self._left_out() if start <= tokens < end]:
            tokens = max(later)
        return tokens

    def _left_out(self) -> Iterator[tuple[int, int]]:
        return (incident.left_out for incident in self.incidents if incident.left_out)

    def rewarmth(self, tokens: int, batch_tokens: int) -> float:
        """Factor on the rate of the step that starts after `tokens` tokens, for the returns to a checkpoint before it."""
        rewarm = self.policy.rewarm_tokens if self.policy else 0
        returns = [one.back_to for one in self.incidents if one.action == "rollback" and one.back_to is not None]
        return min(
            (warmup_factor(tokens - start, batch_tokens, rewarm) for start in returns if start <= tokens), default=1.0
        )

    def around(self, tokens: int, *, margin: int = 0) -> tuple[int, int]:
        """Positions [from, to) of the batch after `tokens` tokens, and of those less than `margin` tokens away, by whole batches."""
        start = end = 0
        for before, batch in self._ramp.steps(0, tokens + margin + self._ramp.batch_tokens):
            if before <= tokens - margin:
                start = before
            end = before + batch
            if before >= tokens and end >= tokens + self._ramp.batch_at(tokens) + margin:
                break
        return start, end


def read_incidents(directory: Path) -> list[Incident]:
    """Those of a run, the oldest first."""
    return [Incident.from_dict(record) for record in json_lines.read(directory / INCIDENTS)]


def record_incident(directory: Path, incident: Incident) -> None:
    """Add one to those of a run."""
    json_lines.append(directory / INCIDENTS, asdict(incident))


def utc_now() -> str:
    """The time as incidents note it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
