"""The shape of a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, get_args

from cattrs.gen import make_dict_unstructure_fn, override

from proxy_models.architecture.member import DROPPED, Member, ModuleConfig
from proxy_models.serialization import converter

Activation = Literal["swiglu", "gelu", "gelu_tanh", "relu", "relu2"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned", "alibi", "none"]
RouterScores = Literal["sigmoid", "softmax"]
ExpertScheme = Literal["fan_in", "mean_field", "sqrt_gate"]
ExpertAxis = Literal["experts", "granularity", "sparsity"]
ROW_ENTRIES = 8
"""Entries of a row that the grouped product of a GPU takes at once: 16 bytes in bf16."""


def _whole(width: int, ratio: float) -> int | None:
    """Return width * ratio, None if it is no whole number; a decimal ratio such as 2.7 may miss it by its rounding."""
    product = width * ratio
    return round(product) if math.isfinite(product) and math.isclose(product, round(product), rel_tol=1e-12) else None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Member):
    """A pre-norm decoder and its variants; the defaults are the family of today's open models.

    Attributes:
        d_model: A multiple of `head_dim`.
        head_dim: Size of one attention head, the same at every scale, so that width grows in heads.
        queries_per_kv: Query heads that share one key and value head: 1 is multi-head attention, more is grouped-query
            (Ainslie et al., arXiv 2305.13245), all query heads is multi-query (Shazeer, arXiv 1911.02150). The ratio is kept
            when the width grows.
        mlp_ratio: `d_ff / d_model`; the product must be whole, so that the ratio is exact at every width.
        activation: Activation of the MLP: "swiglu" (gated, three matrices), "gelu", "gelu_tanh" (its approximation by tanh, as in
            GPT-2), "relu", or "relu2", its square.
        norm: "rmsnorm" or "layernorm".
        qk_norm: RMSNorm over each head of queries and keys, before the positions (Henry et al., arXiv 2010.04245).
        positions: "rotary", "learned" (absolute, added to the embedding), "alibi", or "none".
        rotary_fraction: Share of each head that is rotated; GPT-NeoX rotates .25 (arXiv 2204.06745, section 2.1).
        rope_theta: Base of the rotary wavelengths, 10,000 in arXiv 2104.09864, section 3.2.2; longer contexts need a larger base,
            Llama 3 has 500,000 (arXiv 2407.21783, section 3.2). Left out of files and hashes at its default.
        parallel: Attention and MLP read the same norm and are added together (Chowdhery et al., arXiv 2204.02311,
            section 2) instead of one after the other.
        tied: The readout is the embedding table.
        biases: True for biases of all matrices but the readout and those of experts, and of LayerNorm.
        attention_dropout: Probability of dropping an attention weight.
        mlp_dropout: Probability of dropping an output of the MLP.
        embedding_dropout: Probability of dropping an entry of the embedded input.
        stochastic_depth: Probability that the last block is skipped for a sequence. The probability rises linearly from 0 at
            the first block, so a single block drops nothing (Huang et al., arXiv 1603.09382).
        label_smoothing: Share of the target spread over all tokens; in the training loss only.
        z_loss: Weight of log²Z in the training loss (arXiv 2204.02311, section 5).
        document_separator: Id of the token that closes documents. Attention then stays within a document, which begins with the
            token that closes the previous document; None: attention reaches over the whole sequence. Left out as
            `rope_theta` is.
        attention_window: Tokens that a position attends to, itself included (Jiang et al., arXiv 2310.06825, section 2), as
            `sliding_window` of transformers counts them; None, or at least the length of the sequence: all tokens so far. It is the
            same at every width and depth, so a proxy whose context is not longer than the window trains without it. The default is
            left out like that of `rope_theta`.
        global_attention_every: With a window, every n-th block attends to all tokens so far (Gemma 3, arXiv 2503.19786, section 2:
            the last of every six); None: no block does. The default is left out like that of `rope_theta`.
        norm_eps: Number that every norm adds to the mean square. GPT-2 and Llama 2 and 3 have 1e-5, Qwen3 1e-6. The default is left
            out like that of `rope_theta`.
        n_experts: Number of MLPs in a block of which a router chooses some for each token (Shazeer et al., arXiv 1701.06538); None:
            one MLP for all tokens. The defaults of this and all later fields are left out like that of `rope_theta`.
        experts_per_token: Number of experts that a token passes, at least 2: the gate of a single expert is constant, so the router
            would learn nothing. No token is dropped.
        expert_ratio: Hidden width of an expert over `d_model`; None: `mlp_ratio`. `granularity` is mlp_ratio / expert_ratio
            (Krajewski et al., arXiv 2402.07871, section 3).
        n_shared_experts: Experts that every token passes in addition (Dai et al., arXiv 2401.06066, section 3.2), computed as one MLP.
        first_dense_layers: Number of first blocks that have an MLP of `mlp_ratio` instead of experts.
        router_scores: "sigmoid" or "softmax" of the router's logits; the scores of a token's experts are divided by their sum.
        balance_rate: Step by which the bias on each expert's score moves towards equal loads (arXiv 2408.15664); 0: no bias moves.
        balance_loss: Weight of the loss that balances loads (Fedus et al., arXiv 2101.03961, eq. 4), computed over each pass.
        router_z_loss: Weight of the mean squared log-sum-exp of the router's logits (Zoph et al., arXiv 2202.08906, eq. 5).
        expert_scheme: How gates and initial values change with the experts (`proxy_models.architecture.parametrization`): "fan_in":
            gates of sum 1, each expert as an MLP of its width; "mean_field": also, with last matrices that grow as experts
            get narrower; "sqrt_gate": square roots of the gates, so that the sum keeps its variance.
    """

    head_dim: int = 16
    queries_per_kv: int = 1
    mlp_ratio: float = 2.75
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    qk_norm: bool = False
    positions: Positions = "rotary"
    rotary_fraction: float = 1.0
    rope_theta: float = 10_000.0
    parallel: bool = False
    tied: bool = False
    biases: bool = False
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    embedding_dropout: float = 0.0
    stochastic_depth: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    document_separator: int | None = None
    attention_window: int | None = None
    global_attention_every: int | None = None
    norm_eps: float = 1e-6
    n_experts: int | None = None
    experts_per_token: int = 2
    expert_ratio: float | None = None
    n_shared_experts: int = 0
    first_dense_layers: int = 0
    router_scores: RouterScores = "sigmoid"
    balance_rate: float = 1e-3
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    expert_scheme: ExpertScheme = "fan_in"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("head_dim", "queries_per_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.head_dim:
            raise ValueError(f"d_model must be a multiple of head_dim={self.head_dim}, got {self.d_model}")
        if self.n_heads % self.queries_per_kv:
            raise ValueError(
                f"queries_per_kv must divide the {self.n_heads} heads of d_model={self.d_model}, got {self.queries_per_kv}"
            )
        if self.mlp_ratio <= 0 or _whole(self.d_model, self.mlp_ratio) is None:
            raise ValueError(f"d_model * mlp_ratio must be a whole number, got {self.d_model} * {self.mlp_ratio}")
        for name, allowed in (("activation", Activation), ("norm", Norm), ("positions", Positions)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}")
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must lie in (0, 1], got {self.rotary_fraction}")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        rotated = _whole(self.head_dim, self.rotary_fraction)
        if self.positions == "rotary" and (rotated is None or rotated % 2):
            raise ValueError(
                f"head_dim * rotary_fraction must be even, because positions rotate pairs, got {self.head_dim} * "
                f"{self.rotary_fraction}"
            )
        for name in (*DROPPED, "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}")
        if self.document_separator is not None and not 0 <= self.document_separator < self.vocab_size:
            raise ValueError(
                f"document_separator must be an id below vocab_size={self.vocab_size}, got {self.document_separator}"
            )
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(f"attention_window must be at least 1, the token itself, got {self.attention_window}")
        for name in ("document_separator", "attention_window"):
            if getattr(self, name) is not None and self.attention_dropout:
                raise ValueError(
                    f"attention_dropout must be 0 with {name}, whose kernels have no dropout, got {self.attention_dropout}"
                )
        if (every := self.global_attention_every) is not None:
            if self.attention_window is None:
                raise ValueError(f"global_attention_every needs an attention_window, got {every} without one")
            if not 2 <= every <= self.n_layers:
                raise ValueError(f"global_attention_every must lie in 2 to n_layers={self.n_layers}, got {every}")
        self._require_experts()

    def _require_experts(self) -> None:
        """Raise ValueError if the fields of a mixture of experts break a rule."""
        if self.n_experts is None:
            for field in (field for field in fields(self) if field.name in _OF_EXPERTS):
                if (value := getattr(self, field.name)) != field.default:
                    raise ValueError(
                        f"{field.name} is a setting of a mixture: without n_experts it would ignore {value!r}"
                    )
            return
        if not 2 <= self.experts_per_token <= self.n_experts:
            raise ValueError(
                f"experts_per_token must lie in 2 to n_experts={self.n_experts} (the gate of one expert would be 1 at any score, "
                f"so its router would learn nothing), got {self.experts_per_token}"
            )
        if not 0 <= self.first_dense_layers < self.n_layers:
            raise ValueError(f"first_dense_layers must lie in 0 to {self.n_layers - 1}, got {self.first_dense_layers}")
        if self.n_shared_experts < 0:
            raise ValueError(f"n_shared_experts must not be negative, got {self.n_shared_experts}")
        hidden = _whole(self.d_model, self._expert_ratio)
        if self.d_model % ROW_ENTRIES or not hidden or hidden < 0 or hidden % ROW_ENTRIES:
            raise ValueError(
                f"d_model and d_model * expert_ratio must be multiples of {ROW_ENTRIES}, so that rows fill 16 bytes in bf16, got "
                f"{self.d_model} and {self.d_model * self._expert_ratio:g}"
            )
        for name, allowed in (("router_scores", RouterScores), ("expert_scheme", ExpertScheme)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}")
        for name in ("balance_rate", "balance_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.d_model // self.head_dim

    @property
    def n_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_heads // self.queries_per_kv

    @property
    def rotary_dim(self) -> int:
        """Coordinates of each head that are rotated."""
        return round(self.head_dim * self.rotary_fraction)

    @property
    def d_ff(self) -> int:
        """Width of the MLP's hidden layer."""
        return round(self.d_model * self.mlp_ratio)

    @property
    def _expert_ratio(self) -> float:
        return self.mlp_ratio if self.expert_ratio is None else self.expert_ratio

    @property
    def expert_width(self) -> int:
        """Width of an expert's hidden layer."""
        return round(self.d_model * self._expert_ratio)

    @property
    def granularity(self) -> float:
        """Width of a dense MLP's hidden layer over an expert's."""
        return self.mlp_ratio / self._expert_ratio

    def is_whole(self, width: int) -> bool:
        """Return whether MLP and experts have whole widths at this `d_model`, and rows of experts the right size."""
        hidden, of_expert = _whole(width, self.mlp_ratio), _whole(width, self._expert_ratio)
        if self.n_experts is None:
            return hidden is not None
        return hidden is not None and of_expert is not None and not (width % ROW_ENTRIES or of_expert % ROW_ENTRIES)

    @property
    def expert_fields(self) -> Mapping[str, float]:
        """Values of a mixture's experts, with the default of `expert_ratio` resolved."""
        if not self.n_experts:
            return {}
        return {
            "n_experts": self.n_experts,
            "experts_per_token": self.experts_per_token,
            "expert_ratio": self._expert_ratio,
            "n_shared_experts": self.n_shared_experts,
        }

    def expert_sizes(self, base: Member) -> dict[str, float]:
        """Return the sizes of this mixture along the axes of `along`, at whose base the others are held.

        Every mixture has one size along each: "experts" counts them at the base's share, size and so on. Other models have none.
        """
        if not (isinstance(base, ModelConfig) and self.n_experts and base.n_experts):
            return {}
        finer = base._expert_ratio / self._expert_ratio
        passed = self.experts_per_token / base.experts_per_token
        return {
            "experts": base.n_experts * passed / finer,
            "granularity": self.granularity,
            "sparsity": self.n_experts / self.experts_per_token,
        }

    def along(self, axis: ExpertAxis, size: float) -> Self:
        """Return the mixture of another size along one axis.

        Along "experts", the number of experts and of those active for a token change alike. Along "granularity", both change, and the
        number of shared experts, as the inverse of an expert's size. Along "sparsity", the number of experts changes alone;
        this axis counts experts, while the property `sparsity` counts parameters.

        Raises:
            ValueError: If this is no mixture, or the number of experts, of those passed, or the size of one is not whole.
        """
        if self.n_experts is None:
            raise ValueError(f"{axis} is an axis of a mixture of experts: set model.n_experts")
        factor = size / self.expert_sizes(self)[axis]
        changed: dict[str, Any] = {"n_experts": self.n_experts * factor}
        if axis != "sparsity":
            changed["experts_per_token"] = self.experts_per_token * factor
        if axis == "granularity":
            changed["expert_ratio"] = self._expert_ratio / factor
            changed["n_shared_experts"] = self.n_shared_experts * factor
        for name in ("n_experts", "experts_per_token", "n_shared_experts"):
            if name in changed and not math.isclose(whole := round(changed[name]), changed[name], rel_tol=1e-9):
                raise ValueError(f"{axis} {size:g} needs a whole {name}, got {changed[name]:g}")
            if name in changed:
                changed[name] = whole
        return replace(self, **changed)

    @property
    def active_share(self) -> float:
        """Share of the routed experts that a token passes; 1 without experts."""
        return self.experts_per_token / self.n_experts if self.n_experts else 1.0

    @property
    def has_penalty(self) -> bool:
        """True if routers add terms to the training loss."""
        return self.balance_loss > 0 or self.router_z_loss > 0

    def is_sparse(self, layer: int) -> bool:
        """Return whether this block has experts."""
        return self.n_experts is not None and layer >= self.first_dense_layers

    def with_blocks(self, n_dense: int, n_sparse: int) -> Self:
        """Return a decoder of so many blocks without and with experts; with a window, all have it."""
        of_experts = {"n_experts": None} | {
            each.name: each.default for each in fields(self) if each.name in _OF_EXPERTS
        }
        return replace(
            self,
            n_layers=n_dense + n_sparse,
            global_attention_every=None,
            **({"first_dense_layers": n_dense} if n_sparse else of_experts),
        )

    @property
    def n_sparse_layers(self) -> int:
        """Number of blocks that have experts."""
        return 0 if self.n_experts is None else self.n_layers - self.first_dense_layers

    def window_of(self, layer: int) -> int | None:
        """Return the most tokens that a position of this block attends to; None: all tokens so far."""
        every = self.global_attention_every
        return None if every is not None and (layer + 1) % every == 0 else self.attention_window

    @property
    def is_random(self) -> bool:
        """True if a training step draws random numbers."""
        dropped = {name for name in DROPPED if getattr(self, name) > 0}
        return bool(dropped - {"stochastic_depth"} if self.n_layers == 1 else dropped)

    @cached_property
    def n_params_by_group(self) -> dict[str, int]:
        """Parameters of each group: embedding, positions, attention, mlp, router, experts, norms, readout.

        A tied table counts as the readout, a shared expert as an MLP.
        """
        width, d_kv = self.d_model, self.n_kv_heads * self.head_dim
        bias = int(self.biases)
        attention = 2 * width * (width + bias) + 2 * d_kv * (width + bias)
        mlp = self._n_up * self.d_ff * (width + bias) + width * (self.d_ff + bias)
        n_sparse, n_experts = self.n_sparse_layers, self.n_experts or 0
        shared = self.n_shared_experts * self._expert_entries
        norm = width * (2 if self.norm == "layernorm" and self.biases else 1)
        norms_per_block = norm * (1 if self.parallel else 2) + (2 * self.head_dim if self.qk_norm else 0)
        table = self.vocab_size * width
        return {
            "embedding": 0 if self.tied else table,
            "positions": self.context_length * width if self.positions == "learned" else 0,
            "attention": self.n_layers * attention,
            "mlp": (self.n_layers - n_sparse) * mlp + n_sparse * shared,
            "router": n_sparse * n_experts * width,
            "experts": n_sparse * n_experts * self._expert_entries,
            "norms": self.n_layers * norms_per_block + norm,
            "readout": table,
        }

    @property
    def _n_up(self) -> int:
        """Matrices of an MLP that read the stream."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def _expert_entries(self) -> int:
        """Entries of one expert's matrices."""
        return (self._n_up + 1) * self.d_model * self.expert_width

    @property
    def n_params_total(self) -> int:
        return sum(self.n_params_by_group.values())

    @property
    def n_params(self) -> int:
        """N of the scaling law: all parameters that a token uses, except those that are only looked up.

        Of the experts only those count that one token passes. The embedding table and learned positions do not count, since a look-up
        costs no floating-point operation. The readout is a matrix product and counts, so a tied table counts once. With this N,
        C = 6·N·D matches the computation (Porian et al., arXiv 2406.19146, section 3.1, show that leaving the readout out bends the
        law at small sizes).
        """
        groups = self.n_params_by_group
        return self.n_params_total - groups["embedding"] - groups["positions"] - self.n_inactive_params

    @property
    def n_inactive_params(self) -> int:
        """Parameters of the experts that a token does not pass."""
        of_experts = self.n_params_by_group["experts"]
        return of_experts - round(of_experts * self.active_share)

    @property
    def n_matrix_entries(self) -> int:
        """Entries of the blocks' weight matrices that a token uses: attention, MLP, router and chosen experts, without biases."""
        width, d_kv, n_sparse = self.d_model, self.n_kv_heads * self.head_dim, self.n_sparse_layers
        dense, sparse = self._mlp_entries
        return self.n_layers * 2 * width * (width + d_kv) + (self.n_layers - n_sparse) * dense + n_sparse * sparse

    @property
    def _mlp_entries(self) -> tuple[int, int]:
        """Entries that a token uses of an MLP, and of a router with its experts."""
        n_passed = self.experts_per_token + self.n_shared_experts
        dense = (self._n_up + 1) * self.d_model * self.d_ff
        return dense, (self.n_experts or 0) * self.d_model + n_passed * self._expert_entries

    @property
    def train_flops_per_token(self) -> float:
        """Training FLOPs per token, exact for the matrix products: 6 for each matrix entry, plus attention's.

        Attention takes 12·n_layers·attended·d_model: two products forward and four backward, including the masked half
        (Chowdhery et al., arXiv 2204.02311, appendix B). Without a window, `attended` is the context. The law's C is 6·N·D, without
        attention.
        """
        return self.train_flops_within(None)

    def train_flops_within(self, attended: float | None) -> float:
        """Return `train_flops_per_token` with this mean of `attended_within` over documents; None: documents are not separated."""
        products = self.n_matrix_entries + self.vocab_size * self.d_model
        length = self.attended if attended is None else attended
        return 6.0 * products + 12.0 * self.n_layers * length * self.d_model

    @property
    def block_flops(self) -> Sequence[float]:
        """Training FLOPs per token of each block, with the mean of all blocks' attention."""
        mean, n_dense = super().block_flops[0], self.first_dense_layers
        dense, sparse = (6.0 * entries for entries in self._mlp_entries)
        n_sparse = self.n_sparse_layers
        apart = (dense - sparse) / self.n_layers if n_dense else 0.0
        return [mean + n_sparse * apart] * n_dense + [mean - n_dense * apart] * (self.n_layers - n_dense)

    @property
    def attended(self) -> float:
        return self.attended_within(self.context_length)

    def attended_within(self, length: int) -> float:
        """Return the tokens that attention is counted over in a document of `length` tokens, averaged over blocks.

        The masked half counts: `length` without a window, and w·(2 - w / length) in a block with a window of w tokens.
        """
        n_global = self.n_layers // self.global_attention_every if self.global_attention_every else 0
        n_local = 0 if self.attention_window is None else self.n_layers - n_global
        beyond = max(0, length - (self.attention_window or length))
        return length - n_local / self.n_layers * beyond**2 / length


