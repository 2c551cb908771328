"""The MLP of a block, and its activations."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from proxy_models.architecture.config import Activation, ModelConfig
from proxy_models.architecture.products import Linear


def activated(activation: Activation, hidden: Tensor, gate: Callable[[], Tensor]) -> Tensor:
    """Return the activation of hidden values. Only "swiglu" computes the gate, which is freed before the product."""
    match activation:
        case "swiglu":
            return F.silu(gate()) * hidden
        case "gelu":
            return F.gelu(hidden)
        case "gelu_tanh":
            return F.gelu(hidden, approximate="tanh")
        case "relu":
            return F.relu(hidden)
        case "relu2":  # squared ReLU (So et al., arXiv 2109.08668, section 3)
            return F.relu(hidden).square()


class MLP(nn.Module):
    """Two matrices with an activation between them, or SwiGLU's three (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.config = config
        if config.activation == "swiglu":
            self.gate = Linear(config.d_model, hidden, bias=bias)
        self.up = Linear(config.d_model, hidden, bias=bias)
        self.down = Linear(hidden, config.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        hidden = activated(self.config.activation, self.up(x), lambda: self.gate(x))
        return F.dropout(self.down(hidden), self.config.mlp_dropout, self.training)
