"""Layout of a full run over its ranks: plain numbers and rules, without torch.

The layout does not enter a run's identity: losses agree up to rounding, and any layout can resume a checkpoint of any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from proxy_models.architecture.families import family_of
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Checkpointing, Sharding
from proxy_models.architecture.pipeline_counts import PipelineShare
from proxy_models.architecture.stage_layout import (
    SPLIT_BACKWARD,
    PipelineSchedule,
    least_micro_batches,
    micro_batches,
    n_stages,
)

COMPILED_EXPERTS = "compile must be false with expert_parallel = {}, whose numbers of rows change from step to step"


def require_whole_graph(schedule: PipelineSchedule, sharding: str, checkpointing: str) -> None:
    """Refuse weights that are freed after a forward pass, and recomputation, under a schedule of `SPLIT_BACKWARD`; raise ValueError.

    torch finds a stage's weights before the backward pass gathers them again, so their gradients would be lost. It would recompute
    a block for both kinds of gradients, which it refuses for "selective" and which costs more than the schedule gains for "full".
    """
    apart = f'with pipeline_schedule = "{schedule}", which computes gradients of weights apart'
    if sharding in ("full", "hybrid"):
        raise ValueError(
            f'sharding must be "none" or "zero2" {apart} and needs gathered weights for that; got "{sharding}"'
        )
    if checkpointing in ("selective", "full"):
        raise ValueError(
            f'activation_checkpointing must be "none" {apart} and would recompute blocks twice; got "{checkpointing}"'
        )


class RankGrid(NamedTuple):
    """Ranks of a run along the four dimensions of its layout; the last index runs fastest.

    Ranks that share a sequence are neighbours along replicas and shards, and count as such.
    """

    stages: int
    replicas: int
    shards: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Layout of a run over its ranks.

    Ranks form a grid (stages, replicas, shards, tensor) whose last index runs fastest: neighbouring ranks share a product, and
    neighbouring groups of them a sequence.

    Attributes:
        sharding: "none": every replica has all weights, gradients are averaged; "zero2": gradients and moments are sharded, weights
            are gathered once a step and stay until its end; "full": weights are gathered for each block, forward and backward
            (Rajbhandari et al., arXiv 1910.02054, section 5); "hybrid": "full" inside a node, "none" over nodes.
        shard_ranks: For "hybrid": ranks that hold one copy of the model together; None: the ranks of a node.
        tensor_parallel: Ranks that share every product: queries, keys, values, the MLP's first matrices, embedding and readout are
            cut by rows, the others by columns (Shoeybi et al., arXiv 1909.08053, section 3); the loss by the tokens of a rank's
            logits, norms and residual sums by positions (Korthikanti et al., arXiv 2205.05198, section 4.2).
        context_parallel: Ranks that share every sequence, each with its own positions, and gather keys and values (Llama Team,
            arXiv 2407.21783, section 3.3.2). Weights are sharded over them too.
        expert_parallel: Neighbouring ranks that each have some of a block's experts, for the tokens of all of them (Lepikhin et al.,
            arXiv 2006.16668, section 3). The ranks that have the same experts shard and replicate these as `sharding` says.
        pipeline_parallel: Ranks that have different blocks and pass activations on, by micro-batches (Narayanan et al.,
            arXiv 2104.04473). "full" and "hybrid" gather a block again for every micro-batch, "none" and "zero2" once a step.
        pipeline_schedule: Order of a rank's micro-batches; all but "gpipe" and "1f1b" give it two stages. `SPLIT_BACKWARD` needs
            "none" or "zero2", and no checkpointing.
        checkpointing: Values that a block keeps for its backward pass.
    """

    sharding: Sharding = "full"
    shard_ranks: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.splits_backward:
            require_whole_graph(self.pipeline_schedule, self.sharding, self.checkpointing)
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            if self.expert_parallel > 1 and (value := getattr(self, name)) > 1:
                raise ValueError(f"expert_parallel must be 1 with {name} = {value}, got {self.expert_parallel}")
        if self.shard_ranks is None:
            return
        if self.sharding != "hybrid":
            raise ValueError(f'shard_ranks is for sharding = "hybrid", got {self.shard_ranks} with "{self.sharding}"')
        if self.shard_ranks < 1 or self.shard_ranks % self.sequence_ranks:
            raise ValueError(
                f"shard_ranks must be a multiple of {self._names} = {self.sequence_ranks}, got {self.shard_ranks}"
            )

    @property
    def sequence_ranks(self) -> int:
        """Ranks of a stage that compute one sequence together."""
        return self.tensor_parallel * self.context_parallel

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes gradients of weights apart, which torch can't do with compiled blocks."""
        return self.pipeline_parallel > 1 and self.pipeline_schedule in SPLIT_BACKWARD

    @property
    def can_compile(self) -> bool:
        """Whether blocks can be compiled: not with a backward pass in two parts, nor with as many rows as experts were chosen for."""
        return not self.splits_backward and self.expert_parallel == 1

    @property
    def _names(self) -> str:
        return "tensor_parallel" + (" · context_parallel" if self.context_parallel > 1 else "")

    def layout_errors(self, model: Member) -> Iterator[str]:
        """Reasons why that many ranks can't share the model's blocks and products, each with rule and value."""
        family = family_of(model)
        if self.pipeline_parallel > 1:
            stages = n_stages(self.pipeline_schedule, self.pipeline_parallel)
            if model.n_layers < stages:
                yield (
                    f'pipeline_parallel = {self.pipeline_parallel} with pipeline_schedule = "{self.pipeline_schedule}" needs a '
                    f"block for each of {stages} stages, got n_layers={model.n_layers}"
                )
            for reason in family.stage_errors(model):
                yield f"pipeline_parallel must be 1 {reason}, got {self.pipeline_parallel}"
        if (n := self.context_parallel) > 1:
            yield from (
                f"context_parallel must {rule}, got {n}"
                for rule in family.context_rules(model, n, self.tensor_parallel)
            )
        if (n := self.expert_parallel) > 1:
            if not (experts := family.n_shared_out(model)):
                yield f"expert_parallel must be 1 for a model without experts that ranks share out, got {n}"
            elif experts % n:
                yield f"expert_parallel must divide the {experts} experts of a block (n_experts), got {n}"
        if (n := self.tensor_parallel) == 1:
            return
        sizes = family.shared_sizes(model)
        if not sizes:
            yield f"tensor_parallel must be 1 for a family that does not define how ranks share its products, got {n}"
        for what, size in sizes.items():
            if size % n:
                yield f"tensor_parallel must divide the {size} {what} of d_model={model.d_model}, got {n}"
        yield from (f"tensor_parallel must be 1 {reason}, got {n}" for reason in family.sharing_errors(model))

    def require(self, model: Member) -> None:
        """Refuse a model that does not fit this layout; raise ValueError naming every broken rule."""
        if reasons := list(self.layout_errors(model)):
            raise ValueError("; ".join(reasons))

    def unfit(
        self,
        world_size: int,
        *,
        sequences: int | None = None,
        doublings: int = 0,
        micro_batch: int | None = None,
        node_ranks: int | None = None,
    ) -> Iterator[str]:
        """Reasons against a number of ranks, each with rule and value.

        Args:
            sequences: Sequences in the smallest batch, if known; shares of a batch may differ by one, but not those of pipelines.
            doublings: Number of times that the batch doubles.
            micro_batch: Most sequences of a pipeline's micro-batch; None: any number.
            node_ranks: Ranks on each node, if known; "hybrid" uses them if `shard_ranks` is None.
        """
        group, stages = self.sequence_ranks, self.pipeline_parallel
        names = self._names + (" · pipeline_parallel" if stages > 1 else "")
        if world_size % (group * stages):
            yield f"{names} must divide the {world_size} ranks, got {group * stages}"
            return
        of_stage, shares = world_size // stages, self.data_ranks(world_size)
        together = (self.shard_ranks or node_ranks) if self.sharding == "hybrid" else None
        if together and (together % group or of_stage % together):
            yield (
                f"a node's ranks, or shard_ranks, must divide the {of_stage} ranks{' of a stage' if stages > 1 else ''} and be a "
                f"multiple of {self._names} = {group}, got {together}"
            )
        of_model = together or world_size
        if self.expert_parallel > 1 and of_model % self.expert_parallel:
            yield f"expert_parallel must divide the {of_model} ranks of a copy of the model, got {self.expert_parallel}"
        if sequences is None:
            return
        if shares > sequences:
            groups = f" in groups of {names} = {group * stages}" if group * stages > 1 else ""
            yield f"{world_size} ranks{groups} need a sequence of a batch for each share, got {sequences}"
        elif stages > 1:
            of_share = [(sequences << n) // shares for n in range(doublings + 1)]
            most = micro_batch or max(of_share)
            if sequences % shares or not all(
                micro_batches(self.pipeline_schedule, stages, share, most=most) for share in of_share
            ):
                yield (
                    f'pipeline_parallel = {stages} with pipeline_schedule = "{self.pipeline_schedule}" needs equal micro-batches '
                    f"for each of {shares} shares, at least one for each rank of the pipeline, got {sequences} sequences"
                    + (f", doubled {doublings} times" if doublings else "")
                    + (f", and micro_batch = {micro_batch}" if micro_batch else "")
                )

    def sizes(self, least: int, most: int) -> tuple[int, ...]:
        """Numbers of ranks from `least` to `most` that fit the layout."""
        return tuple(size for size in range(least, most + 1) if not any(self.unfit(size)))

    def grid(self, world_size: int, *, node_ranks: int | None = None) -> RankGrid:
        """Stages, replicas of each, shards of a replica, and ranks that share the products of each shard.

        Args:
            node_ranks: Ranks on each node; "hybrid" uses them if `shard_ranks` is None.

        Raises:
            ValueError: If that many ranks form no such grid.
        """
        if reasons := list(self.unfit(world_size, node_ranks=node_ranks)):
            raise ValueError("; ".join(reasons))
        stages, tensor = self.pipeline_parallel, self.tensor_parallel
        data = self.data_ranks(world_size) * self.context_parallel
        if self.sharding != "hybrid":
            replicas, shards = (data, 1) if self.sharding == "none" else (1, data)
            return RankGrid(stages, replicas, shards, tensor)
        together = self.shard_ranks or node_ranks
        if together is None:
            raise ValueError(
                'sharding = "hybrid" needs shard_ranks if the launcher does not report the ranks of a node'
            )
        return RankGrid(stages, world_size // stages // together, together // tensor, tensor)

    def memory_conditions(self, grid: RankGrid, sequences: int = 0) -> dict[str, Any]:
        """Arguments that describe the layout in a memory estimate, for a rank of the grid.

        Args:
            sequences: Sequences of a rank's share of the batch. Only a pipeline, which has buffers for all of them, needs the number.
        """
        conditions: dict[str, Any] = {
            "sharding": self.sharding,
            "world_size": grid.replicas if self.sharding == "none" else grid.shards,
            "tensor_parallel": self.tensor_parallel,
            "context_parallel": self.context_parallel,
            "checkpointing": self.checkpointing,
        }
        if self.expert_parallel > 1:
            conditions["expert_parallel"] = self.expert_parallel
        pipeline = self.pipeline(sequences)
        return conditions | {"pipeline": pipeline} if pipeline else conditions

    def pipeline(self, sequences: int, *, doublings: int = 0) -> PipelineShare | None:
        """The pipeline that trains on so many sequences of the smallest batch; None if every rank has the whole model."""
        if self.pipeline_parallel == 1:
            return None
        return PipelineShare(
            schedule=self.pipeline_schedule,
            ranks=self.pipeline_parallel,
            sequences=sequences,
            doublings=doublings,
        )

    def least_sequences(self, world_size: int) -> int:
        """Least sequences of a batch for so many ranks, which must fit the layout: one for each share, or micro-batch of a share."""
        stages = self.pipeline_parallel
        of_share = least_micro_batches(self.pipeline_schedule, stages) if stages > 1 else 1
        return self.data_ranks(world_size) * of_share

    def data_ranks(self, world_size: int) -> int:
        """Number of shares that a batch is cut into; the number of ranks must fit the layout."""
        return world_size // self.sequence_ranks // self.pipeline_parallel
