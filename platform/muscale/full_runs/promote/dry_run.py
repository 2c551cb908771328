"""The dry run of a promotion: plan, gate, memory per device, cost and workers, before anything is launched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from muscale.actors.corpus_hashes import changed_files
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.layout import FULL_RUNS
from muscale.plans.by_law import departures
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
    forecast_line,
    hyperparameters_line,
    precision_line,
    transfer_line,
)
from muscale.plans.layouts import Layout, conditions_of, layouts_of, propose_layout
from muscale.plans.planning import Plan, data_hashes
from muscale.plans.step_time import LINKS, StepTime, step_time
from muscale.settings.config import StudyConfig
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import (
    MEMORY_SHARE,
    MemoryEstimate,
    evaluation_memory,
    largest_micro_batch,
    least_memory,
    state_bytes,
)
from proxy_models.data.corpus import Corpus
from proxy_models.training.attended import attended_length
from scaling import Verdict
from scaling.presentation import Result

if TYPE_CHECKING:
    from proxy_models.coordinates.check import CoordinateCheck

_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a worker.

    Attributes:
        name: For people.
        memory_bytes: Of the device; None if unknown here.
        workers_on_it: Workers that share it.
        has_bf16: Whether a GPU's products in bf16 are its own; None for a CPU, or if unknown here.
    """

    name: str
    memory_bytes: float | None
    workers_on_it: int = 1
    has_bf16: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The training that would be started.

    Attributes:
        workers: Processes of the run.
        cpus_per_worker, gpus_per_worker: Of each.
        device: Of each.
        sharding: Layout over the workers.
        micro_batch: Sequences per pass on a worker.
        n_steps, n_tokens: Of the run.
        cadence: Its saves and evaluations.
        resumed_from: Tokens of the newest checkpoint; 0: a new run.
        checkpoint_bytes: Of one checkpoint.
        directory: Of the run.
        proposed: The layout with the best predicted step among those that fit; empty where none is known.
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

    def __str__(self) -> str:
        parts = f"{self.cpus_per_worker:g} CPUs" + (
            f" and {self.gpus_per_worker:g} GPU" if self.gpus_per_worker else ""
        )
        begins = f"resumes after {self.resumed_from:,} tokens" if self.resumed_from else "begins"
        if self.resumed_from >= self.n_tokens:
            begins = "trained to its end"
        return (
            f"launch: {self.workers} workers with {parts} each on {self.device}, sharding {self.sharding}, "
            f"{self.micro_batch} sequences a pass\n"
            f"  {self.n_steps:,} steps to {self.n_tokens:,} tokens, {begins}; checkpoints of "
            f"{self.checkpoint_bytes / 2**30:.3g} GiB in {self.directory}\n"
            f"  {self.cadence}" + (f"\n  fastest predicted layout: {self.proposed}" if self.proposed else "")
        )


