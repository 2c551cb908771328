"""The built-in decoder as a family. Torch is imported only when a decoder is built."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, cast

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_memory import evaluation_memory, fitting, training_memory
from proxy_models.architecture.family import Family, Loss, fixed_by
from proxy_models.architecture.member import AttentionKernel, ExpertSizes, Member, StepSizes
from proxy_models.architecture.memory import Checkpointing, MemoryEstimate, Precision
from proxy_models.architecture.parametrization import (
    ForwardMultipliers,
    Parametrization,
    TableOptions,
    TensorClass,
    decoder_shapes,
    parametrize,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from proxy_models.architecture.decoder import Block, Decoder

MOST_SIZES = 4096
"""Members that `between` lists: a budget of 1e20 FLOPs needs 2,800; beyond, one group of heads more is hardly another width."""
_MODULE = re.compile(r"^blocks\.\d+\.|\.(weight|bias)$")
"""Parts of a parameter's name beyond the name of its module within a block."""


@dataclass(frozen=True, kw_only=True)
class DecoderFamily(Family):
    """Decoders that differ from `config` in width and depth; their table and counts are formulas, not comparisons of models."""

    branch_ends: ClassVar[tuple[str, ...]] = ("attention.output", "mlp.down", "mlp.experts.down", "mlp.shared.down")
    state_buffers: ClassVar[tuple[str, ...]] = ("balance_bias",)

    config: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        return cls(vocab_size=config.vocab_size, context_length=config.context_length, config=config)

    def build(self, width: int, depth: int) -> Decoder:
        from proxy_models.architecture.decoder import Decoder

        return Decoder(self.member(width, depth))

    @property
    def training_loss(self) -> Loss:
        """Training loss with label smoothing and z-loss."""
        from proxy_models.architecture.decoder import training_loss

        return training_loss

    @property
    def evaluation_loss(self) -> Loss:
        """Mean cross-entropy, computed inside the readout's module."""
        from proxy_models.architecture.decoder import next_token_loss

        return next_token_loss

    @property
    def has_weighted_losses(self) -> bool:
        """True."""
        return True

    def write_constants(self, model: nn.Module, width: int, depth: int) -> None:
        """Write the constants of the config without building another decoder."""
        cast("Decoder", model).write_constants()

    def end_step(
        self, model: nn.Module, member: Member, *, taken: bool | Tensor, mean: Callable[[Tensor], Tensor]
    ) -> Mapping[str, Tensor]:
        """Balance the experts' loads (`proxy_models.architecture.experts.balance`)."""
        if self.config.n_experts is None:
            return {}
        from proxy_models.architecture.experts import balance

        return balance(model, cast(ModelConfig, member), taken=taken, mean=mean)

    def compile_block(self, block: nn.Module, *, outside_recomputing: bool) -> None:
        """Compile a block, or under full checkpointing the function that it recomputes."""
        decoder_block = cast("Block", block)
        if outside_recomputing and decoder_block.checkpointing == "full":
            decoder_block.compile_recomputed()
        else:
            block.compile(dynamic=False)

    def compile_loss(self, model: nn.Module) -> None:
        """Compile the readout's computation on a chunk of logits."""
        cast("Decoder", model).readout.compiled = True

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks, and the embedding and readout if they are not tied; learned positions belong to the rest."""
        decoder = cast("Decoder", model)
        return [*decoder.blocks, *(() if self.config.tied else (decoder.embedding, decoder.readout))]

    def fitting(self, member: Member, sequences: int, **limits: Any) -> tuple[int | None, Checkpointing]:
        """Return the micro-batch and checkpointing that fit by the estimate of `proxy_models.architecture.decoder_memory`."""
        return fitting(cast(ModelConfig, member), sequences, **limits)

    def is_tied(self, member: Member) -> bool:
        """Whether the config ties the readout to the embedding."""
        return self.config.tied

    def fixed_hyperparameters(self, member: Member) -> Mapping[str, str]:
        """Return those of a tied table; learned positions have the rate of embeddings."""
        tables = {TensorClass.TIED} if self.config.tied else {TensorClass.EMBEDDING, TensorClass.READOUT}
        return fixed_by(tables | ({TensorClass.EMBEDDING} if self.config.positions == "learned" else set()))

    @property
    def position_base(self) -> float | None:
        """`rope_theta` of rotary positions."""
        return self.config.rope_theta if self.config.positions == "rotary" else None

    @property
    def attention_window(self) -> int | None:
        """Window of the config."""
        return self.config.attention_window

    def training_memory(self, member: Member, **conditions: Any) -> MemoryEstimate:
        """Return the estimate of `proxy_models.architecture.decoder_memory`."""
        return training_memory(cast(ModelConfig, member), **conditions)

    def evaluation_memory(
        self, member: Member, sequences: int, training: MemoryEstimate, precision: Precision, **layout: Any
    ) -> int:
        """Return the bound of `proxy_models.architecture.decoder_memory`."""
        return evaluation_memory(cast(ModelConfig, member), sequences, training, precision, **layout)

    def step_sizes(self, member: Member) -> StepSizes:
        """Return the sizes of a block and of the tables.

        A block moves two norms (one read, one write each), two residual sums (two reads, one write each), rotated queries and
        keys, and the activation of the MLP. With experts it also sorts a token's rows and sorts them back (one read and one write
        each) and sums them (one read), and the router reads the token in fp32, twice as wide (two reads, one write). Sizes are means
        over blocks; a token's products are those of the experts that it passes.
        """
        model = cast(ModelConfig, member)
        gate, n_sparse = 3 if model.activation == "swiglu" else 2, model.n_sparse_layers
        groups = model.n_params_by_group
        hidden = (model.n_layers - n_sparse) * model.d_ff
        rows, experts = 0, None
        if n_sparse:
            experts = ExpertSizes(
                blocks=n_sparse,
                params=groups["experts"] // n_sparse,
                entries=round(groups["experts"] * model.active_share) // n_sparse,
                width=model.experts_per_token * model.d_model,
            )
            hidden += n_sparse * (model.experts_per_token + model.n_shared_experts) * model.expert_width
            rows = 5 * n_sparse * (model.experts_per_token + 1) * model.d_model
        return StepSizes(
            block_entries=model.n_matrix_entries / model.n_layers,
            block_moves=12 * model.d_model
            + 2 * model.n_kv_heads * model.head_dim
            + (gate * hidden + rows) / model.n_layers,
            attention_width=model.d_model,
            key_width=model.n_kv_heads * model.head_dim,
            table_params=groups["embedding"] + groups["positions"] + groups["readout"],
            experts=experts,
        )

    def attention_kernel(self, member: Member, dtype: torch.dtype, *, context_parallel: int = 1) -> AttentionKernel:
        """Return the kernel of `attend`; where a kernel lacks grouped heads, `attend` expands them."""
        from proxy_models.architecture.attention import cuda_kernel

        model = cast(ModelConfig, member)
        kernel = cuda_kernel(
            dtype,
            model.head_dim,
            biased=model.positions == "alibi",
            grouped=False,
            sparse=model.document_separator is not None
            or model.attended < model.context_length
            or context_parallel > 1,
        )
        return AttentionKernel(kernel=kernel, n_heads=model.n_heads, head_dim=model.head_dim)

    def absorbed(self, member: Member, multipliers: ForwardMultipliers) -> Mapping[str, float]:
        """Return the factors by which weights absorb the multipliers; every activation of the residual stream stays the same.

        | multiplier       | is multiplied into                                                               |
        | ---------------- | -------------------------------------------------------------------------------- |
        | embedding        | the embedding table                                                              |
        | attention logits | the query projection, or with qk-norm the gain of the queries' norm              |
        | residual branch  | the last projections of a branch: attention's output, down of MLP and experts    |
        | readout          | the readout; if tied, divided by the embedding's, the norm before the readout    |

        A tied table serves two products with one multiplier each: it absorbs the embedding's, and the norm the quotient of both.
        """
        config = cast(ModelConfig, member)
        query = "attention.query_norm" if config.qk_norm else "attention.query"
        ends = ("attention.output", "mlp.down", "mlp.shared.down", "mlp.experts.down")
        of_module = {"embedding": multipliers.embedding, query: multipliers.attention}
        of_module |= dict.fromkeys(ends, multipliers.branch)
        if config.tied:
            of_module["final_norm"] = multipliers.readout / multipliers.embedding
        else:
            of_module["readout"] = multipliers.readout
        modules = {name: _MODULE.sub("", name) for name, _ in decoder_shapes(config, config)}
        return {name: of_module.get(module, 1.0) for name, module in modules.items()}

    def shared_sizes(self, member: Member) -> Mapping[str, int]:
        """Return the heads, the columns of the MLP and the positions of a sequence."""
        model = cast(ModelConfig, member)
        return {
            "query heads": model.n_heads,
            "key and value heads": model.n_kv_heads,
            "columns of the MLP (d_ff)": model.d_ff,
            "positions of a sequence (context_length)": model.context_length,
        }

    def sharing_errors(self, member: Member) -> Iterator[str]:
        """Yield experts, and dropout, whose random numbers are the same on ranks that have different heads and positions."""
        if self.config.n_experts is not None:
            yield "with n_experts, since ranks do not share the products of experts"
        for name in ("embedding_dropout", "attention_dropout", "mlp_dropout"):
            if getattr(member, name):
                yield f"with {name}, since ranks would drop the same local heads and positions"

    def share_products(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Split matrices, tables and the residual stream as `shared_products` describes."""
        from proxy_models.architecture.shared_products import share_products

        share_products(cast("Decoder", model), mesh)

    def context_rules(self, member: Member, ranks: int, tensor_ranks: int) -> Iterator[str]:
        """Yield a context without equal chunks, and dropout, whose random numbers are the same on ranks with different positions."""
        model = cast(ModelConfig, member)
        if model.context_length % (ranks * math.lcm(2, tensor_ranks)):
            groups = f" of tensor_parallel = {tensor_ranks} ranks" if tensor_ranks > 1 else ""
            yield f"cut the {model.context_length} positions of a sequence (context_length) into equal halves for each rank{groups}"
        for name in ("embedding_dropout", "mlp_dropout", "attention_dropout"):
            if getattr(model, name):
                yield f"be 1 with {name}, since ranks would drop the same of their positions"
        if tensor_ranks > 1 and model.positions == "learned":
            yield f"be 1 with learned positions and tensor_parallel = {tensor_ranks}, which shards them by position"

    def n_shared_out(self, member: Member) -> int:
        """Return the number of routed experts."""
        return cast(ModelConfig, member).n_experts or 0

    def share_experts(self, model: nn.Module, mesh: DeviceMesh) -> Iterator[nn.Module]:
        """Share experts out as `shared_experts` describes."""
        from proxy_models.architecture.shared_experts import share_experts

        return share_experts(cast("Decoder", model), mesh)

    def stage_errors(self, member: Member) -> Iterator[str]:
        """Yield a tied table, and terms of routers, which the last stage does not have."""
        yield from super().stage_errors(member)
        for name in ("balance_loss", "router_z_loss"):
            if value := getattr(member, name):
                yield f"with {name} = {value:g}, since routers of other stages add nothing to the loss of the last"

    def share_sequences(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Share positions as `shared_sequences` describes."""
        from proxy_models.architecture.shared_sequences import SequenceShare

        decoder = cast("Decoder", model)
        decoder.share = SequenceShare(mesh.get_group())
        for block in (cast("Block", block) for block in decoder.blocks):
            block.attention.share = decoder.share

    def member(self, width: int, depth: int) -> ModelConfig:
        """Return the decoder of this width and depth; raise ValueError if the shape breaks a rule of `ModelConfig`."""
        return replace(self.config, d_model=width, n_layers=depth)

    def widths(self) -> Iterator[int]:
        """Return the widths of whole groups of heads at which MLP and experts have whole widths: the multiples of the smallest."""
        heads = self.config.head_dim * self.config.queries_per_kv
        step = next(width for width in count(heads, heads) if self.config.is_whole(width))
        return count(step, step)

    def between(self, least: float, most: float, depth: int) -> list[Member]:
        """Return all members with about so many parameters; of more than `MOST_SIZES` as many, evenly spaced in log n_params."""
        first, last = (self.member_for(n_params, depth).d_model for n_params in (least, most))
        widths = takewhile(lambda width: width <= last, self.widths())
        some = list(islice((width for width in widths if width >= first), MOST_SIZES + 1))
        if len(some) > MOST_SIZES:
            step = (most / least) ** (1 / (MOST_SIZES - 1))
            some = sorted({self.member_for(least * step**number, depth).d_model for number in range(MOST_SIZES)})
        return [self.member(width, depth) for width in some]

    def parametrization(self, member: Member, base: Member, **options: Unpack[TableOptions]) -> Parametrization:
        """Return the table of `parametrize`."""
        return parametrize(cast(ModelConfig, member), cast(ModelConfig, base), **options)
