"""Promotion: trains the planned run on the cluster and compares it with its registered forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from muscale.actors.jobs import Job
from muscale.errors import StageError
from muscale.formatting import counted
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.launch import launch
from muscale.full_runs.records.events import Event, run_events
from muscale.full_runs.records.goodput import Goodput
from muscale.layout import CORPUS, FULL_RUNS, INITIAL_WEIGHTS
from muscale.plans.gate import Gate, forced_lines
from muscale.plans.plan import Plan
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.store.cancels import cancellable
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind, runs, segments
from muscale.store.lineage import Chain
from muscale.store.spike_handling import Incident, SpikeHandling
from muscale.store.statements import find
from proxy_models.architecture.member import NATS
from proxy_models.evaluation.measure import Measure
from proxy_models.training.numerics import Numerics

FULL_RUN_LABEL = "plan "  # prefix of the full run's label in the ledger's runs, before the plan's key


@dataclass(frozen=True, kw_only=True)
class Promotion(Recorded):
    """A finished full run and its forecast; losses in `loss_unit`.

    Attributes:
        plan: Key of the plan.
        loss: Validation loss at the end.
        source_losses: Loss by source of a mixture; empty with one source.
        forecast, low, high, level: The registered forecast.
        registered_at, started_at, finished_at: Times in UTC, in this order.
        verdict: Verdict of the transfer check at the start.
        forced: Whether the gate was closed and overridden.
        world_size: Workers at the end.
        seconds: Wall time of the training.
        asserted: Whether the run was trained elsewhere, and its loss is reported by the user, not verified; workers are 0 then.
        gate: `Gate` as plain values at the first launch; None for an asserted run.
        forced_lines: Gate lines that had failed when a launch was forced.
        goodput: Share of all wall time spent on steps that counted; None for an asserted run.
        incidents: Spikes, divergences and restarts of its workers, and what was done about each.
        run_events: Incidents and alarms in order of time; shown here, but recorded elsewhere.
    """

    DERIVED = ("residual", "relative_error", "inside")

    plan: str
    loss: float
    source_losses: dict[str, float]
    forecast: float
    low: float
    high: float
    level: float
    registered_at: str
    started_at: str
    finished_at: str
    verdict: str
    forced: bool
    world_size: int
    seconds: float
    asserted: bool = False
    gate: dict[str, Any] | None = None
    forced_lines: tuple[str, ...] = ()
    loss_unit: str = NATS
    goodput: Goodput | None = None
    incidents: tuple[Incident, ...] = ()
    run_events: tuple[Event, ...] = ()

    @property
    def residual(self) -> float:
        """Measured loss minus forecast."""
        return self.loss - self.forecast

    @property
    def relative_error(self) -> float:
        """Residual over the measured loss."""
        return self.residual / self.loss

    @property
    def inside(self) -> bool:
        """Whether the measured loss is in the interval."""
        return self.low <= self.loss <= self.high

    def __str__(self) -> str:
        where = "elsewhere, as reported by the user" if self.asserted else f"on {counted(self.world_size, 'worker')}"
        place = "inside" if self.inside else "OUTSIDE"
        lines = [
            f"promotion: forecast {self.forecast:.4f} {self.loss_unit}, {self.level:.0%} interval "
            f"[{self.low:.4f}, {self.high:.4f}], registered {self.registered_at}",
            f"  measured {self.loss:.4f} {where}: {place} the interval, error {self.relative_error:+.2%} of the measured loss",
        ]
        if self.source_losses:
            lines.append("  " + ", ".join(f"{name} {loss:.4f}" for name, loss in self.source_losses.items()))
        if self.goodput:
            lines.append(f"  {self.goodput}")
        lines += [f"  {event}" for event in self.run_events or self.incidents]
        if self.forced:
            despite = f" despite {', '.join(self.forced_lines)}" if self.forced_lines else ""
            lines.append(f"  forced{despite}, with a transfer verdict of {self.verdict!r}")
        return "\n".join(lines)


def begin(
    plan: Plan, config: StudyConfig, ledger: Ledger, *, verdict: str, gate: Gate
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Record the start of the run, once and after its forecast.

    Returns:
        The registered forecast, and the record of the first start.

    Raises:
        StageError: If there is no earlier forecast, or the layout of [promote] does not fit the model.
    """
    registered = ledger.forecast(plan.key)
    if registered is None:
        raise StageError(f"promote: no forecast is registered for plan {plan.key}; run `muscale plan` first")
    if layout_errors := list(config.promote.parallelism.layout_errors(plan.model)):
        raise StageError(f"promote: {'; '.join(layout_errors)}")
    _require_planned_spike_handling(plan, config)
    started = ledger.result(ResultKind.PROMOTION_STARTED, plan.key)
    if started is None:
        started = {
            "at": _after(registered["registered_at"]),
            "verdict": verdict,
            "forced": not gate.passed,
            "gate": gate.to_dict(),
        }
        ledger.record_result(ResultKind.PROMOTION_STARTED, plan.key, started)
    if datetime.fromisoformat(registered["registered_at"]) >= datetime.fromisoformat(started["at"]):
        raise StageError(
            f"promote: plan {plan.key} was started {started['at']}, not after its forecast of {registered['registered_at']}"
        )
    return registered, started


def _after(registered_at: str) -> str:
    """The current time, but at least later than the recorded time: the clock may have been set back."""
    earliest = datetime.fromisoformat(registered_at) + timedelta(microseconds=1)
    return max(now(), earliest.isoformat(timespec="microseconds"))


