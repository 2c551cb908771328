"""The layout of a full run with the best predicted step time among those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Self, get_args

from muscale.errors import StageError
from muscale.plans.plan import Plan
from muscale.plans.step_time import LINKS, StepTime, links_of
from muscale.settings.config import StudyConfig
from muscale.settings.cross_field_rules import NO_STEP_SIZES
from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import GROUPS, LAYOUT, PromoteSettings
from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import MEMORY_SHARE, Checkpointing, MemoryEstimate, Sharding, largest_micro_batch
from proxy_models.architecture.stage_layout import SPLIT_BACKWARD, PipelineSchedule
from proxy_models.data.corpus import Corpus
from scaling import accelerator

NEAR = 0.02
"""Relative difference of predicted step times below which the simpler layout is chosen; the prediction is no finer."""
SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")
"""Schedules that are considered for an open layout, the simpler first: blocks can be compiled under both."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout, its predicted step and its memory."""

    parallelism: Parallelism
    micro_batch: int
    step: StepTime
    memory: MemoryEstimate

    @property
    def keys(self) -> dict[str, Any]:
        """Settings of [promote] that select the layout."""
        own = self.parallelism
        ranks = (getattr(own, name) for name in GROUPS)
        keys: dict[str, Any] = dict(zip(LAYOUT, (own.sharding, *ranks, own.checkpointing), strict=True))
        return keys | {"pipeline_schedule": own.pipeline_schedule} if own.pipeline_parallel > 1 else keys

    def __str__(self) -> str:
        """Return the settings of [promote], with predicted time and memory."""
        chosen = self.parallelism
        names = [name for name in GROUPS if name != "tensor_parallel" and getattr(chosen, name) > 1]
        groups = "".join(f"{name} = {getattr(chosen, name)}, " for name in names)
        if chosen.pipeline_parallel > 1:
            groups += f'pipeline_schedule = "{chosen.pipeline_schedule}", '
        return (
            f'sharding = "{chosen.sharding}", tensor_parallel = {chosen.tensor_parallel}, {groups}micro_batch = {self.micro_batch}, '
            f'activation_checkpointing = "{chosen.checkpointing}": {self.step}, {self.memory.total / 2**30:.3g} GiB'
        )


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Values that are considered for the layout settings other than sharding and tensor parallelism.

    Attributes:
        shard_ranks: Ranks in a shard group of hybrid layouts; None: the ranks of a node.
        schedules: Schedules of pipelines.
        contexts: Numbers of ranks that share every sequence.
        experts: Numbers of ranks that share out the experts of a block.
    """

    shard_ranks: int | None = None
    schedules: Sequence[PipelineSchedule] = SCHEDULES
    contexts: Sequence[int] = (1,)
    experts: Sequence[int] = (1,)

    @classmethod
    def of(cls, settings: PromoteSettings) -> Self:
        """Return the stated value of each setting, or for "auto" all values that are considered."""
        is_open = settings.pipeline_parallel == "auto" and "pipeline_schedule" not in settings.model_fields_set
        degrees = _degrees(settings.workers)
        context, expert = settings.context_parallel, settings.expert_parallel
        return cls(
            shard_ranks=settings.shard_ranks,
            schedules=SCHEDULES if is_open else (settings.pipeline_schedule,),
            contexts=degrees if context == "auto" else (context,),
            experts=(expert,) if expert != "auto" else (1,) if settings.compile else degrees,
        )


def fitting_layouts(
    step: StepTime,
    *,
    smallest_batch_tokens: int | None = None,
    micro_batch: int | None = None,
    choices: Choices = Choices(),
    optimizer: str = "adamw",
) -> list[Layout]:
    """Return all layouts that fit, the fastest first.

    Args:
        step: Conditions of the step: everything but its layout and micro-batch, which are replaced.
        smallest_batch_tokens: Batch at the beginning of a ramp; None: the step's.
        micro_batch: Most sequences of a pass; None: for each layout as many as fit.
    """
    from proxy_models.training.traced_memory import estimated_memory  # imports torch

    model, workers, device = step.model, step.workers, accelerator(step.device)
    node_devices = (step.links or links_of(device)).node_devices
    limit = int(MEMORY_SHARE * device.memory_bytes)
    smallest = smallest_batch_tokens or step.batch_tokens
    sequences, doublings = smallest // model.context_length, (step.batch_tokens // smallest).bit_length() - 1
    found = []
    for parallelism in _candidates(model, workers, sequences, node_devices, choices):
        grid = parallelism.grid(workers, node_ranks=min(workers, node_devices))
        shares = parallelism.data_ranks(workers)
        first, share = (-(-n // shares) for n in (sequences, step.batch_tokens // model.context_length))
        conditions = parallelism.memory_conditions(grid, share)
        estimate = partial(estimated_memory, model, precision=step.precision, optimizer=optimizer, **conditions)
        pipeline = parallelism.pipeline(first)
        most = first if pipeline else share
        taken = (
            min(micro_batch, share)
            if micro_batch
            else largest_micro_batch(estimate, most, limit=limit, pipeline=pipeline)
        )
        if pipeline and any(parallelism.unfit(workers, sequences=sequences, doublings=doublings, micro_batch=taken)):
            continue
        memory = estimate(micro_batch=taken)
        if memory.total > limit:
            continue
        laid_out = replace(step, parallelism=parallelism, micro_batch=taken)
        found.append(Layout(parallelism=parallelism, micro_batch=taken, step=laid_out, memory=memory))
    return sorted(found, key=lambda layout: layout.step.total)


def propose_layout(layouts: list[Layout]) -> Layout | None:
    """Return the simplest layout within 2 % of the fastest, or None: fewest stages, then least tensor parallelism, and so on.

    More ranks share a sequence only where nothing fits with fewer, since no published run checks the prediction for them.
    """
    shared = min((layout.parallelism.context_parallel for layout in layouts), default=1)
    layouts = [layout for layout in layouts if layout.parallelism.context_parallel == shared]
    near = [layout for layout in layouts if layout.step.total <= (1 + NEAR) * layouts[0].step.total]
    return min(near, key=lambda layout: _complexity(layout.parallelism), default=None)


def conditions_of(plan: Plan, config: StudyConfig, corpus: Corpus) -> dict[str, Any] | None:
    """Return arguments of `StepTime` for a plan; None without GPUs whose links are known."""
    device = config.plan.device
    if not config.resources.gpus_per_worker or device is None or device.name not in LINKS:
        return None
    from proxy_models.training.attended import attended_length  # imports torch, which readers of a study don't need

    return {
        "workers": config.promote.workers,
        "batch_tokens": plan.hyperparameters.batch_tokens,
        "device": device,
        "precision": plan.precision,
        "compiled": config.promote.compile is not False,
        "attended": attended_length(plan.model, corpus, plan.n_tokens),
    }


def layouts_of(plan: Plan, config: StudyConfig, corpus: Corpus) -> list[Layout]:
    """Return the layouts that fit a plan on the study's devices, fastest first; none if links or the model are unknown."""
    h, settings = plan.hyperparameters, config.promote
    conditions = conditions_of(plan, config, corpus)
    if conditions is None or family_of(plan.model).step_sizes(plan.model) is None:
        return []
    return fitting_layouts(
        StepTime(plan.model, Parallelism(), micro_batch=1, **conditions),
        smallest_batch_tokens=h.batch_tokens >> h.batch_doublings,
        micro_batch=settings.micro_batch,
        choices=Choices.of(settings),
        optimizer=h.optimizer,
    )


