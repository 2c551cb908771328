"""[promote] of the study file: how the full run is trained, watched and preserved."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self, cast

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.errors import StageError
from muscale.settings.parallelism import COMPILED_EXPERTS, Parallelism, require_whole_graph
from muscale.settings.strict import StrictTable, require_whole_or_fraction
from proxy_models.architecture.memory import Checkpointing, Precision, Sharding
from proxy_models.architecture.stage_layout import SPLIT_BACKWARD, PipelineSchedule
from proxy_models.training.compilation import Compile
from proxy_models.training.guard_settings import GuardSettings

GROUPS = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
LAYOUT = ("sharding", *GROUPS, "activation_checkpointing")
"""Keys that may be "auto"."""


@dataclass(frozen=True, kw_only=True)
class SpikePolicy:
    """Response to a spike: a step whose loss or gradient norm is not finite, or which the guard finds too large.

    Attributes:
        action: "skip" leaves the batch out; "rollback" returns to the last checkpoint and leaves the batch out on the way, as
            was done for PaLM by hand (Chowdhery et al., arXiv 2204.02311, section 5.1).
        max_interventions: Limit for the whole run; a further spike ends the run as diverged.
        margin_tokens: Tokens also left out before and after the batch; "rollback" only, rounded up to whole batches.
        rewarm_tokens: Length of a linear warmup of the rate after a rollback; 0: none.
    """

    action: Literal["skip", "rollback"]
    max_interventions: int = 3
    margin_tokens: int = 0
    rewarm_tokens: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """The fields for keys of runs: the limit, which changes no result, at its default."""
        return asdict(replace(self, max_interventions=SpikePolicy.max_interventions))

    def __post_init__(self) -> None:
        if self.action not in ("skip", "rollback"):
            raise ValueError(f'action must be "skip" or "rollback", got {self.action!r}')
        for name in ("max_interventions", "margin_tokens", "rewarm_tokens"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}")


class PromoteSettings(StrictTable):
    """[promote]: how the full run is trained."""

    workers: PositiveInt = 2  # ranks; each has resources.cpus_per_worker, and one GPU if gpus_per_worker is above 0
    # smallest number of workers, used in whole groups while the cluster has no room for all; none: all or nothing
    workers_min: PositiveInt | None = None
    precision: Precision | None = None  # none: numerics.precision of the study
    checkpoint_every_tokens: PositiveInt | None = None  # none: derived from the run, as for evaluations
    # whichever comes first; none: not by time if tokens are given
    checkpoint_every_minutes: PositiveFloat | None = None
    keep_last: PositiveInt = 2  # checkpoints
    keep_every_tokens: PositiveInt | None = None  # also keep, forever, one checkpoint every this many tokens
    evaluate_every_tokens: PositiveInt | None = None  # for "sync"; none: derived from the run
    # "sync" pauses training; "async" evaluates each newest checkpoint in a Ray task, by [scores] too
    evaluation: Literal["sync", "async"] = "sync"
    evaluator_cpus: Annotated[float, Field(gt=0)] = 1.0  # reserved for "async" before the workers get theirs
    evaluator_gpus: Annotated[float, Field(ge=0)] = 0.0  # likewise
    seed: int = 0  # of weights and data order
    max_failures: Annotated[int, Field(ge=0)] = 2  # lost workers and the like; not faults that would recur
    # "stop" ends the run at a loss that is not finite; "skip" leaves out a batch with a spike; "rollback" also returns to the last
    # checkpoint
    on_spike: Literal["stop", "skip", "rollback"] = "stop"
    spike_threshold: PositiveFloat = 10.0  # robust standard deviations above the median of the last 128 steps
    # skips and rollbacks of a run; a further spike ends it as diverged
    max_interventions: Annotated[int, Field(ge=0)] = 3
    spike_margin_tokens: Annotated[int, Field(ge=0)] = 0  # left out on each side of the batch, after a rollback
    rewarm_tokens: Annotated[int, Field(ge=0)] = 0  # length of the rate's warmup after a rollback
    # "none": every worker has all weights; "zero2": gradients and moments are sharded; "full": weights too; "hybrid": inside a node,
    # with replicas over nodes. "auto", also below, takes the layout with the best predicted step, for plan.accelerator.
    sharding: Sharding | Literal["auto"] = "full"
    shard_ranks: PositiveInt | None = None  # for "hybrid": workers that hold one copy of the model; none: a node's
    tensor_parallel: PositiveInt | Literal["auto"] = 1  # neighbouring workers that share every product of the blocks
    context_parallel: PositiveInt | Literal["auto"] = 1  # neighbouring workers that share every sequence
    # neighbouring workers that share out the experts of each block
    expert_parallel: PositiveInt | Literal["auto"] = 1
    pipeline_parallel: PositiveInt | Literal["auto"] = 1  # groups of workers with different blocks, one after the other
    pipeline_schedule: PipelineSchedule = "1f1b"  # order of the micro-batches in a pipeline
    # parts of a block that its backward pass computes again
    activation_checkpointing: Checkpointing | Literal["auto"] = "none"
    micro_batch: PositiveInt | None = None  # sequences per pass on a worker; none: its share, on a GPU what fits of it
    compile: Compile | None = None  # for each block; none: resources.compile, or "auto" on GPUs if that is off
    # until all workers have joined; also for the first step, which compiles, and for exchanges outside steps
    start_timeout_minutes: PositiveFloat = 30.0
    step_timeout_minutes: PositiveFloat = 10.0  # for a step's collectives, after the first step
    # "first:last": steps that each worker traces
    profile: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None = None
    bundle: bool = True  # at the end, write the run as one directory, if this machine's memory allows
    alarm_after: PositiveInt = 3  # consecutive evaluations outside the band
    on_alarm: Literal["log", "stop"] = "log"  # "stop": save and end the run at an alarm
    webhook: str | None = None  # name of the environment variable with the URL, which is a secret

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if self.workers_min is not None and self.workers_min > self.workers:
            raise ValueError(
                f"promote.workers_min must be at most promote.workers = {self.workers}, got {self.workers_min}"
            )
        if self.on_spike != "rollback":
            for name in ("spike_margin_tokens", "rewarm_tokens"):
                if value := getattr(self, name):
                    raise ValueError(
                        f'promote.{name} is for promote.on_spike = "rollback", got {value} with "{self.on_spike}"'
                    )
        if self.pipeline_parallel != 1 and self.pipeline_schedule in SPLIT_BACKWARD:
            require_whole_graph(self.pipeline_schedule, self.sharding, self.activation_checkpointing)
            if self.compile:
                raise ValueError(
                    f'promote.compile must be false with pipeline_schedule = "{self.pipeline_schedule}", which computes gradients of '
                    f"weights apart; got {self.compile!r}"
                )
        if self.compile and self.expert_parallel not in (1, "auto"):
            raise ValueError(f"promote.{COMPILED_EXPERTS.format(self.expert_parallel)}")
        require_whole_or_fraction("promote", self, ("evaluator_cpus", "evaluator_gpus"))
        if self.profiled_steps and self.profiled_steps[0] > self.profiled_steps[1]:
            raise ValueError(f'promote.profile must be "first:last" with first at most last, got "{self.profile}"')
        if self.webhook is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.webhook):
            raise ValueError(  # leaves out the value, which may be the secret itself
                "webhook must be the name of an environment variable that holds the URL"
            )
        if not self.open_layout:
            layout = self.parallelism
            # raises; a node's ranks are not known yet
            layout.grid(self.workers, node_ranks=layout.sequence_ranks * layout.expert_parallel)
            return self
        groups = {name: ranks for name in GROUPS if (ranks := getattr(self, name)) not in (1, "auto")}
        if len(groups) > 1 and (experts := groups.pop("expert_parallel", None)):
            other, ranks = groups.popitem()
            raise ValueError(f"expert_parallel must be 1 with {other} = {ranks}, got {experts}")
        if self.sharding == "auto" and self.shard_ranks is not None:
            raise ValueError(f'shard_ranks is for sharding = "hybrid", got {self.shard_ranks} with "auto"')
        return self

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last step of `profile`."""
        if self.profile is None:
            return None
        first, last = map(int, self.profile.split(":"))
        return first, last

    @property
    def spike_handling(self) -> dict[str, Any]:
        """Settings that change the results of a run with spikes; max_interventions is not among them."""
        names = ("on_spike", "spike_threshold", "spike_margin_tokens", "rewarm_tokens")
        return {name: getattr(self, name) for name in (names if self.on_spike != "stop" else names[:1])}

    @property
    def spike_policy(self) -> SpikePolicy | None:
        """The full run's response to spikes; None: a loss that is not finite ends the run."""
        if self.on_spike == "stop":
            return None
        return SpikePolicy(
            action=self.on_spike,
            max_interventions=self.max_interventions,
            margin_tokens=self.spike_margin_tokens,
            rewarm_tokens=self.rewarm_tokens,
        )

    @property
    def guard(self) -> GuardSettings | None:
        """Settings that detect spikes; the policy limits the interventions."""
        if self.on_spike == "stop":
            return None
        return GuardSettings(threshold=self.spike_threshold)

    @property
    def open_layout(self) -> tuple[str, ...]:
        """Layout keys that are "auto"."""
        return tuple(name for name in LAYOUT if getattr(self, name) == "auto")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of workers that the run may have, ascending."""
        return self.parallelism.sizes(self.workers_min or self.workers, self.workers)

    @property
    def least_sequences(self) -> int:
        """Least sequences of a batch that all workers share; with an open layout one for each worker."""
        return self.workers if self.open_layout else self.parallelism.least_sequences(self.workers)

    @property
    def parallelism(self) -> Parallelism:
        """The layout over the workers, outside the run's key; raises StageError if a part is "auto", which a promotion chooses."""
        if self.open_layout:
            raise StageError(f'promote.{self.open_layout[0]}: "auto" is for `muscale promote`; set the layout here')
        names = ("sharding", "shard_ranks", *GROUPS, "pipeline_schedule")
        stated: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Parallelism(**stated, checkpointing=cast(Checkpointing, self.activation_checkpointing))