_LATER = [field.name for field in fields(ModelConfig)]
_LATER = ["rope_theta", *_LATER[_LATER.index("document_separator") :]]
_OF_EXPERTS = _LATER[_LATER.index("n_experts") + 1 :]
_LEFT_OUT: dict[str, Any] = {name: override(omit_if_default=True) for name in _LATER}
# Later fields are left out at their defaults, so that older keys stay the same.
converter.register_unstructure_hook(ModelConfig, make_dict_unstructure_fn(ModelConfig, converter, **_LEFT_OUT))


def as_decoder(member: Member) -> ModelConfig:
    """Return the member as a decoder's shape, for code that supports only decoders; raise ValueError if its family is another."""
    if not isinstance(member, ModelConfig):
        raise ValueError(f"this is only for the built-in decoder, got {member}")
    return member


def _read(values: Any, _: type[Member]) -> Member:
    return converter.structure(values, ModuleConfig if "family" in values else ModelConfig)


# A member is written as its actual class, and read as a decoder if it names no family.
converter.register_unstructure_hook(Member, lambda member: converter.unstructure(member, unstructure_as=type(member)))
converter.register_unstructure_hook(ModuleConfig, make_dict_unstructure_fn(ModuleConfig, converter))
converter.register_structure_hook_func(lambda kind: kind is Member, _read)
