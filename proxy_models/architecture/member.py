"""A member of a family: its sizes and its counts, plain values that need neither torch nor the family's code."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cattrs.gen import make_dict_unstructure_fn

from proxy_models.serialization import Serializable, converter

if TYPE_CHECKING:
    from proxy_models.architecture.attention import Kernel

NATS = "nats per token"
DROPPED = ("attention_dropout", "mlp_dropout", "embedding_dropout", "stochastic_depth")
"""Fields of a member, if it has them, that are probabilities of being dropped in a training step."""


@dataclass(frozen=True, kw_only=True)
class Member(Serializable, ABC):
    """A model of a family, known by its width and depth.

    Attributes:
        d_model: Width of the residual stream.
        n_layers: Number of blocks.
        vocab_size: Number of token ids.
        context_length: Tokens in one training sequence.
    """

    d_model: int
    n_layers: int
    vocab_size: int = 256
    context_length: int = 128

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "vocab_size", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    @abstractmethod
    def n_params(self) -> int:
        """N of the scaling law: all parameters except those that are only looked up."""

    @property
    @abstractmethod
    def n_params_total(self) -> int:
        """Number of all parameters, embedding tables included."""

    @property
    @abstractmethod
    def train_flops_per_token(self) -> float:
        """Training FLOPs per token, including attention."""

    @property
    def n_params_convention(self) -> str:
        """Parameters that `n_params` counts, in words."""
        if self.n_inactive_params:
            return "parameters that a token uses, without the embedding table"
        return "all parameters but the embedding table"

    @property
    def loss_unit(self) -> str:
        """Unit of the losses that training reports."""
        return NATS

    @property
    def attended(self) -> float:
        """Tokens that a position attends to, masked half included, averaged over blocks; a custom family's: the whole sequence."""
        return self.context_length

    def train_flops_within(self, attended: float | None) -> float:
        """Return training FLOPs per token if attention stays within documents.

        `attended` replaces the property `attended`, as `attended_length` computes it; None: documents are not separated. A
        custom family does not separate documents.
        """
        return self.train_flops_per_token

    @property
    def block_flops(self) -> Sequence[float]:
        """Training FLOPs per token of each block; a custom family's blocks count as equal."""
        readout = 6.0 * self.vocab_size * self.d_model
        return [(self.train_flops_per_token - readout) / self.n_layers] * self.n_layers

    @property
    def n_inactive_params(self) -> int:
        """Parameters of experts that a token is not routed to, in all blocks."""
        return 0

    @property
    def sparsity(self) -> float:
        """Total over active parameters, both without those that are only looked up, as a law of experts has it; 1 if dense."""
        return (self.n_params + self.n_inactive_params) / self.n_params

    @property
    def expert_fields(self) -> Mapping[str, float]:
        """Values of a mixture's experts by the names in `CARRIED_EXPERTS`; empty for other models."""
        return {}

    def expert_sizes(self, base: Member) -> dict[str, float]:
        """Return the sizes of a mixture along each axis of experts, at whose base the others are held; empty for other models."""
        return {}

    @property
    def is_custom(self) -> bool:
        """Whether building the member imports its family and so runs the family's code; False for the built-in decoder."""
        return False

    @property
    def shown_params(self) -> str:
        """N for reading, with the number of all parameters if a token passes only some."""
        return (
            f"{self.n_params:,} active, {self.n_params_total:,} in total"
            if self.n_inactive_params
            else f"{self.n_params:,}"
        )

    @property
    def is_random(self) -> bool:
        """False only if no training step draws random numbers."""
        return True


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of a member, and the unit of its losses, as `Member` has them."""

    n_params: int
    n_params_total: int
    train_flops_per_token: float
    loss_unit: str = NATS
    n_inactive_params: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n_params <= self.n_params_total or not 0 < self.train_flops_per_token < math.inf:
            raise ValueError(f"counts must be positive and finite, n_params at most n_params_total, got {self}")


# Defaults are left out, so that keys of trainings from before these fields existed stay the same.
converter.register_unstructure_hook(Counts, make_dict_unstructure_fn(Counts, converter, _cattrs_omit_if_default=True))


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of the experts of a mixture that ranks may share out.

    Attributes:
        blocks: Number of blocks with experts.
        params: Parameters of all experts of a block.
        entries: Entries of the experts that a token passes in a block.
        width: Numbers of a token in its rows, one row for each expert that it passes.
    """

    blocks: int
    params: int
    entries: int
    width: int


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of a member from which the time of its training step is predicted.

    Attributes:
        block_moves: Numbers that a block's other operations read and write per token in a forward pass, fused as by a compiler.
        attention_width: Width of all attention heads of a block together; 0 without attention.
        table_params: Parameters outside the blocks: embeddings and readout.
        key_width: Width of all key heads of a block together, which ranks that share a sequence exchange.
        experts: Sizes of experts, which the other fields count too; None without any that ranks may share out.
    """

    block_entries: float
    block_moves: float
    attention_width: int
    table_params: int
    key_width: int = 0
    experts: ExpertSizes | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """The kernel that a GPU uses for a member's attention, and the heads of a block."""

    kernel: Kernel
    n_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(Member):
    """A member of a custom family; `Family.member` makes it.

    Attributes:
        family: Qualified name of the family's class, "package.module:Class".
        source: SHA-256 of the files that define the family.
        version: `version` of the class.
        arguments: The family's arguments besides the sizes, as JSON.
        counts: Counts from when the member was made, so that readers never import the family's code.
    """

    family: str
    source: str
    version: str = ""
    arguments: str = "{}"
    counts: Counts

    def __str__(self) -> str:
        return f"width {self.d_model}, depth {self.n_layers} of {self.family}"

    @property
    def is_custom(self) -> bool:
        return True

    @property
    def n_params(self) -> int:
        return self.counts.n_params

    @property
    def n_params_total(self) -> int:
        return self.counts.n_params_total

    @property
    def train_flops_per_token(self) -> float:
        return self.counts.train_flops_per_token

    @property
    def loss_unit(self) -> str:
        return self.counts.loss_unit

    @property
    def n_inactive_params(self) -> int:
        return self.counts.n_inactive_params
