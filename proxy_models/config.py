"""The shape of a model, and the family that a study scales."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder: RMSNorm, rotary positions, causal attention, SwiGLU, untied readout, no biases.

    Attributes:
        d_model: Width of the residual stream; a multiple of `head_dim`.
        n_layers: Number of blocks (depth).
        head_dim: Size of one attention head, even (rotary rotates pairs) and the same at every scale,
            so that width grows in heads.
        mlp_ratio: `d_ff / d_model`; the product must be whole, so that the ratio is exact at every width.
        vocab_size: Number of token ids.
        context_length: Tokens in one training sequence.
    """

    d_model: int
    n_layers: int
    head_dim: int = 16
    mlp_ratio: float = 2.75
    vocab_size: int = 256
    context_length: int = 128

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "head_dim", "vocab_size", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.d_model % self.head_dim:
            raise ValueError(f"d_model must be a multiple of head_dim={self.head_dim}, got {self.d_model}")
        if self.mlp_ratio <= 0 or not float(self.d_model * self.mlp_ratio).is_integer():
            raise ValueError(f"d_model * mlp_ratio must be a whole number, got {self.d_model} * {self.mlp_ratio}")

    @property
    def n_heads(self) -> int:
        """Number of attention heads."""
        return self.d_model // self.head_dim

    @property
    def d_ff(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.d_model * self.mlp_ratio)

    @cached_property
    def n_params_by_group(self) -> dict[str, int]:
        """Parameters of each group: embedding, attention, mlp, norms, readout."""
        return {
            "embedding": self.vocab_size * self.d_model,
            "attention": self.n_layers * 4 * self.d_model**2,
            "mlp": self.n_layers * 3 * self.d_model * self.d_ff,
            "norms": (2 * self.n_layers + 1) * self.d_model,
            "readout": self.vocab_size * self.d_model,
        }

    @property
    def n_params_total(self) -> int:
        """Every parameter, the embedding table included."""
        return sum(self.n_params_by_group.values())

    @property
    def n_params(self) -> int:
        """The N of the scaling law: every parameter but the embedding table.

        The table is a look-up and costs no floating-point operation; the readout is a product and counts. With this N,
        C = 6·N·D counts what is computed (Porian et al., arXiv 2406.19146, section 3.1, show that leaving the readout
        out bends the law at small sizes).
        """
        return self.n_params_total - self.n_params_by_group["embedding"]

    @property
    def train_flops_per_token(self) -> float:
        """Training FLOPs per token with attention: 6·N plus 12·n_layers·context_length·d_model.

        The second term counts the two attention products forward and twice backward, the masked half included, as
        PaLM does (Chowdhery et al., arXiv 2204.02311, appendix B). The law's C is 6·N·D, without it.
        """
        return 6.0 * self.n_params + 12.0 * self.n_layers * self.context_length * self.d_model

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model with its width and depth left open; hyperparameters are tuned at the base and carried from it."""

    base: ModelConfig

    def at(self, *, width: int | None = None, depth: int | None = None) -> ModelConfig:
        """The member of this width and depth; what is not named stays as in the base.

        Raises:
            ValueError: If the shape breaks a rule of `ModelConfig`.
        """
        return replace(
            self.base,
            d_model=self.base.d_model if width is None else width,
            n_layers=self.base.n_layers if depth is None else depth,
        )

    def for_params(self, n_params: float, *, depth: int | None = None) -> ModelConfig:
        """The member whose `n_params` is nearest to the wanted one in ratio, by width in whole heads."""
        if n_params <= 0:
            raise ValueError(f"n_params must be positive, got {n_params}")
        head_dim = self.base.head_dim
        below = self.at(width=head_dim, depth=depth)
        while (above := self.at(width=below.d_model + head_dim, depth=depth)).n_params < n_params:
            below = above
        return min((below, above), key=lambda member: max(member.n_params / n_params, n_params / member.n_params))

    def to_dict(self) -> dict[str, Any]:
        """The base shape as plain values."""
        return self.base.to_dict()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        return cls(base=ModelConfig(**values))
