"""The decoder that is searched, top to bottom: rotary positions, attention, MLP, block, model, loss.

Forward multipliers (muP's and the tuned ones) are zero-dimensional buffers, so that one compiled graph serves every
trial of a shape. They are set by `Decoder.set_multipliers` from the parametrization, never saved with the weights.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxy_models.config import ModelConfig
from proxy_models.parametrization import ForwardMultipliers

ROTARY_BASE = 10_000.0  # Su et al., arXiv 2104.09864, section 3.2.2


def rotary_angles(context_length: int, head_dim: int) -> Tensor:
    """Angle of each position and each pair of a head, shape (context_length, head_dim / 2), radians."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return torch.outer(torch.arange(context_length, dtype=torch.float32), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of every head by their position's angle; x is (batch, heads, time, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention; the logits' scale comes as a tensor."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.d_model
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = (batch, time, width // self.head_dim, self.head_dim)
        query, key, value = (p(x).view(heads).transpose(1, 2) for p in (self.query, self.key, self.value))
        query, key = rotate(query, cos, sin) * scale, rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(batch, time, width)))


class SwiGLU(nn.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream times the depth multiplier."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention_scale: Tensor, branch: Tensor) -> Tensor:
        """Map the residual stream (batch, time, width) to the same shape."""
        x = x + branch * self.attention(self.attention_norm(x), cos, sin, attention_scale)
        return cast(Tensor, x + branch * self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Token ids (batch, time) to logits (batch, time, vocab_size).

    `time` may be anything up to `config.context_length`. A fresh decoder holds torch's own initial values;
    `proxy_models.initialize` writes the parametrization's.
    """

    cos: Tensor
    sin: Tensor
    embedding_multiplier: Tensor
    attention_scale: Tensor
    branch_multiplier: Tensor
    readout_multiplier: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.readout = nn.Linear(config.d_model, config.vocab_size, bias=False)
        angles = rotary_angles(config.context_length, config.head_dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name in ("embedding_multiplier", "attention_scale", "branch_multiplier", "readout_multiplier"):
            self.register_buffer(name, torch.ones(()), persistent=False)

    @torch.no_grad()
    def set_multipliers(self, multipliers: ForwardMultipliers) -> None:
        """Write the four forward multipliers."""
        self.embedding_multiplier.fill_(multipliers.embedding)
        self.attention_scale.fill_(multipliers.attention)
        self.branch_multiplier.fill_(multipliers.branch)
        self.readout_multiplier.fill_(multipliers.readout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens) * self.embedding_multiplier
        for block in self.blocks:
            x = block(x, cos, sin, self.attention_scale, self.branch_multiplier)
        return cast(Tensor, self.readout(self.final_norm(x) * self.readout_multiplier))


def next_token_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, of predicting each token of (batch, context_length + 1) from those before it."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())
