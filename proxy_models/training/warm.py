"""Cache of a few models between trainings, by shape and precision, compiled or not."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proxy_models.architecture.families import build, family_of
from proxy_models.architecture.family import Loss, weighted
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.data.batches import EvaluationSet
from proxy_models.training.device import CPU
from proxy_models.training.held_out_passes import pass_losses
from proxy_models.training.precision import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WARM_MODELS = 4
WARM_SHARE = 0.1
"""Share of a GPU's memory that idle models may take (assumed); the state of their optimizers is freed after training."""


class WarmModel:
    """One model of one shape and precision on one device, kept between trainings; compiled or eager.

    On a mesh of all ranks the model is sharded, and all ranks train and evaluate it together. Compilation covers the whole loss or,
    if sharded, each block, as in a full run: the gathering of weights happens between the graphs.
    """

    def __init__(
        self,
        config: Member,
        *,
        compiled: bool,
        precision: Precision = "fp32",
        device: torch.device = CPU,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.family, self._mesh = family_of(config), mesh
        self._compiles_blocks = compiled and mesh is not None
        self.module = build(config)  # built on the CPU, so that the constants are the same on every device
        self.family.set_precision(self.module, DTYPES[precision])
        if compiled:
            self.family.compile_loss(self.module)
        if mesh:
            from proxy_models.training.fsdp import shard  # a late import, since it is slow

            if compiled:
                _compile(self.family.blocks_of(self.module))
            shard(self.module, self.family, mesh)
        self.module.to(device)
        loss = self.family.training_loss
        self.loss: Loss = torch.compile(_own_code(loss), dynamic=False) if compiled and not mesh else loss

    def evaluate(self, held_out: EvaluationSet, batch: int) -> float:
        """Return the mean loss over held-out sequences, nats per token, in passes of `batch` per rank, in the training's precision.

        The evaluation is eager and without dropout; all ranks return the same value.
        """
        module, sequences = self.module, held_out.sequences
        loss, device = weighted(self.family.evaluation_loss, held_out.scale), sequences.device
        rank, ranks = (self._mesh.get_local_rank(), self._mesh.size()) if self._mesh else (0, 1)
        with torch.compiler.set_stance("force_eager") if self._compiles_blocks else nullcontext():
            passes = pass_losses(module, loss, sequences, device=device, batch=batch, rank=rank, ranks=ranks)
        total = torch.stack([mean * size for mean, size in passes]).sum()
        if self._mesh:
            from proxy_models.training.fsdp import settle

            settle(module)
            torch.distributed.all_reduce(total)
        return float(total / len(sequences))


class WarmModels:
    """Cache of warm models on one device; drops the least recently used beyond four models, or beyond `limit` bytes."""

    def __init__(self, device: torch.device = CPU, *, limit: int | None = None, mesh: DeviceMesh | None = None) -> None:
        self._device, self._limit, self._mesh = device, limit, mesh
        self._models: OrderedDict[tuple[Member, bool, Precision], WarmModel] = OrderedDict()

    def get(self, config: Member, *, compiled: bool, precision: Precision = "fp32") -> WarmModel:
        key = (config, compiled, precision)
        if key not in self._models:
            self._models[key] = WarmModel(
                config, compiled=compiled, precision=precision, device=self._device, mesh=self._mesh
            )
        self._models.move_to_end(key)
        while self._too_many():
            self._models.popitem(last=False)
        return self._models[key]

    def _too_many(self) -> bool:
        if self._limit is None:
            return len(self._models) > _WARM_MODELS
        idle = list(self._models)[:-1]  # the last one is about to train
        return sum(4 * config.n_params_total for config, *_ in idle) > self._limit


def _compile(blocks: Iterable[nn.Module]) -> None:
    """Compile each block; blocks of one class share graphs with each other, but not with other models."""
    own: dict[type[nn.Module], Callable[..., Any]] = {}
    for block in blocks:
        kind = type(block)
        block.forward = types.MethodType(own.setdefault(kind, _own_code(kind.forward)), block)
        block.compile(dynamic=False)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with its own code object.

    Dynamo keeps graphs per code object forever: with a shared code object, shapes would add up to the recompile limit however
    few models are warm. With its own, the graphs are freed with the model.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"only a plain function can be copied, got {function!r}")
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
