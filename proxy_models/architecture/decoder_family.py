"""The built-in decoder as a family. Torch is imported only when a decoder is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.family import Family, Loss
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Checkpointing, fitting
from proxy_models.architecture.parametrization import Parametrization, TableOptions, parametrize

if TYPE_CHECKING:
    from torch import nn

    from proxy_models.architecture.decoder import Decoder

MOST_SIZES = 4096
"""Members that `between` lists: a budget of 1e20 FLOPs needs 2,800; beyond, one group of heads more is hardly another width."""


@dataclass(frozen=True, kw_only=True)
class DecoderFamily(Family):
    """Decoders that differ from `config` in width and depth; their table and counts are formulas, not comparisons of models."""

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

    def write_constants(self, model: nn.Module, width: int, depth: int) -> None:
        """Write the constants of the config without building another decoder."""
        cast("Decoder", model).write_constants()

    def compile_loss(self, model: nn.Module) -> None:
        """Compile the readout's computation on a chunk of logits."""
        cast("Decoder", model).readout.compiled = True

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks, and the embedding and readout if they are not tied; learned positions belong to the rest."""
        decoder = cast("Decoder", model)
        return [*decoder.blocks, *(() if self.config.tied else (decoder.embedding, decoder.readout))]

    def fitting(self, member: Member, sequences: int, **limits: Any) -> tuple[int | None, Checkpointing]:
        """Return the micro-batch and checkpointing that fit by the estimate of `proxy_models.architecture.memory`."""
        return fitting(cast(ModelConfig, member), sequences, **limits)

    def member(self, width: int, depth: int) -> ModelConfig:
        """Return the decoder of this width and depth.

        Raises:
            ValueError: If the shape breaks a rule of `ModelConfig`.
        """
        return replace(self.config, d_model=width, n_layers=depth)

    def widths(self) -> Iterator[int]:
        """Return the widths of whole groups of heads at which `mlp_ratio` is exact: the multiples of the smallest."""
        heads = self.config.head_dim * self.config.queries_per_kv
        step = next(width for width in count(heads, heads) if float(width * self.config.mlp_ratio).is_integer())
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
