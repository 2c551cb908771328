"""Held-out loss after the weights are rounded to few bits, next to the memory of the rounded weights.

Rounding is to nearest and symmetric: a scale is the largest magnitude of its weights over the largest level, without calibration data.
8 bits have one scale for each output channel, fewer bits one for each group of inputs of an output channel. Groups of 128 are usual
(GPTQ, Frantar et al., arXiv 2210.17323, section 4; AWQ, Lin et al., arXiv 2306.00978, section 5; the W4A16 scheme of llm-compressor).
These tools better the rounding by calibration, so that their loss increases less. The activations keep the run's precision.

Embedding, learned positions and readout stay in bf16 unless `tables` is true: recipes for serving with vLLM round linear layers except
`lm_head`, and bitsandbytes leaves the head out too. llama.cpp rounds the tables, but to more bits than the rest. Routers always stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxy_models.architecture.base_shapes import has_inputs_first
from proxy_models.architecture.parametrization import HIDDEN_MATRICES, MATRICES, TensorClass
from proxy_models.architecture.sharded import is_sharded, own
from proxy_models.evaluation.held_out_loss import HeldOutSequences
from proxy_models.evaluation.measure import Measured, Score, Subject
from proxy_models.hashing import content_key
from proxy_models.training.numerics import Numerics

BF16_BYTES = 2
"""Bytes of a scale, and of a weight that is not rounded."""


@dataclass(frozen=True, kw_only=True)
class QuantisedLoss:
    """Held-out loss with rounded matrices (names "int8", "int4") and without rounding (name "bf16").

    Metrics are "loss", "loss_increase" over the loss without rounding, whose standard error is that of the paired difference, and
    "memory_bytes" of all weights with their scales. Weights that are not rounded count in bf16; the loss named "bf16" is that of the
    run's precision.

    Attributes:
        bits: Bits of a weight, 2 to 8 each.
        group: Inputs that share a scale below 8 bits.
        tables: Whether embedding, learned positions and readout are rounded too.
    """

    bits: tuple[int, ...] = (8, 4)
    group: int = 128
    tables: bool = False

    name: ClassVar[str] = "quantised_loss"

    def __post_init__(self) -> None:
        if not self.bits or not all(2 <= bits <= 8 for bits in self.bits):
            raise ValueError(f"bits must be whole numbers from 2 to 8, at least one, got {self.bits}")
        if self.group < 1:
            raise ValueError(f"group must be at least 1, got {self.group}")

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return content_key([self.name, asdict(self)])

    def measure(self, subject: Subject) -> Measured:
        """Measure the losses; the weights are the same bit for bit afterwards, also after an error.

        Raises:
            ValueError: If the corpus has fewer held-out tokens than the run evaluates, or ranks share the inputs of a matrix.
        """
        held_out, model = HeldOutSequences(subject), subject.model
        before = held_out.losses()
        matrices = _matrices(model, subject.numerics, tables=self.tables)
        whole = _matrices(model, subject.numerics, _without_values, tables=self.tables)
        n_params = sum(parameter.numel() for parameter in model.parameters())
        scores = [before.score(self.name, "bf16", "loss"), self._memory("bf16", BF16_BYTES * n_params)]
        n_rest = n_params - sum(rows.numel() for rows in whole)
        for bits in self.bits:
            name = f"int{bits}"
            with rounded(matrices, bits, self.group):
                after = held_out.losses()
            scores += [
                after.score(self.name, name, "loss"),
                (after - before).score(self.name, name, "loss_increase"),
                self._memory(name, BF16_BYTES * n_rest + sum(n_bytes(rows, bits, self.group) for rows in whole)),
            ]
        return Measured(scores=tuple(scores))

    def _memory(self, name: str, n_bytes: int) -> Score:
        return Score(
            measure=self.name, name=name, metric="memory_bytes", value=float(n_bytes), standard_error=None, n=1
        )


def _without_values(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, device="meta")


def _matrices(
    model: nn.Module, numerics: Numerics, part: Callable[[Tensor], Tensor] = own, *, tables: bool
) -> list[Tensor]:
    """Return views of a part of the matrices, with one row for each output channel, or each token of a table."""
    rules = numerics.parametrization("adamw").rules
    wanted = MATRICES - {TensorClass.ROUTER} if tables else HIDDEN_MATRICES
    found = []
    for name, parameter in model.named_parameters():
        if (tensor_class := rules[name].tensor_class) in wanted:
            weight = part(parameter.detach())
            inputs_first = has_inputs_first(model.get_submodule(name.rpartition(".")[0]))
            if is_sharded(parameter) and (inputs_first or own(parameter).shape[-1] < parameter.shape[-1]):
                raise ValueError(
                    f"quantised loss: ranks must not share the inputs of a matrix, which have one scale; {name} of shape "
                    f"{tuple(parameter.shape)} is sharded along them; measure it in one process"
                )
            if inputs_first:
                found.append(weight.T)
            else:  # (outputs, inputs, kernel), or (matrices, outputs, inputs)
                found.append(weight.flatten(0, -2) if tensor_class is TensorClass.HIDDEN_STACK else weight.flatten(1))
    return found


@contextmanager
def rounded(matrices: list[Tensor], bits: int, group: int) -> Iterator[None]:
    """Round matrices in place within the block, and restore them bit for bit."""
    kept = [rows.clone() for rows in matrices]
    try:
        for rows in matrices:
            rows.copy_(round_to_nearest(rows, bits, group))
        yield
    finally:
        for rows, before in zip(matrices, kept, strict=True):
            rows.copy_(before)


def round_to_nearest(rows: Tensor, bits: int, group: int) -> Tensor:
    """Return (outputs, inputs) rounded to 2^bits − 1 levels with bf16 scales; `group` is ignored at 8 bits."""
    n_inputs, highest = rows.shape[1], (1 << (bits - 1)) - 1
    size = _inputs_per_scale(n_inputs, bits, group)
    groups = F.pad(rows.float(), (0, -n_inputs % size)).reshape(len(rows), -(-n_inputs // size), size)
    scales = (groups.abs().amax(dim=-1, keepdim=True) / highest).bfloat16().float()
    levels = (groups / scales.where(scales > 0, 1)).round().clamp(-highest, highest)
    return (levels * scales).flatten(1)[:, :n_inputs].to(rows.dtype)


def n_bytes(rows: Tensor, bits: int, group: int) -> int:
    """Return the bytes of a rounded matrix and its scales."""
    n_outputs, n_inputs = rows.shape
    n_scales = n_outputs * ceil(n_inputs / _inputs_per_scale(n_inputs, bits, group))
    return ceil(rows.numel() * bits / 8) + BF16_BYTES * n_scales


def _inputs_per_scale(n_inputs: int, bits: int, group: int) -> int:
    return n_inputs if bits == 8 else min(group, n_inputs)
