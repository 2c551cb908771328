"""The dry run of a promotion: plan, gate, memory per device, cost and workers, before a launch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from muscale.actors.corpus_hashes import changed_files
from muscale.formatting import counted
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.full_runs.promote.planned_worker import PlannedWorker
from muscale.layout import FULL_RUNS
from muscale.plans.by_law import deviations
from muscale.plans.cadence import Cadence
from muscale.plans.device_lines import (
    attention_line,
    cadence_line,
    communication_line,
    disk_line,
    evaluation_line,
    layout_line,
    memory_line,
)
from muscale.plans.gate import (
    Gate,
    GateLine,
    batch_line,
    by_law_line,
    check_line,
    context_line,
    data_line,
    experts_line,
    forecast_line,
    hyperparameters_line,
    leak_line,
    one_size_line,
    precision_line,
    transfer_line,
)
from muscale.plans.layouts import Layout, conditions_of, layouts_of, propose_layout
from muscale.plans.plan import Plan
from muscale.plans.planning import data_hashes
from muscale.plans.step_time import StepTime
from muscale.proxies.expert_axes import NO_LAWS, AxisLaws, axis_changes, experts_text
from muscale.proxies.ladder import ladder_models
from muscale.settings.config import StudyConfig
from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import MemoryEstimate
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.training.attended import attended_length
from proxy_models.training.precision import DTYPES
from proxy_models.training.traced_memory import checkpoint_bytes
from scaling import Verdict
from scaling.presentation import Result

if TYPE_CHECKING:
    from muscale.proxies.leak_check import LeakCheck
    from proxy_models.coordinates.check import CoordinateCheck


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The training that a launch would start.

    Attributes:
        workers: Processes of the run.
        sharding: Layout over the workers.
        micro_batch: Sequences per pass on a worker.
        cadence: Intervals of saves and evaluations.
        resumed_from: Tokens of the newest checkpoint; 0: a new run.
        proposed: The layout with the best predicted step among those that fit; empty if unknown.
    """

    workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    device: str
    sharding: str
    micro_batch: int
    n_steps: int
    n_tokens: int
    cadence: str
    resumed_from: int
    checkpoint_bytes: int
    directory: str
    proposed: str = ""

    @classmethod
    def of(cls, worker: PlannedWorker, folder: Path, **known: Any) -> Self:
        """The launch of workers like this one in the run's folder; `known` holds the other fields."""
        config, plan = worker.config, worker.plan
        return cls(
            workers=config.promote.workers,
            cpus_per_worker=config.resources.cpus_per_worker,
            gpus_per_worker=float(config.resources.gpus_per_worker > 0),
            device=worker.device.name,
            sharding=config.promote.sharding,
            micro_batch=worker.micro_batch,
            n_steps=plan.hyperparameters.resolve(plan.n_tokens).ramp.n_steps(plan.n_tokens),
            n_tokens=plan.n_tokens,
            resumed_from=max(CheckpointFolder(folder / CHECKPOINTS).kept(), default=0),
            directory=str(folder),
            **known,
        )

    def __str__(self) -> str:
        parts = f"{self.cpus_per_worker:g} CPU{'s' * (self.cpus_per_worker != 1)}" + (
            f" and {self.gpus_per_worker:g} GPU" if self.gpus_per_worker else ""
        )
        begins = f"resumes after {self.resumed_from:,} tokens" if self.resumed_from else "begins"
        if self.resumed_from >= self.n_tokens:
            begins = "trained to its end"
        return (
            f"launch: {counted(self.workers, 'worker')} with {parts} each on {self.device}, sharding {self.sharding}, "
            f"{counted(self.micro_batch, 'sequence')} a pass\n"
            f"  {self.n_steps:,} steps to {self.n_tokens:,} tokens, {begins}; checkpoints of "
            f"{self.checkpoint_bytes / 2**30:.3g} GiB in {self.directory}\n"
            f"  {self.cadence}" + (f"\n  fastest predicted layout: {self.proposed}" if self.proposed else "")
        )


