"""The sum of an average's weights while a segment is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxy_models.training.averaging import Average


class RunningAverage:
    """The sum along one segment, and the mean at its end."""

    def __init__(self, average: Average, parameters: Sequence[Tensor], *, end: int, batch_tokens: int) -> None:
        self.average, self._parameters, self._end = average, list(parameters), end
        self._begins = average.begins(end, batch_tokens)
        self._sum = [torch.zeros_like(parameter) for parameter in parameters]
        self._total = 0.0

    @torch.no_grad()
    def add(self, tokens: int, batch_tokens: int) -> None:
        """Count the weights as they are after the step that started at `tokens`."""
        if tokens >= self._begins and (weight := self.average.weight(self._end - tokens - batch_tokens)):
            torch._foreach_add_(self._sum, self._parameters, alpha=weight)
            self._total += weight

    @torch.no_grad()
    def write(self) -> None:
        """Overwrite the parameters with their average."""
        for parameter, total in zip(self._parameters, self._sum, strict=True):
            parameter.copy_(total / self._total)