@dataclass(frozen=True, kw_only=True)
class DryRun(Result):
    """The result of `muscale promote --dry-run`; memory is None where it is unknown."""

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
    plan: Plan, config: StudyConfig, corpus: Corpus, *, check: CoordinateCheck | None, verdict: Verdict, directory: Path
) -> DryRun:
    """Evaluate the gate and the launch; nothing is launched or written.

    Args:
        config: The study's, with the resources to promote it on.
    """
    settings, model, h = config.promote, plan.model, plan.hyperparameters
    memory, untraced = None, ""
    try:
        memory = memory_of(plan, config)
    except ValueError as error:
        untraced = str(error)
    checkpoint = state_bytes(model, h.optimizer)
    cadence = Cadence.of(
        settings,
        model,
        optimizer=h.optimizer,
        n_tokens=plan.n_tokens,
        evaluation_tokens=config.corpus.evaluation_tokens,
    )
    device = device_of(config)
    step, proposed = _predicted(plan, config, corpus)
    folder = directory / FULL_RUNS / plan.key
    changed, n_bytes = changed_files(corpus)
    free = shutil.disk_usage(directory).free + _size(folder / CHECKPOINTS)
    for_ever = plan.n_tokens // settings.keep_every_tokens if settings.keep_every_tokens else 0
    kept = settings.keep_last + 1 + for_ever  # and the one being written
    gate = Gate(
        plan=plan.key,
        lines=(
            transfer_line(
                verdict.verdict,
                verdict.reasons,
                verdict.options,
                tied_reach=model.d_model / max(config.transfer.widths) if check and check.is_tied else 1.0,
            ),
            check_line(check),
            forecast_line(plan.forecast),
            data_line(plan.data, data_hashes(corpus), changed, n_bytes),
            hyperparameters_line(plan.provenance),
            batch_line(plan.batch),
            by_law_line(departures(plan, config)),
            memory_line(
                memory,
                memory_bytes=device.memory_bytes,
                device=device.name,
                workers_on_it=device.workers_on_it,
                at_least=_least_memory(plan, config),
                untraced=untraced,
            ),
            evaluation_line(
                _evaluation_memory(plan, config, memory),
                sequences=_evaluation_batch(plan, config),
                memory_bytes=device.memory_bytes,
                device=device.name,
                workers_on_it=device.workers_on_it,
            ),
            layout_line(
                _shared_by_products(model),
                sequences=(h.batch_tokens >> h.batch_doublings) // model.context_length,
                workers=settings.workers,
                parallelism=settings.parallelism,
            ),
            precision_line(
                config.shared_numerics(corpus).precision, plan.precision, device=device.name, has_bf16=device.has_bf16
            ),
            context_line(model, config.model, too_short=_too_short(corpus, model, config)),
            cadence_line(cadence, run_seconds=run_seconds(plan, config, corpus)),
            *(_attention(model, plan, config) if config.resources.gpus_per_worker else ()),
            *((communication_line(step, proposed),) if config.resources.gpus_per_worker else ()),
            disk_line(kept * checkpoint, free, kept=kept, place=str(directory)),
        ),
    )
    launch = Launch(
        workers=settings.workers,
        cpus_per_worker=config.resources.cpus_per_worker,
        gpus_per_worker=float(config.resources.gpus_per_worker > 0),
        device=device.name,
        sharding=settings.sharding,
        micro_batch=_micro_batch(plan, config),
        n_steps=h.resolve(plan.n_tokens).ramp.n_steps(plan.n_tokens),
        n_tokens=plan.n_tokens,
        cadence=str(cadence),
        resumed_from=max(CheckpointFolder(folder / CHECKPOINTS).kept(), default=0),
        checkpoint_bytes=checkpoint,
        directory=str(folder),
        proposed=str(proposed or ""),
    )
    return DryRun(plan=plan, gate=gate, memory=memory, launch=launch)


def run_seconds(plan: Plan, config: StudyConfig, corpus: Corpus) -> float | None:
    """Duration of the run's steps at the accelerator's share of the peak; None where no accelerator is named."""
    if (device := config.plan.device) is None or not config.resources.gpus_per_worker:
        return None
    attended = attended_length(plan.model, corpus, plan.n_tokens)
    flops = plan.model.train_flops_within(attended) * plan.n_tokens
    return flops / device.flops_per_second / config.promote.workers


def memory_of(plan: Plan, config: StudyConfig) -> MemoryEstimate:
    """Memory of a worker at the full batch.

    Raises:
        ValueError: If a model of one's own is not imported here, or can't be traced.
    """
    from proxy_models.training.traced_memory import estimated_memory  # imports torch

    return estimated_memory(plan.model, micro_batch=_micro_batch(plan, config), **_conditions(plan, config))


def _least_memory(plan: Plan, config: StudyConfig) -> int:
    """Bytes of a worker's weights, gradients and moments."""
    of_state = {name: value for name, value in _conditions(plan, config).items() if name in ("sharding", "world_size")}
    return least_memory(plan.model, plan.hyperparameters.optimizer, **of_state)


def _predicted(plan: Plan, config: StudyConfig, corpus: Corpus) -> tuple[StepTime | None, Layout | None]:
    """The predicted step of the run's layout, and the layout that is predicted to be the fastest."""
    proposed = propose_layout(layouts_of(plan, config, corpus))
    layout, workers = config.promote.parallelism, config.promote.workers
    conditions = conditions_of(plan, config, corpus)
    if conditions is None or not isinstance(plan.model, ModelConfig):
        return None, None
    if any(layout.unfit(workers, node_ranks=_node_ranks(config))) or any(layout.layout_errors(plan.model)):
        return None, proposed
    return step_time(plan.model, layout, micro_batch=_micro_batch(plan, config), **conditions), proposed


def _node_ranks(config: StudyConfig) -> int:
    """Workers on a node as far as the accelerator tells, else all of them."""
    links = LINKS.get(config.plan.accelerator or "")
    return min(config.promote.workers, links.node_devices) if links else config.promote.workers


def _evaluation_batch(plan: Plan, config: StudyConfig) -> int:
    """Sequences of an evaluation's pass on a worker."""
    from proxy_models.training.device import EVALUATION_BATCH

    return min(_micro_batch(plan, config), EVALUATION_BATCH) if config.resources.gpus_per_worker else EVALUATION_BATCH


