"""The sum of the weights over the last stretch of a segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxy_models.training.averaging import averaging_begins


class RunningAverage:
    """The sum along one segment, and the uniform mean at its end."""

    def __init__(self, parameters: Sequence[Tensor], *, end: int, batch_tokens: int) -> None:
        self._parameters = list(parameters)
        self._begins = averaging_begins(end, batch_tokens)
        self._sum = [torch.zeros_like(parameter) for parameter in parameters]
        self._count = 0

    @torch.no_grad()
    def add(self, tokens: int) -> None:
        """Count the weights as they are after the step that started at `tokens`."""
        if tokens >= self._begins:
            torch._foreach_add_(self._sum, self._parameters)
            self._count += 1

    @torch.no_grad()
    def write(self) -> None:
        """Overwrite the parameters with their average."""
        for parameter, total in zip(self._parameters, self._sum, strict=True):
            parameter.copy_(total / self._count)
