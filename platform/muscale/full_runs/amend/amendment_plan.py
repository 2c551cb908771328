"""Stages that amend or continue a full run: the plan with its forecast and cost, and the training under its lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from muscale.errors import LeaseHeldError, StageError
from muscale.formatting import format_duration
from muscale.full_runs.amend.amendment import Amendment
from muscale.full_runs.amend.parent import Parent, full_run_of
from muscale.full_runs.amend.second_forecast import SecondForecast, second_forecast
from muscale.full_runs.amend.train import Amended, begin, train_amendment
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.full_runs.promote.launch import Launcher, launcher_of
from muscale.full_runs.promote.replay import NOT_REPLAYED, Replay, replay
from muscale.full_runs.records.run_records import RunRecords, seconds_per_token
from muscale.layout import FULL_RUNS
from muscale.plans.ladder_schedules import LadderSchedules
from muscale.progress import Display
from muscale.settings.config import StudyConfig
from muscale.store.lease import full_run_lease, lease
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from scaling import ScalingFit, StageLaw
from scaling.presentation import Result


@dataclass(frozen=True, kw_only=True)
class AmendmentPlan(Result):
    """A run that branches off another, before it is trained.

    Attributes:
        forecast: Its forecast, as it is or would be registered; None: there is none.
        no_forecast: Why there is none.
        seconds: Time of its training and its control at the parent's mean speed; None if that is not known.
    """

    amendment: Amendment
    forecast: SecondForecast | None
    no_forecast: str
    seconds: float | None

    @classmethod
    def of(
        cls,
        amendment: Amendment,
        fit: ScalingFit | None,
        schedules: Callable[[], LadderSchedules | str],
        stages: Callable[[], StageLaw | str],
        config: StudyConfig,
        ledger: Ledger,
    ) -> AmendmentPlan:
        """Plan an amendment under the study's laws."""
        started = ledger.result(ResultKind.AMENDMENT_STARTED, amendment.key)
        if started is None:
            level = config.plan.level
            found = second_forecast(amendment, fit, ledger, level=level, schedules=schedules, stages=stages)
        elif registered := started.get("forecast"):
            found = SecondForecast.from_dict(registered)
        else:
            found = started.get("no_forecast") or "none was registered before the run began"
        control = (amendment.control or 0) * amendment.parent.recipe.batch_tokens
        pace = seconds_per_token(RunRecords(amendment.directory / FULL_RUNS / amendment.parent.run).steps())
        return cls(
            amendment=amendment,
            forecast=None if isinstance(found, str) else found,
            no_forecast=found if isinstance(found, str) else "",
            seconds=None if pace is None else pace * (amendment.n_tokens + control),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        forecast = {"forecast": self.forecast.to_dict() if self.forecast else None, "no_forecast": self.no_forecast}
        return {**self.amendment.to_dict(), **forecast, "seconds": self.seconds}

    def __str__(self) -> str:
        cost = "" if self.seconds is None else f"  cost: {format_duration(self.seconds)} at the parent's mean speed"
        forecast = str(self.forecast) if self.forecast else f"no forecast: {self.no_forecast}"
        lines = [str(self.amendment), *([cost] if cost else []), *(f"  {line}" for line in forecast.splitlines())]
        return "\n".join(lines)


def train(
    plan: AmendmentPlan,
    stage: str,
    config: StudyConfig,
    ledger: Ledger,
    display: Display,
    *,
    replay_steps: int | None = None,
) -> Amended:
    """Train a run that branches off another, under its lease; its forecast is registered first.

    Args:
        replay_steps: Steps to train again and compare before the run begins or goes on: of this run if it has a checkpoint,
            otherwise of its parent; None: none.

    Raises:
        StageError: If the other run is training now, or the steps trained again deviate; otherwise as `train_amendment`.
        PreemptedError: As `train_amendment`.
    """
    amendment, forecast = plan.amendment, plan.forecast or plan.no_forecast
    with lease(ledger, name := full_run_lease(amendment.key)) as token, display.stage(stage) as update:
        own = ledger.under(name, token)
        launched = launcher_of(config, amendment.key, update)
        if replay_steps is not None and own.result(ResultKind.AMENDMENT, amendment.key) is None:
            found = _replay(amendment, replay_steps, stage, config, own, launched)
            display.line(str(found or NOT_REPLAYED))
        if own.result(ResultKind.AMENDMENT_STARTED, amendment.key) is None:
            with _stopped(amendment.parent, stage, own):
                begin(amendment, own, forecast)
        return train_amendment(amendment, config, own, launcher=launched, forecast=forecast)


def _replay(
    amendment: Amendment, steps: int, stage: str, config: StudyConfig, ledger: Ledger, launcher: Launcher
) -> Replay | None:
    """Train the last steps again before the newest checkpoint of a run, or if it has none before that at which it begins."""
    started = ledger.result(ResultKind.AMENDMENT_STARTED, amendment.key)
    if started and CheckpointFolder(amendment.folder / CHECKPOINTS).newest():
        return replay(amendment.full_run(config, started["manifest_hash"]), steps, launcher, ledger)
    with _stopped(amendment.parent, stage, ledger):
        return replay(
            full_run_of(amendment.parent, config, ledger), steps, launcher, ledger, end=amendment.parent.tokens
        )


@contextmanager
def _stopped(parent: Parent, stage: str, ledger: Ledger) -> Iterator[None]:
    """Hold the parent's lease, which only a run that is not training leaves; raise StageError otherwise."""
    try:
        with lease(ledger, full_run_lease(parent.run), wait=False):
            yield
    except LeaseHeldError as error:
        raise StageError(
            f"{stage}: run {parent.run} is training now ({error}); let it save and stop first, by Ctrl-C, or by a file named "
            f"preempt in {parent.folder}"
        ) from error