def with_layout(plan: Plan, config: StudyConfig, corpus: Corpus) -> StudyConfig:
    """Return the study with a choice for each layout setting that is "auto"; raise StageError if none fits or links are unknown."""
    settings = config.promote
    if not settings.open_layout:
        return config
    key = f"promote.{settings.open_layout[0]}"
    if family_of(plan.model).step_sizes(plan.model) is None:
        raise StageError(f'{key}: must be stated, since {NO_STEP_SIZES}, got "auto"')
    if conditions_of(plan, config, corpus) is None:
        raise StageError(
            f'{key}: "auto" needs resources.gpus_per_worker and plan.accelerator, one of {", ".join(LINKS)}; got '
            f"{config.resources.gpus_per_worker:g} and {config.plan.accelerator}"
        )
    stated = {name: value for name in LAYOUT if (value := getattr(settings, name)) != "auto"}
    least = settings.workers_min or settings.workers
    layouts = [
        layout
        for layout in layouts_of(plan, config, corpus)
        if stated.items() <= layout.keys.items()
        and not any(layout.parallelism.unfit(least))
        and (least == settings.workers or layout.parallelism.sharding != "hybrid" or settings.shard_ranks)
    ]
    if (chosen := propose_layout(layouts)) is None:
        raise StageError(
            f"{key}: no layout of {plan.model.shown_params} parameters fits {settings.workers} × {config.plan.accelerator}; use "
            "more workers"
        )
    return config.model_copy(update={"promote": settings.model_copy(update=chosen.keys)})


def _degrees(workers: int) -> list[int]:
    """Numbers of ranks that divide the workers."""
    return [degree for degree in range(1, workers + 1) if workers % degree == 0]


def _candidates(
    model: Member, workers: int, sequences: int, node_devices: int, choices: Choices
) -> Iterator[Parallelism]:
    """Generate the layouts that this many workers form and that divide the model; hybrid only over several nodes."""
    degrees = _degrees(workers)
    pipelines = [(1, SCHEDULES[0]), *product(degrees[1:], choices.schedules)]
    is_known = family_of(model).training_memory(model, micro_batch=1) is not None
    if not is_known:
        del pipelines[1:]  # whose stages' memory would be unknown
    experts = choices.experts
    if not is_known or (sizes := family_of(model).step_sizes(model)) is None or sizes.experts is None:
        experts = [n for n in experts if n == 1]
    for sharding, degree, context, n_parts, (stages, schedule) in product(
        get_args(Sharding), degrees, choices.contexts, experts, pipelines
    ):
        if n_parts > 1 and degree * context * stages > 1:
            continue
        if sharding == "hybrid" and (workers // stages <= node_devices or degree * context > node_devices):
            continue
        if stages > 1 and schedule in SPLIT_BACKWARD and sharding in ("full", "hybrid"):
            continue
        together = choices.shard_ranks if sharding == "hybrid" else None
        if together and together % (degree * context):
            continue
        plain = Parallelism(
            sharding=sharding,
            shard_ranks=together,
            tensor_parallel=degree,
            context_parallel=context,
            expert_parallel=n_parts,
            pipeline_parallel=stages,
            pipeline_schedule=schedule,
        )
        errors = (*plain.layout_errors(model), *plain.unfit(workers, sequences=sequences, node_ranks=node_devices))
        if not errors:
            kinds = get_args(Checkpointing)[:1] if plain.splits_backward else get_args(Checkpointing)
            yield from (replace(plain, checkpointing=kind) for kind in kinds)


def _complexity(parallelism: Parallelism) -> tuple[int, ...]:
    return (
        parallelism.pipeline_parallel,
        parallelism.tensor_parallel,
        parallelism.expert_parallel,
        get_args(Checkpointing).index(parallelism.checkpointing),
        get_args(Sharding).index(parallelism.sharding),
        get_args(PipelineSchedule).index(parallelism.pipeline_schedule),
    )