def _evaluation_memory(plan: Plan, config: StudyConfig, training: MemoryEstimate | None) -> int | None:
    """Bytes of a worker that evaluates; None without an estimate of its training."""
    if training is None:
        return None
    conditions = _conditions(plan, config)
    if not isinstance(plan.model, ModelConfig):
        from proxy_models.training.traced_memory import traced_evaluation  # imports torch

        return traced_evaluation(
            plan.model,
            _evaluation_batch(plan, config),
            training,
            conditions["precision"],
            world_size=conditions["world_size"],
        )
    return evaluation_memory(
        plan.model,
        _evaluation_batch(plan, config),
        training,
        conditions["precision"],
        **{name: conditions[name] for name in ("sharding", "world_size", "tensor_parallel")},
    )


def _shared_by_products(model: Member) -> dict[str, int]:
    """Sizes that workers of tensor parallelism share; a family without a plan of them has none."""
    if not isinstance(model, ModelConfig):
        return {}
    return {"heads": model.n_heads, "key and value heads": model.n_kv_heads, "columns of the MLP": model.d_ff}


def _attention(model: Member, plan: Plan, config: StudyConfig) -> Iterator[GateLine]:
    """The decoder's kernel; nothing is known of another family's."""
    if not isinstance(model, ModelConfig):
        return
    from proxy_models.architecture.attention import cuda_kernel
    from proxy_models.training.precision import DTYPES

    kernel = cuda_kernel(
        DTYPES[plan.precision],
        model.head_dim,
        biased=model.positions == "alibi",
        grouped=False,  # where a kernel lacks grouped heads, they are expanded
        within_documents=model.document_separator is not None,
    )
    weights = 4 * _micro_batch(plan, config) * model.n_heads * model.context_length**2
    yield attention_line(
        kernel, head_dim=model.head_dim, weight_bytes=weights / config.promote.parallelism.tensor_parallel
    )


def _too_short(corpus: Corpus, model: Member, config: StudyConfig) -> str:
    """What the held-out split lacks for evaluations at the run's context, "" if nothing."""
    from proxy_models.data.batches import evaluation_sets

    try:
        evaluation_sets(corpus, model.context_length, config.corpus.evaluation_tokens)
    except ValueError as error:
        return str(error)
    return ""


def _conditions(plan: Plan, config: StudyConfig) -> dict[str, Any]:
    """Settings that memory depends on, without the micro-batch."""
    layout = config.promote.parallelism
    replicas, shards, _ = layout.grid(config.promote.workers, node_ranks=_node_ranks(config))
    of_training = {"precision": plan.precision, "optimizer": plan.hyperparameters.optimizer}
    return of_training | layout.memory_conditions(replicas, shards)


def _micro_batch(plan: Plan, config: StudyConfig) -> int:
    """Sequences per pass on a worker: as set, or on a GPU the largest part of its share that fits, or its share.

    If shares differ by one sequence, the larger one counts.
    """
    settings, h = config.promote, plan.hyperparameters
    shares = settings.parallelism.data_ranks(settings.workers) * plan.model.context_length
    if settings.micro_batch:
        return settings.micro_batch
    device = device_of(config)
    if config.resources.gpus_per_worker and device.memory_bytes:
        from proxy_models.training.traced_memory import estimated_memory  # imports torch

        estimate = partial(estimated_memory, plan.model, **_conditions(plan, config))
        first = -(-(h.batch_tokens >> h.batch_doublings) // shares)
        with suppress(ValueError):  # a model that can't be traced
            return largest_micro_batch(estimate, first, limit=int(MEMORY_SHARE * device.memory_bytes))
    return -(-h.batch_tokens // shares)


def device_of(config: StudyConfig) -> Device:
    """The device of a worker: the plan's accelerator, the one that this process sees, or this machine's CPU."""
    if config.resources.gpus_per_worker:
        if known := config.plan.device:
            return Device(name=known.name, memory_bytes=known.memory_bytes, has_bf16="bf16" in known.peak_flops)
        import torch

        if torch.cuda.is_available():
            seen = torch.cuda.get_device_properties(0)
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            return Device(name=str(seen.name), memory_bytes=float(seen.total_memory), has_bf16=has_bf16)
        return Device(name="a GPU", memory_bytes=None)
    if os.environ.get("RAY_ADDRESS"):  # the workers run on other machines
        return Device(name="a node of the cluster", memory_bytes=None)
    return Device(name="this machine", memory_bytes=float(_host_memory()), workers_on_it=config.promote.workers)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _host_memory() -> int:
    """Memory in bytes of this machine or container."""
    total = int(psutil.virtual_memory().total)
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    return min(total, int(limit)) if limit.isdigit() else total
