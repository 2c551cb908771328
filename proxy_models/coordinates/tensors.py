"""Checks of tensors instead of activations: norms by the largest singular value, and multipliers with an effect.

A module's output hides a tensor with a small part in it, and a tensor that a function uses has no recorded output.
Features move by the same amount at every width if weights and updates have a largest singular value of about √(fan_out / fan_in)
(Yang, Simon and Bernstein, arXiv 2310.17813, condition 1). Between widths that ratio is constant for a hidden matrix, grows as the
width for an embedding, and falls as 1/width for a readout, whose multiplier is part of it, and for a router, which has none. The ratio
of a hidden matrix is that of its shape and not of its class, so that a router which was taken for a hidden matrix is found under any
optimizer: Muon's update of it is as large as that of a hidden matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from proxy_models.architecture.parametrization import (
    HIDDEN_MATRICES,
    MATRICES,
    MULTIPLIERS,
    Parametrization,
    TensorClass,
)

_KINDS = {
    **dict.fromkeys(HIDDEN_MATRICES, "hidden matrix"),
    TensorClass.EMBEDDING: "embedding matrix",
    TensorClass.ROUTER: "router matrix",
    TensorClass.TIED: "tied matrix",  # has the readout's bounds
}


class Norms:
    """Largest singular values of a model's matrices and of their first changes, relative to their expected scale."""

    def __init__(self, model: nn.Module, table: Parametrization, width: int) -> None:
        """Store the current values as those before the first step."""
        self._classes = {name: rule.tensor_class for name, rule in table.rules.items() if rule.tensor_class in MATRICES}
        self._model, self._width, self._readout = model, width, table.multipliers.readout
        self._first = {name: model.get_parameter(name).detach().clone() for name in self._classes}
        self._moved: set[str] = set()

    def initial(self) -> dict[tuple[str, str, str], float]:
        """Return the norm of each matrix by (module, kind, quantity)."""
        return {self._key(name, "norm"): self._norm(name, values) for name, values in self._first.items()}

    @torch.no_grad()
    def updates(self, *, last: bool) -> dict[tuple[str, str, str], float]:
        """Return the norm of each matrix's first change; at the last step, 0 for matrices that never changed."""
        found = {}
        for name in self._classes.keys() - self._moved:
            change = self._model.get_parameter(name) - self._first[name]
            if last or bool(change.any()):
                self._moved.add(name)
                found[self._key(name, "update")] = self._norm(name, change)
        return dict(sorted(found.items()))

    def _key(self, name: str, quantity: str) -> tuple[str, str, str]:
        module, _, tensor = name.rpartition(".")
        return module, _KINDS.get(self._classes[name], "readout matrix"), f"{quantity} of {tensor}"

    def _norm(self, name: str, values: Tensor) -> float:
        if not bool(values.isfinite().all()):
            return math.nan
        matrices = values if self._classes[name] is TensorClass.HIDDEN_STACK else values.flatten(1)
        largest = float(torch.linalg.matrix_norm(matrices, ord=2).max())
        match self._classes[name]:
            case TensorClass.HIDDEN | TensorClass.HIDDEN_STACK | TensorClass.ROUTER:
                outputs, inputs = matrices.shape[-2:]
                return largest * math.sqrt(inputs / outputs)
            case TensorClass.EMBEDDING:
                return largest / math.sqrt(self._width)
        return largest * self._readout * math.sqrt(self._width)


@torch.no_grad()
def acting_multipliers(model: nn.Module, tokens: Tensor) -> dict[str, bool]:
    """Return whether each multiplier with a buffer changes the logits when it is doubled, by `ForwardMultipliers`' names."""
    buffers, once = dict(model.named_buffers()), model(tokens)
    acting = {}
    for name, buffer in MULTIPLIERS.items():
        if buffer in buffers:
            buffers[buffer].mul_(2)
            acting[name] = not torch.equal(model(tokens), once)
            buffers[buffer].div_(2)
    return acting
