"""The sum of the weights while a segment is trained, for their average at its end."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from proxy_models.architecture.sharded import own


class RunningAverage:
    """The sum from a position on, and the mean at the end, of weights and of the buffers that training changes."""

    def __init__(self, weights: Iterable[Tensor], *, begins: int) -> None:
        self._weights, self._begins = list(weights), begins
        self._sum = [torch.zeros_like(own(weight)) for weight in self._weights]
        self._steps = 0

    @torch.no_grad()
    def add(self, tokens: int) -> None:
        """Count the weights as they are after the step that started at `tokens`."""
        if tokens >= self._begins:
            torch._foreach_add_(self._sum, [own(weight) for weight in self._weights])
            self._steps += 1

    @torch.no_grad()
    def write(self) -> None:
        """Overwrite the weights with their average."""
        for weight, total in zip(self._weights, self._sum, strict=True):
            own(weight).copy_(total / self._steps)
