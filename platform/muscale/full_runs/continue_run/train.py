"""Training of a continuation on the cluster, and held-out losses before and after, on its corpus and on earlier corpora."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from muscale import json_lines
from muscale.full_runs.continue_run.continuation import NOT_FORECAST, Continuation, format_lineage
from muscale.full_runs.continue_run.parent import LineageSegment, parent_hash
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.launch import launch
from muscale.full_runs.records.goodput import Goodput
from muscale.layout import METRICS
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import Incident

Launcher = Callable[[FullRun], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Held-out losses at one time, nats per token.

    Attributes:
        own: Loss on the continuation's corpus.
        sources: Loss on each source of a mixture.
        earlier: Loss on earlier corpora, by the label of the last run trained on each.
    """

    own: float
    sources: dict[str, float]
    earlier: dict[str, float]

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        """The losses in a row of the metrics."""
        return cls(own=row["val_loss"], sources=row["source_losses"], earlier=row.get("earlier_losses", {}))


@dataclass(frozen=True, kw_only=True)
class Continued(Recorded):
    """A finished continuation.

    Attributes:
        lineage: Segments from the promoted run to this continuation.
        before, after: Losses at its start and end.
        started_at, finished_at: Times in UTC.
        world_size: Workers at the end.
        seconds: Wall time of the training.
        goodput: Goodput, as of a promoted run.
        incidents: Spikes, divergences and restarts, and what was done about each.
    """

    DERIVED = ("n_tokens", "tokens_before")

    key: str
    name: str
    lineage: tuple[LineageSegment, ...]
    before: Losses
    after: Losses
    started_at: str
    finished_at: str
    world_size: int
    seconds: float
    goodput: Goodput
    incidents: tuple[Incident, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens that the continuation trained."""
        return self.lineage[-1].tokens

    @property
    def tokens_before(self) -> int:
        """Tokens of the earlier runs."""
        return sum(past.tokens for past in self.lineage[:-1])

    @property
    def changes(self) -> list[tuple[str, float, float]]:
        """Held-out text, loss before and loss after."""
        before, after = self.before, self.after
        return [
            ("its own corpus", before.own, after.own),
            *((name, before.sources[name], loss) for name, loss in after.sources.items()),
            *((label, before.earlier[label], loss) for label, loss in after.earlier.items()),
        ]

    def __str__(self) -> str:
        lines = [
            f"continuation {self.name} {self.key}: {self.n_tokens:,} tokens after {self.tokens_before:,}, "
            f"on {self.world_size} workers",
            *format_lineage(self.lineage),
            "  held-out loss, nats per token, before and after:",
            *(
                f"    {before:.4f} → {after:.4f} ({after / before - 1:+.2%})  {name}"
                for name, before, after in self.changes
            ),
            f"  {NOT_FORECAST}",
            f"  {self.goodput}",
            *(f"  {incident}" for incident in self.incidents),
        ]
        return "\n".join(lines)


def train_continuation(
    continuation: Continuation, config: StudyConfig, ledger: Ledger, *, launcher: Launcher | None = None
) -> Continued:
    """Train a continuation to its end, from its last checkpoint if there is one; return the result, also if it had finished before.

    Args:
        ledger: Ledger of the study; records start and result.
        launcher: Trains a run to its end; default: on the cluster.

    Raises:
        StageError: If the run diverged, failed for good or more often than `promote.max_failures`, or the parent's checkpoint has
            changed since it started.
        PreemptedError: If this process was preempted; the workers have saved.
    """
    if known := ledger.result(ResultKind.CONTINUATION, continuation.key):
        return Continued.from_dict(known)
    started = ledger.result(ResultKind.CONTINUATION_STARTED, continuation.key)
    if started is None:
        started = {**continuation.facts(), "manifest_hash": parent_hash(continuation.parent), "at": now()}
        ledger.record_result(ResultKind.CONTINUATION_STARTED, continuation.key, started)
    run = continuation.full_run(config, started["manifest_hash"])
    continuation.folder.mkdir(parents=True, exist_ok=True)
    on_cluster = launcher or (lambda run: launch(run, config.promote, config.resources, name=continuation.key))
    outcome = on_cluster(run)
    evaluated = [row for row in json_lines.read(continuation.folder / METRICS) if "val_loss" in row]
    done = Continued(
        key=continuation.key,
        name=continuation.name,
        lineage=continuation.lineage,
        before=Losses.of_row(evaluated[0]),
        after=Losses.of_row(evaluated[-1]),
        started_at=started["at"],
        finished_at=now(),
        world_size=int(outcome["environment"]["world_size"]),
        seconds=float(outcome["seconds"]),
        goodput=Goodput.from_dict(outcome["goodput"]),
        incidents=tuple(Incident.from_dict(incident) for incident in outcome["incidents"]),
    )
    ledger.record_result(ResultKind.CONTINUATION, continuation.key, done.to_dict())
    return done