@dataclass(frozen=True, kw_only=True)
class DryRun(Result):
    """The result of `muscale promote --dry-run`; memory is None if unknown."""

    plan: Plan
    gate: Gate
    memory: MemoryEstimate | None
    launch: Launch

    @property
    def passed(self) -> bool:
        """Whether the gate is open."""
        return self.gate.passed

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": self.plan.to_dict(),
            "gate": self.gate.to_dict(),
            "memory": self.memory and asdict(self.memory) | {"total": self.memory.total},
            "launch": asdict(self.launch),
        }

    def __str__(self) -> str:
        parts = [f"  estimate by part: {self.memory}"] if self.memory else []
        return "\n".join(map(str, (self.plan, self.gate, self.launch, *parts)))


def dry_run(
    plan: Plan,
    config: StudyConfig,
    corpus: Corpus,
    *,
    check: CoordinateCheck | None,
    leaks: LeakCheck | None,
    verdict: Verdict,
    directory: Path,
    ladder_laws: AxisLaws = NO_LAWS,
) -> DryRun:
    """Evaluate the gate and the launch; nothing is launched or written.

    Args:
        config: The study's settings, with the resources for the promotion.
        ladder_laws: Laws along axes of experts that moved the ladder's rates.
    """
    settings, model, h = config.promote, plan.model, plan.hyperparameters
    worker = PlannedWorker(plan=plan, config=config)
    memory, memory_lines = _memory(worker)
    checkpoint = checkpoint_bytes(model, h.optimizer)
    cadence = Cadence.of(
        settings,
        model,
        optimizer=h.optimizer,
        n_tokens=plan.n_tokens,
        evaluation_tokens=config.corpus.evaluation_tokens,
    )
    step, proposed = _predicted(worker, corpus)
    folder = directory / FULL_RUNS / plan.key
    changed, n_bytes = changed_files(corpus)
    gate = Gate(
        plan=plan.key,
        lines=(
            *_transfer(plan, config, verdict, ladder_laws, check),
            forecast_line(plan.forecast),
            data_line(plan.data, data_hashes(corpus), changed, n_bytes),
            leak_line(leaks),
            hyperparameters_line(plan.provenance),
            batch_line(plan.batch),
            by_law_line(deviations(plan, config)),
            *memory_lines,
            layout_line(
                family_of(model).shared_sizes(model),
                sequences=(h.batch_tokens >> h.batch_doublings) // model.context_length,
                workers=settings.workers,
                parallelism=settings.parallelism,
                errors=list(settings.parallelism.layout_errors(model)),
                micro_batch=worker.micro_batch,
                doublings=h.batch_doublings,
            ),
            precision_line(
                config.precision, plan.precision, device=worker.device.name, has_bf16=worker.device.has_bf16
            ),
            context_line(model, config.model, too_short=_too_short(corpus, model, config)),
            cadence_line(cadence, run_seconds=run_seconds(plan, config, corpus)),
            *(_attention(worker) if config.resources.gpus_per_worker else ()),
            *((communication_line(step, proposed),) if config.resources.gpus_per_worker else ()),
            _disk(worker, checkpoint, directory, folder / CHECKPOINTS),
        ),
    )
    launch = Launch.of(worker, folder, cadence=str(cadence), checkpoint_bytes=checkpoint, proposed=str(proposed or ""))
    return DryRun(plan=plan, gate=gate, memory=memory, launch=launch)


def _transfer(
    plan: Plan, config: StudyConfig, verdict: Verdict, ladder_laws: AxisLaws, check: CoordinateCheck | None
) -> Iterator[GateLine]:
    """The gate lines about values carried over sizes; runs from given weights have one size and no coordinate check."""
    if config.initial_weights:
        yield one_size_line(config.initial_weights)
        return
    judged = verdict.of_axes(())
    reach = plan.model.d_model / max(config.transfer.widths) if check and check.is_tied else 1.0
    yield transfer_line(judged.verdict, judged.reasons, judged.options, tied_reach=reach)
    yield from _experts(plan, config, verdict, ladder_laws)
    yield check_line(check)


