"""The sum of the weights while a segment is trained, for their average at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RunningAverage:
    """The sum from a position on, and the mean at the end."""

    def __init__(self, parameters: Sequence[Tensor], *, begins: int) -> None:
        self._parameters, self._begins = list(parameters), begins
        self._sum = [torch.zeros_like(parameter) for parameter in parameters]
        self._steps = 0

    @torch.no_grad()
    def add(self, tokens: int) -> None:
        """Count the weights as they are after the step that started at `tokens`."""
        if tokens >= self._begins:
            torch._foreach_add_(self._sum, self._parameters)
            self._steps += 1

    @torch.no_grad()
    def write(self) -> None:
        """Overwrite the parameters with their average."""
        for parameter, total in zip(self._parameters, self._sum, strict=True):
            parameter.copy_(total / self._steps)
