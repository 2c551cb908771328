"""Training of an amended run on the cluster: its forecast, and held-out losses before and after, on its corpus and on earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from muscale import json_lines
from muscale.errors import StageError
from muscale.formatting import counted
from muscale.full_runs.amend.amendment import Amendment, format_lineage
from muscale.full_runs.amend.control import Control, compare, control_run, train_control
from muscale.full_runs.amend.parent import LineageSegment, parent_hash
from muscale.full_runs.amend.second_forecast import SecondForecast
from muscale.full_runs.checkpoints.folder import CheckpointFolder
from muscale.full_runs.promote.launch import Launcher
from muscale.full_runs.records.goodput import Goodput
from muscale.layout import METRICS
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import Incident

NOT_ASKED = "none was made"
NOT_RECORDED = "the run started before amended runs had one"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Held-out losses at one time, nats per token.

    Attributes:
        own: Loss on the run's corpus.
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
class Amended(Recorded):
    """A finished amendment or continuation.

    Attributes:
        lineage: Segments from the promoted run to this one.
        before, after: Losses at its start and end.
        started_at, finished_at: Times in UTC; the forecast was registered at the start.
        world_size: Workers at the end.
        seconds: Wall time of the training.
        goodput: Goodput, as of a promoted run.
        incidents: Spikes, divergences and restarts, and what was done about each.
        reason: Why the parent was amended; empty for a continuation.
        changes: What was changed, by dotted key.
        forecast: The forecast of `after.own`; None: there was none.
        no_forecast: Why there was no forecast.
        control: The difference from the parent's recipe; None: no control was trained.
    """

    DERIVED = ("n_tokens", "tokens_before", "inside")

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
    reason: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    forecast: SecondForecast | None = None
    no_forecast: str = NOT_RECORDED
    control: Control | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the final loss is in the forecast's interval; None without a forecast."""
        return None if self.forecast is None else self.forecast.low <= self.after.own <= self.forecast.high

    @property
    def n_tokens(self) -> int:
        """Tokens that the run trained."""
        return self.lineage[-1].tokens

    @property
    def tokens_before(self) -> int:
        """Tokens of the earlier runs."""
        return sum(past.tokens for past in self.lineage[:-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with what the control derives; with a forecast, `no_forecast` is empty."""
        control = self.control.to_dict() if self.control else None
        return {**super().to_dict(), "no_forecast": "" if self.forecast else self.no_forecast, "control": control}

    @property
    def losses(self) -> list[tuple[str, float, float]]:
        """Held-out text, loss before and loss after."""
        before, after = self.before, self.after
        return [
            ("its own corpus", before.own, after.own),
            *((name, before.sources[name], loss) for name, loss in after.sources.items()),
            *((label, before.earlier[label], loss) for label, loss in after.earlier.items()),
        ]

    def __str__(self) -> str:
        lines = [
            f"{'amended' if self.reason else 'continued'} run {self.name} {self.key}: {self.n_tokens:,} tokens after "
            f"{self.tokens_before:,}, on {counted(self.world_size, 'worker')}",
            *([f"  because {self.reason}"] if self.reason else []),
            *(f"  {key} = {value}" for key, value in self.changes.items()),
            *format_lineage(self.lineage),
            "  held-out loss, nats per token, before and after:",
            *(
                f"    {before:.4f} → {after:.4f} ({after / before - 1:+.2%})  {name}"
                for name, before, after in self.losses
            ),
            *self._compared,
            *(f"  {line}" for line in (str(self.control).splitlines() if self.control else ())),
            f"  {self.goodput}",
            *(f"  {incident}" for incident in self.incidents),
        ]
        return "\n".join(lines)

    @property
    def _compared(self) -> list[str]:
        if self.forecast is None:
            return [f"  no forecast: {self.no_forecast}"]
        place, error = "inside" if self.inside else "OUTSIDE", 1 - self.forecast.loss / self.after.own
        return [
            *(f"  {line}" for line in str(self.forecast).splitlines()),
            f"  measured {self.after.own:.4f}: {place} the interval, error {error:+.2%} of the measured loss",
        ]


def train_amendment(
    amendment: Amendment,
    config: StudyConfig,
    ledger: Ledger,
    *,
    launcher: Launcher,
    forecast: SecondForecast | str = NOT_ASKED,
) -> Amended:
    """Train an amended run to its end, from its last checkpoint if there is one; return the result, also if it had finished before.

    Its control, if it has one, is trained first; if that diverges, its reason is part of the result.

    Args:
        ledger: Ledger of the study; records start, with the forecast, and result.
        launcher: Trains a run to its end.
        forecast: The forecast to register at the first start, or why there is none.

    Raises:
        StageError: If the run diverged, failed for good or more often than `promote.max_failures`, or the parent's checkpoint has
            changed since it started; if the run has ended without the control.
        PreemptedError: If this process was preempted; the workers have saved.
    """
    if known := ledger.result(ResultKind.AMENDMENT, amendment.key):
        done = Amended.from_dict(known)
        if amendment.control not in (None, done.control and done.control.steps):
            had = f"a control of {done.control.steps} steps" if done.control else "no control"
            raise StageError(
                f"control: run {done.key} has ended with {had}, got {amendment.control}; leave it out to see the result"
            )
        return done
    started = begin(amendment, ledger, forecast)
    run = amendment.full_run(config, started["manifest_hash"])
    amendment.folder.mkdir(parents=True, exist_ok=True)
    steps, unchanged = amendment.control, None
    if steps:
        unchanged = control_run(amendment, steps, config, started["manifest_hash"])
        train_control(unchanged, launcher)
    outcome = launcher(run)
    evaluated = [row for row in json_lines.read(amendment.folder / METRICS) if "val_loss" in row]
    registered = started.get("forecast")
    done = Amended(
        key=amendment.key,
        name=amendment.name,
        lineage=amendment.lineage,
        before=Losses.of_row(evaluated[0]),
        after=Losses.of_row(evaluated[-1]),
        started_at=started["at"],
        finished_at=now(),
        world_size=int(outcome["environment"]["world_size"]),
        seconds=float(outcome["seconds"]),
        goodput=Goodput.from_dict(outcome["goodput"]),
        incidents=tuple(Incident.from_dict(incident) for incident in outcome["incidents"]),
        reason=amendment.reason,
        changes=dict(amendment.changes),
        forecast=SecondForecast.from_dict(registered) if registered else None,
        no_forecast=started.get("no_forecast", NOT_RECORDED),
        control=compare(amendment, unchanged, steps) if steps and unchanged else None,
    )
    ledger.record_result(ResultKind.AMENDMENT, amendment.key, done.to_dict())
    _checkpoints(amendment).release(amendment.parent.tokens, amendment.key)
    return done


def _checkpoints(amendment: Amendment) -> CheckpointFolder:
    return CheckpointFolder(amendment.parent.checkpoint.parent)


def begin(amendment: Amendment, ledger: Ledger, forecast: SecondForecast | str) -> dict[str, Any]:
    """Record the start of a run with its forecast, once; return the record.

    Raises:
        StageError: If the parent's checkpoint is damaged.
    """
    if known := ledger.result(ResultKind.AMENDMENT_STARTED, amendment.key):
        return known
    registered = {"no_forecast": forecast} if isinstance(forecast, str) else {"forecast": forecast.to_dict()}
    started = {**amendment.facts(), **registered, "manifest_hash": parent_hash(amendment.parent), "at": now()}
    _checkpoints(amendment).hold(amendment.parent.tokens, amendment.key)
    ledger.record_result(ResultKind.AMENDMENT_STARTED, amendment.key, started)
    return started
