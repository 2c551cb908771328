"""Promotion: the planned run is launched on the cluster, and held against the forecast that was registered before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from muscale.config import PromoteSettings, ResourceSettings, StudyConfig
from muscale.errors import StageError
from muscale.gate import Gate, forced_lines
from muscale.interrupts import interrupted_later, interruptible
from muscale.jobs import Job, cluster, dismiss_workers
from muscale.layout import CORPUS, FAILURE, FULL_RUNS, RESULT
from muscale.ledger import Ledger, now
from muscale.planning import Plan
from muscale.tables import runs, segments
from proxy_models.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A finished full run beside its forecast; losses in nats per token.

    Attributes:
        plan: Key of the plan.
        loss: Validation loss at the end.
        source_losses: The same of each source of a mixture; empty with one source.
        forecast, low, high, level: As registered.
        registered_at, started_at, finished_at: UTC; the first is earlier than the second.
        verdict: Of the transfer check at the time.
        forced: Whether it had to be, as the gate was closed.
        world_size: Workers at the end.
        seconds: Wall time of the training.
        gate: `Gate` as plain values, as it was at the first launch; None in a promotion from before there was one.
        forced_lines: What any launch was forced past.
        asserted: Whether the run was elsewhere, and the loss is as its owner tells it; workers are 0 then.
    """

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
    gate: dict[str, Any] | None = None
    forced_lines: tuple[str, ...] = ()
    asserted: bool = False

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
        """Whether the measured loss lies in the interval."""
        return self.low <= self.loss <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the derived ones with them."""
        derived = {"residual": self.residual, "relative_error": self.relative_error, "inside": self.inside}
        return {**self.__dict__, **derived, "forced_lines": list(self.forced_lines)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"forced_lines": tuple(values.get("forced_lines", ()))})

    def __str__(self) -> str:
        where = "elsewhere, as its owner tells" if self.asserted else f"on {self.world_size} workers"
        place = "inside" if self.inside else "OUTSIDE"
        lines = [
            f"promotion: forecast {self.forecast:.4f} nats per token, {self.level:.0%} interval "
            f"[{self.low:.4f}, {self.high:.4f}], registered {self.registered_at}",
            f"  measured {self.loss:.4f} {where}: {place} the interval, error {self.relative_error:+.2%}",
        ]
        if self.source_losses:
            lines.append("  " + ", ".join(f"{name} {loss:.4f}" for name, loss in self.source_losses.items()))
        if self.forced:
            past = f" past {', '.join(self.forced_lines)}" if self.forced_lines else ""
            lines.append(f"  forced{past}, with a transfer verdict of {self.verdict!r}")
        return "\n".join(lines)


def promote(
    plan: Plan,
    config: StudyConfig,
    ledger: Ledger,
    numerics: Numerics,
    *,
    verdict: str,
    forced: bool,
    gate: Gate | None = None,
) -> Promotion:
    """Train the plan to its end, going on from its last checkpoint if there is one, and record the outcome.

    What `gate` let through, or was forced to, is kept with it.

    Raises:
        StageError: If the run diverged or failed more often than `promote.max_failures`.
    """
    registered = ledger.forecast(plan.key)
    if registered is None:
        raise StageError(f"promote: no forecast is registered for plan {plan.key}; run `muscale plan` first")
    if misfits := list(config.promote.parallelism.misfits(plan.model)):
        raise StageError(f"promote: {'; '.join(misfits)}")
    started = ledger.result("promotion_started", plan.key)
    if started is None:
        started = {"at": now(), "verdict": verdict, "forced": forced, "gate": gate and gate.to_dict()}
        ledger.record_result("promotion_started", plan.key, started)
    if datetime.fromisoformat(registered["registered_at"]) >= datetime.fromisoformat(started["at"]):
        raise StageError(
            f"promote: plan {plan.key} was started {started['at']}, not after its forecast of {registered['registered_at']}"
        )
    directory = ledger.directory / FULL_RUNS / plan.key
    directory.mkdir(parents=True, exist_ok=True)
    run = full_run_of(plan, config, numerics, directory, ledger.directory / CORPUS)
    outcome = launch(run, config.promote, config.resources, name=plan.key)
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
        gate=started.get("gate"),
        forced_lines=past,
        world_size=int(outcome["environment"]["world_size"]),
        seconds=float(outcome["seconds"]),
    )
    _record_run(plan, ledger, numerics, outcome)
    ledger.record_result("promotion", plan.key, promotion.to_dict())
    return promotion


def _record_run(plan: Plan, ledger: Ledger, numerics: Numerics, outcome: dict[str, Any]) -> None:
    """Enter the full run among the runs, as a training like any other."""
    chain = plan.chain(numerics)
    ledger.insert(
        segments,
        **chain.row(),
        trained_from=0,
        loss=outcome["loss"],
        source_losses=outcome["source_losses"],
        seconds=outcome["seconds"],
        environment=outcome["environment"],
    )
    job = Job(purpose="full", label=f"plan {plan.key}", hyperparameters=plan.hyperparameters, chain=chain)
    if recorded := ledger.outcome(chain):
        ledger.insert(runs, **job.row(recorded))


def full_run_of(plan: Plan, config: StudyConfig, numerics: Numerics, directory: Path, corpus: Path) -> dict[str, Any]:
    """What `muscale.full_run.FullRun` takes; the driver itself needs no Lightning."""
    settings, chain = config.promote, plan.chain(numerics)
    return {
        "numerics": chain.numerics,
        "segments": chain.segments,
        "directory": directory,
        "corpus": corpus,
        "checkpoint_every_tokens": settings.checkpoint_every_tokens,
        "evaluate_every_tokens": settings.evaluate_every_tokens,
        "micro_batch": settings.micro_batch,
        "parallelism": settings.parallelism,
        "compile": config.resources.compile,
    }


def launch(
    run: dict[str, Any],
    settings: PromoteSettings,
    resources: ResourceSettings,
    *,
    name: str,
    worker: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train a run to its end under Ray Train; each worker finds the last checkpoint by itself. A finished run is not launched again.

    Args:
        run: From `full_run_of`.
        settings: Workers and failures.
        resources: Of a worker.
        name: For Ray's records.
        worker: What each does; by default `train_worker`.

    Raises:
        StageError: If the workers failed, or ended in what another attempt would end in again.
    """
    result: Path = run["directory"] / RESULT
    if not result.exists():
        with cluster(resources):
            dismiss_workers()
            _fit(run, settings, resources, name, worker or train_worker)
    if not result.exists():
        raise StageError(f"promote: the run ended without a loss; its records are in {result.parent}")
    return dict(json.loads(result.read_text()))