def promote(
    plan: Plan,
    config: StudyConfig,
    ledger: Ledger,
    numerics: Numerics,
    *,
    verdict: str,
    gate: Gate,
    measures: Sequence[Measure] = (),
) -> Promotion:
    """Train the plan to its end, from its last checkpoint if there is one, and record the outcome with the gate.

    Args:
        measures: For asynchronous evaluation, in addition to the loss.

    Raises:
        StageError: As `begin`; also if the run diverged, failed for good or more often than `promote.max_failures`.
        PreemptedError: If this process was preempted; the workers have saved.
    """
    registered, started = begin(plan, config, ledger, verdict=verdict, gate=gate)
    directory = ledger.directory / FULL_RUNS / plan.key
    directory.mkdir(parents=True, exist_ok=True)
    run = full_run_of(plan, config, numerics, directory, ledger.directory / CORPUS)
    with cancellable(ledger):
        evaluators = config.scores.workers if config.scores else 1
        outcome = launch(run, config.promote, config.resources, name=plan.key, measures=measures, evaluators=evaluators)
    past = forced_lines(ledger, plan.key)
    promotion = Promotion(
        plan=plan.key,
        loss=float(outcome["loss"]),
        source_losses=outcome["source_losses"],
        **{name: registered[name] for name in ("low", "high", "level", "registered_at")},
        forecast=registered["loss"],
        started_at=started["at"],
        finished_at=now(),
        verdict=started["verdict"],
        forced=started["forced"] or bool(past),
        gate=started["gate"],
        forced_lines=past,
        world_size=int(outcome["environment"]["world_size"]),
        seconds=float(outcome["seconds"]),
        goodput=Goodput.from_dict(outcome["goodput"]),
        incidents=tuple(Incident.from_dict(incident) for incident in outcome["incidents"]),
    )
    _record_run(plan, ledger, trained_chain(plan, config, numerics, promotion), outcome)
    ledger.record_result(ResultKind.PROMOTION, plan.key, promotion.to_dict())
    return replace(promotion, run_events=run_events(ledger, plan.key))


def recorded_promotion(ledger: Ledger, plan: str, *, asserted: bool = False) -> Promotion | None:
    """The recorded outcome of a plan's run, with its events; None before the run's end.

    `asserted` selects the outcome of a run trained elsewhere.
    """
    values = ledger.result(ResultKind.EXTERNAL_RUN if asserted else ResultKind.PROMOTION, plan)
    if values is None:
        return None
    return replace(Promotion.from_dict(values), run_events=run_events(ledger, plan, asserted=asserted))


def promotion_of_same_run(plan: Plan, config: StudyConfig, ledger: Ledger, numerics: Numerics) -> Promotion | None:
    """The promotion of another plan that trained this plan's run to its end; None if there is none.

    A later fit makes another plan of the same run. Its loss is known by then, so the run is neither trained again nor forecast.
    """
    for run in ledger.read(find, "runs", {"purpose": "full"}):
        found = recorded_promotion(ledger, run["label"].removeprefix(FULL_RUN_LABEL))
        if found is None or found.plan == plan.key:
            continue
        if trained_chain(plan, config, numerics, found).key == run["key"]:
            return found
    return None


def trained_chain(plan: Plan, config: StudyConfig, numerics: Numerics, promotion: Promotion) -> Chain:
    """The chain of a plan's run with the interventions of a promotion, which no plan knows."""
    chain = plan.chain(replace(numerics, guard=config.promote.guard))
    return replace(chain, spike_handling=SpikeHandling.of(config.promote.spike_policy, promotion.incidents))


def _require_planned_spike_handling(plan: Plan, config: StudyConfig) -> None:
    """Refuse spike settings that differ from the plan's."""
    ours = config.promote.spike_handling
    for name in dict.fromkeys([*plan.spike_handling, *ours]):
        if plan.spike_handling.get(name) != ours.get(name):
            raise StageError(
                f"promote: promote.{name} must be the plan's, {plan.spike_handling.get(name)!r}, got {ours.get(name)!r}: it "
                "changes what is computed; `muscale plan` makes a new plan with it"
            )


def _record_run(plan: Plan, ledger: Ledger, chain: Chain, outcome: dict[str, Any]) -> None:
    """Record the full run in the ledger's runs, with its actual spike handling."""
    ledger.insert(
        segments,
        **chain.row(),
        trained_from=0,
        loss=outcome["loss"],
        source_losses=outcome["source_losses"],
        seconds=outcome["seconds"],
        environment=outcome["environment"],
    )
    job = Job(purpose="full", label=f"{FULL_RUN_LABEL}{plan.key}", hyperparameters=plan.hyperparameters, chain=chain)
    if recorded := ledger.outcome(chain):
        ledger.insert(runs, **job.row(recorded.key))


def full_run_of(plan: Plan, config: StudyConfig, numerics: Numerics, directory: Path, corpus: Path) -> FullRun:
    """The full run of a plan, in `directory`, on the corpus in a folder of the study's directory."""
    chain = plan.chain(replace(numerics, guard=config.promote.guard))
    return FullRun.of(
        config,
        numerics=chain.numerics,
        segments=chain.segments,
        directory=directory,
        corpus=corpus,
        initial_weights=corpus.parent / INITIAL_WEIGHTS,
    )
