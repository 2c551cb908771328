"""Findings about a shape that make a GPU slow, each with its measurement or guide.

A finding is not an error: proxies are small on purpose. The findings matter for the shape that the budget is spent on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proxy_models.architecture.config import ModelConfig

CO_DESIGN = "Anthony et al., arXiv 2401.14489, its recommendations"
MATMUL_GUIDE = "NVIDIA, Matrix Multiplication Background User's Guide, section 2.2"
_ALIGNED = 64  # 16-bit numbers in 128 bytes: the Tensor Cores of an A100 or H100 run fastest at multiples of 128 bytes
_USABLE = 8  # 16-bit numbers in 16 bytes: older libraries do not use the Tensor Cores for smaller multiples


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A finding about one dimension of a shape: its cost, a better value, and the source."""

    name: str
    finding: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.finding} ({self.source})"


def advise(config: ModelConfig) -> Iterator[Advice]:
    """Return the findings about a shape, the costliest kind first."""
    for name, size in (("d_model", config.d_model), ("d_ff", config.d_ff), ("vocab_size", config.vocab_size)):
        if size % _ALIGNED:
            wider = -(-size // _ALIGNED) * _ALIGNED
            yield Advice(
                name=name,
                finding=f"{size} is not a multiple of {_ALIGNED}, so every product with it wastes part of its tiles; {wider} is",
                source=CO_DESIGN if name == "vocab_size" else MATMUL_GUIDE,
            )
    if config.head_dim % _USABLE:
        yield Advice(
            name="head_dim",
            finding=f"{config.head_dim} is not a multiple of {_USABLE}: fused attention pads it, or refuses it in fp32 and with ALiBi",
            source=MATMUL_GUIDE,
        )
    elif config.head_dim < _ALIGNED:
        yield Advice(
            name="head_dim",
            finding=f"{config.head_dim} is below {_ALIGNED}, so attention's products don't fill the Tensor Cores; "
            "keep it only if the sweep needs it, as it must be the same at every width",
            source=CO_DESIGN,
        )
    if config.context_length % _ALIGNED:
        yield Advice(
            name="context_length",
            finding=f"{config.context_length} is not a multiple of {_ALIGNED}, so tokens don't fill the tiles",
            source=CO_DESIGN,
        )
    if config.positions == "alibi":
        yield Advice(
            name="positions",
            finding="PyTorch can't use its FlashAttention kernel with ALiBi's bias; it uses the memory-efficient one",
            source="torch.nn.functional.scaled_dot_product_attention",
        )