def _fit(
    run: dict[str, Any],
    settings: PromoteSettings,
    resources: ResourceSettings,
    name: str,
    worker: Callable[[dict[str, Any]], None],
) -> None:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    with interrupted_later():
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer

    directory: Path = run["directory"]
    # Ray copies a checkpoint that is reported to it; ours stay where they are, so Ray is given none and keeps no state.
    trainer = TorchTrainer(
        worker,
        train_loop_config={"threads": resources.threads, "run": run},
        scaling_config=ScalingConfig(
            num_workers=settings.workers,
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker={"CPU": resources.cpus_per_worker} | ({"GPU": 1} if resources.gpus_per_worker else {}),
        ),
        run_config=RunConfig(
            name=f"{name}-{now().replace(':', '')}",
            storage_path=str(directory / "ray"),
            failure_config=FailureConfig(max_failures=settings.max_failures),
        ),
    )
    failure = directory / FAILURE
    failure.unlink(missing_ok=True)
    try:
        with interruptible():
            trainer.fit()
    except TrainingFailedError as error:
        raise StageError(f"promote: {error}; the run's records are in {directory}") from error
    if failure.exists():
        raise StageError(f"{failure.read_text()}; the run's records are in {directory}")


def train_worker(config: dict[str, Any]) -> None:
    """One worker of the full run, inside Ray Train.

    What another attempt would end in again, such as a divergence, goes into a file: Ray would retry an error.
    """
    from muscale.compat import import_lightning

    import_lightning()
    import ray.train
    import torch
    from ray.train.lightning import RayLightningEnvironment
    from ray.train.torch import get_device

    from muscale.full_run import FullRun, train
    from muscale.sharding import ShardedStrategy

    torch.set_num_threads(config["threads"])
    run = FullRun(**config["run"])
    context = ray.train.get_context()
    strategy = ShardedStrategy(world_size=context.get_world_size(), root_device=get_device())
    try:
        train(run, strategy=strategy, plugins=[RayLightningEnvironment()])  # type: ignore[no-untyped-call]
    except StageError as error:
        if context.get_world_rank() == 0:
            (run.directory / FAILURE).write_text(str(error))