def _experts(plan: Plan, config: StudyConfig, verdict: Verdict, ladder_laws: AxisLaws) -> Iterator[GateLine]:
    """The gate line about the axes of experts along which the run differs from its proxies, if there are any."""
    of_run = axis_changes(plan.model, config.model)
    of_ladder = {change: None for model in ladder_models(config) for change in axis_changes(model, config.model)}
    if of_run or of_ladder:
        experts = experts_text(plan.model, config.model)
        rule = plan.rules["learning_rate"]
        yield experts_line(
            of_run, verdict, experts=experts, rule=rule, of_ladder=tuple(of_ladder), ladder_laws=ladder_laws
        )


def _memory(worker: PlannedWorker) -> tuple[MemoryEstimate | None, tuple[GateLine, GateLine]]:
    """The memory of training on a worker, None if unknown, and the gate lines about memory."""
    device, memory, untraced = worker.device, None, ""
    try:
        memory = worker.memory()
    except ValueError as error:
        untraced = str(error)
    of_device: dict[str, Any] = {
        "memory_bytes": device.memory_bytes,
        "device": device.name,
        "workers_on_it": device.workers_on_it,
        "sharding": worker.config.promote.sharding,
    }
    evaluation = worker.evaluation_memory(memory) if memory else None
    return memory, (
        memory_line(memory, at_least=worker.least_memory, untraced=untraced, **of_device),
        evaluation_line(evaluation, sequences=worker.evaluation_batch, **of_device),
    )


def _disk(worker: PlannedWorker, checkpoint_bytes: int, directory: Path, checkpoints: Path) -> GateLine:
    """The gate line about the disk; the checkpoints of an interrupted run count as free."""
    settings, n_tokens = worker.config.promote, worker.plan.n_tokens
    free = shutil.disk_usage(directory).free + _size(checkpoints)
    for_ever = n_tokens // settings.keep_every_tokens if settings.keep_every_tokens else 0
    kept = settings.keep_last + 1 + for_ever  # plus the one being written
    return disk_line(kept * checkpoint_bytes, free, kept=kept, place=str(directory))


def run_seconds(plan: Plan, config: StudyConfig, corpus: Corpus) -> float | None:
    """Duration of the run's steps at the accelerator's share of the peak; None if no accelerator is named."""
    if (device := config.plan.device) is None or not config.resources.gpus_per_worker:
        return None
    attended = attended_length(plan.model, corpus, plan.n_tokens)
    flops = plan.model.train_flops_within(attended) * plan.n_tokens
    return flops / device.flops_per_second / config.promote.workers


def _predicted(worker: PlannedWorker, corpus: Corpus) -> tuple[StepTime | None, Layout | None]:
    """The predicted step of the run's layout, and the layout with the fastest predicted step."""
    plan, config = worker.plan, worker.config
    proposed = propose_layout(layouts_of(plan, config, corpus))
    layout = config.promote.parallelism
    conditions = conditions_of(plan, config, corpus)
    if conditions is None or family_of(plan.model).step_sizes(plan.model) is None:
        return None, None
    if any(layout.layout_errors(plan.model)):
        return None, proposed
    try:
        return StepTime(plan.model, layout, micro_batch=worker.micro_batch, **conditions), proposed
    except ValueError:  # the workers or micro-batches do not fit the layout, as its line says
        return None, proposed


def _attention(worker: PlannedWorker) -> Iterator[GateLine]:
    """The gate line about the attention kernel, if the model's family knows it."""
    model, layout, dtype = worker.plan.model, worker.config.promote.parallelism, DTYPES[worker.plan.precision]
    found = family_of(model).attention_kernel(model, dtype, context_parallel=layout.context_parallel)
    if found is None:
        return
    n_heads = -(-found.n_heads // layout.tensor_parallel)
    weights = 4 * worker.micro_batch * n_heads * model.context_length**2 / layout.context_parallel
    yield attention_line(found.kernel, n_heads=n_heads, head_dim=found.head_dim, weight_bytes=weights)


def _too_short(corpus: Corpus, model: Member, config: StudyConfig) -> str:
    """Message about a held-out split that is too short for evaluations at the run's context; "" if it is long enough."""
    try:
        evaluation_sets(corpus, model.context_length, config.corpus.evaluation_tokens)
    except ValueError as error:
        return str(error)
    return ""


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
