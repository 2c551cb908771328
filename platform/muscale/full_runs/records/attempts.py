"""Attempts at one full run: each resumes from the last checkpoint and records how it ended; the last attempt writes the result.

The record of an attempt's start claims the run's folder: earlier attempts, such as one that hung, write nothing more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from muscale import json_lines
from muscale.errors import LeaseLostError
from muscale.full_runs.distributed import rank
from muscale.full_runs.records import goodput, retries
from muscale.layout import EVALUATIONS, FAILURE, METRICS, RESULT
from muscale.store.spike_handling import Incident, read_incidents, record_incident, utc_now
from proxy_models.files import write_text


def finished(directory: Path) -> dict[str, Any] | None:
    """The result of a finished run; None if unfinished."""
    result = directory / RESULT
    return dict(json.loads(result.read_text())) if result.exists() else None


@dataclass(frozen=True)
class Attempt:
    """An attempt at the run of a directory, identified by a random key that all its ranks share."""

    directory: Path
    key: str

    @classmethod
    def new(cls, directory: Path) -> Self:
        """Make an attempt that has not begun."""
        return cls(directory, secrets.token_hex(8))

    def begin(
        self, *, tokens: int, step: int, environment: Mapping[str, Any] | None = None
    ) -> tuple[float, list[Incident]]:
        """Claim the folder after `tokens` tokens; return the seconds of earlier steps and the incidents so far.

        Args:
            environment: Machine, versions and world size, for the record.
        """
        if known := json_lines.read(self.directory / goodput.ATTEMPTS):
            restart = Incident(step=step, reason=_why_ended(known), action="restart", back_to=tokens, at=utc_now())
            record_incident(self.directory, restart)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        facts = {"tokens": tokens, "world_size": world_size, "environment": dict(environment or {})}
        goodput.record_attempt(self.directory, "start", attempt=self.key, **facts)
        return go_back(self.directory, tokens), read_incidents(self.directory)

    @property
    def is_last(self) -> bool:
        """Whether no other attempt has begun since."""
        records = json_lines.read(self.directory / goodput.ATTEMPTS)
        return [record.get("attempt") for record in records if record["event"] == "start"][-1:] == [self.key]

    def require_last(self) -> None:
        """Check the claim before a write to the folder; raise LeaseLostError if another attempt has begun since."""
        if not self.is_last:
            raise LeaseLostError(f"{self.directory}: another attempt at this run has started; this one stops writing")

    @contextmanager
    def recorded(self, step: Callable[[], int]) -> Iterator[None]:
        """Record any exception in the block with its step, on every rank that is alive."""
        try:
            yield
        except BaseException as error:
            if self.is_last:  # otherwise it would count as the end of the later attempt
                goodput.record_attempt(self.directory, "stop", rank=rank(), step=step(), **retries.describe(error))
            raise

    def conclude(self, *, blocked: float, **facts: Any) -> dict[str, Any]:
        """Write last losses, `facts`, goodput and incidents of a finished run; raise LeaseLostError if another attempt has begun."""
        self.require_last()
        last = json_lines.read(self.directory / METRICS)[-1]  # written before the last checkpoint
        result = {
            "loss": last["val_loss"],
            "source_losses": last["source_losses"],
            "seconds": last["seconds"],
            **facts,
            "goodput": goodput.measure(self.directory, blocked_at_end=blocked).to_dict(),
            "incidents": [incident.to_dict() for incident in read_incidents(self.directory)],
        }
        write_text(self.directory / RESULT, json.dumps(result))
        return result


def keep_failure(directory: Path, error: Exception) -> None:
    """Write the error for which a run failed for good to its directory, where `muscale watch` reads it."""
    write_text(directory / FAILURE, str(error))


def _why_ended(known: list[dict[str, Any]]) -> str:
    """Why the last attempt ended: the error of the failed rank; its peers only report a lost connection."""
    began = max((number for number, record in enumerate(known) if record["event"] == "start"), default=0)
    stops = [record for record in known[began:] if record["event"] == "stop"]
    first = next((record for record in stops if record["kind"] != "lost"), stops[0] if stops else None)
    # The start of a long message is enough; the attempt's record has all of it.
    return str(first["error"]).splitlines()[0][:160] if first else "killed, or the machine was lost"


def go_back(directory: Path, tokens: int) -> float:
    """Drop the records after `tokens` tokens and record the time of those steps; return the seconds up to `tokens`."""
    metrics = directory / METRICS
    rows = json_lines.read(metrics)
    kept = [row for row in rows if row["tokens"] <= tokens]
    if metrics.exists():
        json_lines.keep(metrics, kept)  # also removes an incomplete last line
    evaluations = json_lines.read(directory / EVALUATIONS)
    if any(row["tokens"] > tokens for row in evaluations):  # rare, since evaluations use intact checkpoints
        json_lines.keep(directory / EVALUATIONS, [row for row in evaluations if row["tokens"] <= tokens])
    if seconds := goodput.seconds_of([row for row in rows if row["tokens"] > tokens]):
        goodput.record_attempt(directory, "back", tokens=tokens, repeated_seconds=seconds)
    return float(kept[-1]["seconds"]) if kept else 0.0
