"""Optimizers of hidden matrices, next to AdamW for the other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxy_models.architecture.sharded import own


class MatricesWithAdamW(torch.optim.Optimizer):
    """A subclass moves the groups that `mark` is true of; torch's AdamW moves the others, and receives groups and state for each step.

    A group marked `stack` has tensors (matrices, outputs, inputs). Ranks that have parts of the matrices exchange them for whole ones.
    """

    mark: ClassVar[str]

    def __init__(self, settings: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(settings, {self.mark: False})
        self._adamw: torch.optim.AdamW | None = None
        if others := self._groups(marked=False):
            copies = [dict(group) for group in others]
            self._adamw = torch.optim.AdamW(copies, betas=betas, fused=True)
            for ours, theirs in zip(others, copies, strict=True):
                ours.update(theirs)  # theirs have the defaults filled in

    def _groups(self, *, marked: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group[self.mark] is marked]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices(self._groups(marked=True))
        if self._adamw:
            self._adamw.param_groups, self._adamw.state = self._groups(marked=False), self.state
            self._adamw.step()
        return loss

    @abstractmethod
    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Take a step of the marked groups, on each rank's own part."""


def move(parameter: Tensor, group: dict[str, Any], update: Tensor, *, factor: float = 1.0) -> None:
    """Apply decay, and the update times the rate and a factor, to this rank's part of a parameter."""
    rate = group["lr"]
    own(parameter).mul_(1 - rate * group["weight_decay"]).sub_(update, alpha=rate * factor)
