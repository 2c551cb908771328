"""Families of the tests' own: gated recurrent layers on a residual stream, and convolutions with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from proxy_models.architecture.family import Family

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Qwen3Config": {**_HEADS, "hidden_size": 32, "intermediate_size": 96, "head_dim": 8},
    "LlamaConfig": {**_HEADS, "hidden_size": 32, "intermediate_size": 96, "tie_word_embeddings": True},
    "GPT2Config": {"n_embd": 32, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Qwen3MoeConfig": {
        **_HEADS,
        "hidden_size": 32,
        "intermediate_size": 96,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "MixtralConfig": {**_HEADS, "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4},
}
"""Configuration classes of transformers, with arguments for small models without dropout."""


class Block(nn.Module):
    """A norm and a recurrent layer, whose output times the branch multiplier is added to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.layer = nn.GRU(width, width, batch_first=True)

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        return cast(Tensor, stream + branch * self.layer(self.norm(stream))[0])


class Network(nn.Module):
    """Token ids to logits."""

    readout_multiplier: Tensor
    branch_multiplier: Tensor

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for name in ("readout_multiplier", "branch_multiplier"):
            self.register_buffer(name, torch.ones(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.symbols(tokens)
        for layer in self.layers:
            stream = layer(stream, self.branch_multiplier)
        return cast(Tensor, self.head(self.norm(stream) * self.readout_multiplier))


@dataclass(frozen=True, kw_only=True)
class Recurrent(Family):
    """Networks whose widths are multiples of eight."""

    readout = "head"
    blocks = "layers"
    width_step = 8

    def build(self, width: int, depth: int) -> Network:
        return Network(self.vocab_size, width, depth)


N_EXPERTS = 5


class ConvolutionWithExperts(nn.Module):
    """A causal convolution, and the mean of experts whose matrices (outputs, inputs) lie in one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.convolution = nn.Conv1d(width, width, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(N_EXPERTS, 2 * width, width))
        self.output = nn.Linear(2 * width, width, bias=False)

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        before = nn.functional.pad(self.norm(stream).mT, (2, 0))
        hidden = nn.functional.silu(self.convolution(before).mT)
        hidden = torch.einsum("bti,eoi->ebto", hidden, self.experts).relu().mean(0)
        return cast(Tensor, stream + branch * self.output(hidden))


@dataclass(frozen=True, kw_only=True)
class Stacked(Recurrent):
    """Networks of convolutions with experts."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.layers = nn.ModuleList(ConvolutionWithExperts(width) for _ in range(depth))
        return network

    def tensor_classes(self, width: int, depth: int) -> Mapping[str, str]:
        return {f"layers.{number}.experts": "hidden_stack" for number in range(depth)}
