"""Memory for training a model of any family, estimated by tracing one pass on fake tensors.

Fake tensors have shapes but no values (torch's `FakeTensorMode`), so a model of any width can be traced on any machine; torch's
`MemTracker` counts the storages that exist at a time. The operators are those of a CPU; a GPU's kernels keep slightly more or less.
The state and the gathered weights follow from the sizes of parameters, and are upper bounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_memory import state_bytes
from proxy_models.architecture.families import family_of, parameter_shapes
from proxy_models.architecture.family import Family
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import (
    MIN_UNIT_PARAMS,
    Checkpointing,
    MemoryEstimate,
    Precision,
    Sharding,
    most_rotated,
    rotated_numbers,
)
from proxy_models.architecture.parametrization import TensorClass
from proxy_models.training.fsdp import units_by_themselves
from proxy_models.training.precision import DTYPES

_FP32 = 4
_SHORT, _LONGER = 16, 32
"""Tokens of the sequences on which a long recurrence is traced."""
_MANY_OPERATORS = 10_000  # tracing this many takes 1 s


def estimated_memory(
    member: Member, *, tensor_parallel: int = 1, context_parallel: int = 1, **conditions: Any
) -> MemoryEstimate:
    """Estimate the memory of training on each device: by the family's `training_memory`, or else by tracing a rank by itself.

    Raises:
        ValueError: As `Family.training_memory` and `traced_memory`, or if a stage of a pipeline, or a rank with a part of the experts,
            would have to be traced.
    """
    shared = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
    known = family_of(member).training_memory(member, **shared, **conditions)
    if known is None and "pipeline" in conditions:
        raise ValueError(
            f"the family of {member} must have training_memory, since a stage of a pipeline is not traced; got pipeline_parallel = "
            f"{conditions['pipeline'].ranks}"
        )
    if known is None and "expert_parallel" in conditions:
        raise ValueError(
            f"the family of {member} must have training_memory, since a part of its experts is not traced; got expert_parallel = "
            f"{conditions['expert_parallel']}"
        )
    return known or traced_memory(member, **conditions)


def checkpoint_bytes(member: Member, optimizer: str) -> int:
    """Return the bytes of a whole model's weights and moments, or an upper bound; of a custom family, SOAP's by its matrices' shapes.

    Raises:
        ValueError: As `state_bytes`.
    """
    if optimizer != "soap" or isinstance(member, ModelConfig):
        return state_bytes(member, optimizer)
    return _FP32 * member.n_params_total + _optimizer_bytes(member, optimizer, 1, 1)


def estimated_evaluation(
    member: Member,
    sequences: int,
    training: MemoryEstimate,
    precision: Precision,
    *,
    sharding: Sharding,
    world_size: int,
    **layout: Any,
) -> int:
    """Estimate the bytes on each device during an evaluation within training, as `estimated_memory` does those of training.

    `layout` may also have tensor_parallel, context_parallel, expert_parallel and pipeline.

    Raises:
        ValueError: As `Family.evaluation_memory` and `traced_evaluation`.
    """
    known = family_of(member).evaluation_memory(
        member, sequences, training, precision, sharding=sharding, world_size=world_size, **layout
    )
    return known or traced_evaluation(member, sequences, training, precision, world_size=world_size)


@cache
def traced_memory(
    member: Member,
    *,
    micro_batch: int,
    precision: Precision = "fp32",
    optimizer: str = "adamw",
    sharding: Sharding = "none",
    world_size: int = 1,
    checkpointing: Checkpointing = "none",
) -> MemoryEstimate:
    """Estimate the memory of training on each device, as `memory.training_memory` does for the decoder.

    Args:
        member: Model of a family that is imported in this process.
        micro_batch, precision, optimizer, sharding, world_size, checkpointing: As for `training_memory`.

    Raises:
        ValueError: If the family is not imported here, lacks the precision or checkpointing, or the pass can't be traced.
    """
    share, n = 1 if sharding == "none" else world_size, member.n_params_total
    of_pass = _Pass(precision=precision, checkpointing=checkpointing, trains=True, is_gathered=world_size > 1)
    activations = of_pass.peak(member, micro_batch)
    gathered = reduced = 0
    if world_size > 1:
        largest, rest, weight = _units(member, precision)
        gathered = weight * (n if sharding in ("none", "zero2") else rest + 2 * largest)
        reduced = (weight + _FP32) * max(largest, rest)  # a unit's gradients, and the fp32 buffer for their reduction
    return MemoryEstimate(
        parameters=_FP32 * n // share,
        gathered=gathered,
        gradients=_FP32 * n // share,
        optimizer=_optimizer_bytes(member, optimizer, share, world_size),
        reduced=reduced,
        activations=activations,
    )


@cache
def traced_evaluation(
    member: Member, sequences: int, training: MemoryEstimate, precision: Precision = "fp32", *, world_size: int = 1
) -> int:
    """Return the bytes on each device during an evaluation within training: state without gradients, and a pass of `sequences`.

    Raises:
        ValueError: As `traced_memory`.
    """
    of_pass = _Pass(precision=precision, checkpointing="none", trains=False, is_gathered=world_size > 1)
    return training.parameters + training.gathered + training.optimizer + of_pass.peak(member, sequences)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """A pass of a model; FSDP2 gathers weights in the model's `compute_dtype`, if it has this attribute."""

    precision: Precision
    checkpointing: Checkpointing
    trains: bool
    is_gathered: bool

    def peak(self, member: Member, sequences: int) -> int:
        """Return the peak bytes of the pass's tensors; for a deep model extrapolated linearly in depth from two and four blocks."""
        depth, by_block = member.n_layers, self._operators(member)
        if depth <= 4:
            return self._of_depth(member, depth, sequences, by_block)
        two, four = (self._of_depth(member, blocks, sequences, by_block) for blocks in (2, 4))
        return two + (four - two) * (depth - 2) // 2

    def _operators(self, member: Member) -> float:
        """Return the operators of one block that grow with the context; only a recurrence has any."""
        if member.context_length <= _LONGER:
            return 0.0
        shorter, longer = (self._traced(member, 1, 1, tokens)[1] for tokens in (_SHORT // 2, _SHORT))
        return (longer - shorter) / (_SHORT // 2) * member.context_length

    def _of_depth(self, member: Member, depth: int, sequences: int, by_block: float) -> int:
        """Return the peak bytes at this depth; for a long recurrence from the same number of tokens in shorter sequences.

        Shorter sequences need the same memory per token, and more per time step of all sequences. If sequences of twice the
        length need more, memory grows with pairs of tokens, and the model is traced at full length.
        """
        tokens = sequences * member.context_length
        if by_block * depth > _MANY_OPERATORS and tokens % _LONGER == 0:
            shorter, longer = (
                self._traced(member, depth, tokens // context, context)[0] for context in (_SHORT, _LONGER)
            )
            if longer <= shorter:
                return longer
        return self._traced(member, depth, sequences, member.context_length)[0]

    def _traced(self, member: Member, depth: int, sequences: int, context: int) -> tuple[int, int]:
        """Return the peak bytes of a pass and the number of its operators."""
        family, tracker = replace(family_of(member), context_length=context), _Tracker()
        try:
            with FakeTensorMode(), torch.set_grad_enabled(self.trains):
                model = self._build(family, member.d_model, depth)
                for parameter in model.parameters() if self.trains else ():
                    parameter.grad = torch.zeros_like(parameter)  # stands for the gradients of earlier passes
                tokens = torch.zeros(sequences, context + 1, dtype=torch.int64)
                tracker.track_external(model, tokens)
                before = _total(tracker, "current")
                with tracker:
                    if self.trains:
                        family.training_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
                    else:
                        family.evaluation_loss(model, tokens)
        except Exception as error:  # the model may raise anything
            raise ValueError(
                f"a pass of {member} can't be traced on fake tensors ({type(error).__name__}: {error})"
            ) from error
        return _total(tracker, "peak") - before, tracker.n_operators

    def _build(self, family: Family, width: int, depth: int) -> nn.Module:
        model, dtype = family.build(width, depth), DTYPES[self.precision]
        if self.is_gathered and hasattr(model, "compute_dtype"):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                model = family.build(width, depth)
            finally:
                torch.set_default_dtype(before)
        family.set_precision(model, dtype)
        family.set_checkpointing(model, self.checkpointing)
        return model


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Memory tracker that also counts operators."""

    n_operators = 0

    def __torch_dispatch__(self, *arguments: Any, **named: Any) -> Any:
        self.n_operators += 1
        return super().__torch_dispatch__(*arguments, **named)  # type: ignore[no-untyped-call]


def _total(tracker: MemTracker, when: str) -> int:
    found: dict[Any, dict[Any, int]] = tracker.get_tracker_snapshot(when)
    return sum(snapshot["Total"] for snapshot in found.values())


def _optimizer_bytes(member: Member, optimizer: str, share: int, world_size: int) -> int:
    """Return the bytes of optimizer state on each device: of Adafactor and SOAP from all shapes, or else from the numbers per entry.

    Adafactor has the means of rows and columns of every tensor's last two dimensions, and of vectors, on each device.
    """
    shapes = {name: parameter.shape for name, parameter in parameter_shapes(member).items()}
    if optimizer == "adafactor":
        return _FP32 * sum(
            shape.numel() // shape[-1] + shape.numel() // shape[-2] if len(shape) > 1 else shape.numel()
            for shape in shapes.values()
        )
    if optimizer != "soap":
        return (state_bytes(member, optimizer) - _FP32 * member.n_params_total) // share
    rules = family_of(member).parametrization(member, member, optimizer="soap").rules
    matrices: Counter[tuple[int, int]] = Counter()
    numbers = others = 0
    for name, shape in shapes.items():
        match rules[name].tensor_class:
            case TensorClass.HIDDEN:
                matrices[shape[0], shape[1:].numel()] += 1
            case TensorClass.HIDDEN_STACK:
                numbers += -(-shape[0] // share) * rotated_numbers(shape[1], shape[2])
            case _:
                others += shape.numel()
    return _FP32 * (numbers + most_rotated(matrices, world_size)[0] + 2 * others // share)


def _units(member: Member, precision: Precision) -> tuple[int, int, int]:
    """Return the largest unit's parameters that `fsdp.shard` shards by itself, the rest's parameters, and the bytes of each."""
    family = family_of(member)
    with torch.device("meta"):
        model = family.build(member.d_model, member.n_layers)
    units = units_by_themselves(model, family, min_unit_params=MIN_UNIT_PARAMS)
    large = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(large)
    gathered = DTYPES[precision] if hasattr(model, "compute_dtype") else torch.float32
    return max(large, default=0), rest, gathered.itemsize
