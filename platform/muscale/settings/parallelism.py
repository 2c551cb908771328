"""Layout of a full run over its ranks: plain numbers and rules, without torch.

None of it enters a run's identity: the losses are the same but for rounding, and a checkpoint of one layout is resumed by any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Checkpointing, Sharding


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The layout of a run.

    Ranks form a grid (replicas, shards, tensor), of which the last runs fastest: neighbours share a product.

    Attributes:
        sharding: "none": every replica has all weights, gradients are averaged; "zero2": gradients and moments are cut, weights
            are gathered once a step and stay until its end; "full": weights are gathered for each block, forward and backward
            (Rajbhandari et al., arXiv 1910.02054, section 5); "hybrid": "full" inside a node, "none" over nodes.
        shard_ranks: Of "hybrid": ranks that one copy of the model lies on, such as those of a node, which it is where None.
        tensor_parallel: Ranks that share every product: queries, keys, values, the MLP's first matrices, embedding and readout by
            their rows, the others by their columns (Shoeybi et al., arXiv 1909.08053, section 3); the loss by the tokens of a
            rank's logits, norms and residual sums by positions (Korthikanti et al., arXiv 2205.05198, section 4.2).
        checkpointing: What a block keeps for its backward pass.
    """

    sharding: Sharding = "full"
    shard_ranks: int | None = None
    tensor_parallel: int = 1
    checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be at least 1, got {self.tensor_parallel}")
        if self.shard_ranks is None:
            return
        if self.sharding != "hybrid":
            raise ValueError(f'shard_ranks is for sharding = "hybrid", got {self.shard_ranks} with "{self.sharding}"')
        if self.shard_ranks < 1 or self.shard_ranks % self.tensor_parallel:
            raise ValueError(
                f"shard_ranks must be a multiple of tensor_parallel = {self.tensor_parallel}, got {self.shard_ranks}"
            )

    def layout_errors(self, model: Member) -> Iterator[str]:
        """Reasons why so many ranks can't share the model's products, each with its rule and value."""
        n = self.tensor_parallel
        if not isinstance(model, ModelConfig):
            if n > 1:
                yield f"tensor_parallel must be 1 for a family without a plan of who computes what, got {n}"
            return
        for what, size in (
            ("query heads", model.n_heads),
            ("key and value heads", model.n_kv_heads),
            ("columns of the MLP (d_ff)", model.d_ff),
            ("positions of a sequence (context_length)", model.context_length),
        ):
            if size % n:
                yield f"tensor_parallel must divide the {size} {what} of d_model={model.d_model}, got {n}"
        for name in ("embedding_dropout", "attention_dropout", "mlp_dropout"):
            if n > 1 and getattr(model, name):
                yield f"tensor_parallel must be 1 with {name}, got {n}: ranks would drop the same of their own heads and positions"

    def require(self, model: Member) -> None:
        """Refuse a model that this layout does not fit.

        Raises:
            ValueError: Naming every rule that is broken.
        """
        if reasons := list(self.layout_errors(model)):
            raise ValueError("; ".join(reasons))

    def unfit(self, world_size: int, *, sequences: int | None = None, node_ranks: int | None = None) -> Iterator[str]:
        """Reasons against so many ranks, each with its rule and value.

        Args:
            sequences: Of the smallest batch, where it is known; shares of it may differ by one.
            node_ranks: Ranks on each node, where they are known, which "hybrid" goes by where `shard_ranks` is None.
        """
        tensor = self.tensor_parallel
        if world_size % tensor:
            yield f"tensor_parallel must divide the {world_size} ranks, got {tensor}"
            return
        together = (self.shard_ranks or node_ranks) if self.sharding == "hybrid" else None
        if together and (together % tensor or world_size % together):
            yield (
                f"a node's ranks, or shard_ranks, must divide the {world_size} ranks and be a multiple of tensor_parallel = "
                f"{tensor}, got {together}"
            )
        if sequences is not None and world_size // tensor > sequences:
            yield (
                f"{world_size} ranks{f' in groups of tensor_parallel = {tensor}' if tensor > 1 else ''} need a sequence of a "
                f"batch for each share, got {sequences}"
            )

    def sizes(self, least: int, most: int) -> tuple[int, ...]:
        """Numbers of ranks from `least` to `most` that the run can be laid over."""
        return tuple(size for size in range(least, most + 1) if not any(self.unfit(size)))

    @property
    def takes_any_size(self) -> bool:
        """Whether any number of ranks works."""
        return self.tensor_parallel == 1 and self.sharding != "hybrid"

    def grid(self, world_size: int, *, node_ranks: int | None = None) -> tuple[int, int, int]:
        """Replicas, shards of each, and ranks that share the products of each shard.

        Args:
            node_ranks: Ranks on each node, which "hybrid" goes by where `shard_ranks` is None.

        Raises:
            ValueError: If they are no such grid.
        """
        if reasons := list(self.unfit(world_size, node_ranks=node_ranks)):
            raise ValueError("; ".join(reasons))
        tensor, data = self.tensor_parallel, self.data_ranks(world_size)
        if self.sharding != "hybrid":
            return (data, 1, tensor) if self.sharding == "none" else (1, data, tensor)
        together = self.shard_ranks or node_ranks
        if together is None:
            raise ValueError(
                'sharding = "hybrid" needs shard_ranks where the launcher does not tell the ranks of a node'
            )
        return world_size // together, together // tensor, tensor

    def memory_conditions(self, replicas: int, shards: int) -> dict[str, Any]:
        """Arguments that an estimate of memory takes of the layout, for a rank of a grid of so many replicas and shards."""
        return {
            "sharding": self.sharding,
            "world_size": replicas if self.sharding == "none" else shards,
            "tensor_parallel": self.tensor_parallel,
            "checkpointing": self.checkpointing,
        }

    def data_ranks(self, world_size: int) -> int:
        """Shares that a batch is cut into, of a number of ranks that fits."""
        return world_size // self.tensor_parallel
