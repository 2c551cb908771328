"""What a training needs to go on exactly, as tensors by name, in memory and on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Weights, AdamW's moments, and what loss scaling and the guard remember, after `tokens` tokens."""

    tokens: int
    tensors: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write to `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        torch.save({"tokens": self.tokens, "tensors": self.tensors}, unfinished)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls(**torch.load(path, weights_only=True, map_location="cpu"))


def capture(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the weights and moments by name; no moments before the first step."""
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().clone()
        for moment in _MOMENTS:
            if moment in optimizer.state[parameter]:
                tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].clone()
    return tensors


@torch.no_grad()
def restore(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Write back what `capture` copied; the tensors stay the caller's."""
    for name, parameter in module.named_parameters():
        parameter.copy_(tensors[f"weight/{name}"])
        kept = {moment: tensors.get(f"{moment}/{name}") for moment in _MOMENTS}
        optimizer.state[parameter] = {moment: tensor.clone() for moment, tensor in kept.items() if tensor is not None}
