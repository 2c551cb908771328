"""Data parallelism of a model by torch's FSDP2, for proxies and full runs: shards are fp32, gathered in the model's precision.

Gradients are reduced in fp32. Parameters become DTensors under the same names, which optimizer groups, clipping and states use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from proxy_models.architecture.family import Family, FamilyError
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import MIN_UNIT_PARAMS, Sharding


def shard(
    model: nn.Module,
    family: Family,
    mesh: DeviceMesh,
    sharding: Sharding = "full",
    *,
    min_unit_params: int = MIN_UNIT_PARAMS,
    root: nn.Module | None = None,
    experts: Iterable[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard each large unit of the family by itself, and the rest as one unit.

    Args:
        model: Model with or without values; with values, every rank has the same.
        family: Family of the model, which names the units.
        mesh: Mesh of the ranks that share a batch, with one dimension; for "none" and "hybrid" two, replicas and shards.
        min_unit_params: Units with fewer parameters belong to the rest.
        root: Module that is called, if not the model itself but a stage around it.
        experts: Modules of which each rank has a part already (`Family.share_experts`).
        expert_mesh: Mesh of the ranks that have the same part.

    Raises:
        FamilyError: If a parameter has no dimension along which it could be sharded.
    """
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        raise FamilyError(
            f"{', '.join(scalars)}: a parameter needs a dimension to be sharded along; got shape (); make it of shape (1,)"
        )
    unit = partial(
        fully_shard,
        mesh=mesh,
        shard_placement_fn=partial(_placement, ranks=mesh.size(mesh.ndim - 1)),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(model, "compute_dtype", torch.float32),
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    )
    for module in experts:
        unit(module, mesh=expert_mesh, reshard_after_forward=sharding in ("full", "hybrid"))
    readout = model.get_submodule(family.readout)
    for module in units_by_themselves(model, family, min_unit_params=min_unit_params):
        again = module is not readout and sharding in ("full", "hybrid")
        sharded = unit(module, reshard_after_forward=again)
        if isinstance(module, nn.Embedding):
            sharded.set_unshard_in_backward(False)  # the gradient of an embedding does not need its weights
    unit(root or model, reshard_after_forward=False)  # the backward pass needs these weights immediately


def _placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Return the first dimension of a stack of matrices of which all ranks get equal parts, or None: the first, as of other tensors.

    FSDP2 would pad 8 matrices over 64 ranks to 64, in memory and in each collective.
    """
    if parameter.ndim != 3:
        return None
    return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % ranks == 0), None)


def units_by_themselves(model: nn.Module, family: Family, *, min_unit_params: int = MIN_UNIT_PARAMS) -> list[nn.Module]:
    """Return the units that are sharded by themselves: large units that share no parameter with another unit.

    Shared parameters belong to the rest of the model, so that both uses find them.
    """
    units = {unit: set(unit.parameters()) for unit in family.units(model)}
    uses = Counter(parameter for parameters in units.values() for parameter in parameters)
    return [
        unit
        for unit, parameters in units.items()
        if parameters
        and sum(parameter.numel() for parameter in parameters) >= min_unit_params
        and all(uses[parameter] == 1 for parameter in parameters)
    ]


def allocate(model: nn.Module, family: Family, member: Member, device: torch.device) -> None:
    """Give a model on the meta device memory on its device, for a shard if it is sharded; only the family's constants get values."""
    tied = _tied(model)
    model.to_empty(device=device)
    for name, first in tied.items():  # `to_empty` may separate tied parameters
        module, _, weight = name.rpartition(".")
        setattr(model.get_submodule(module), weight, model.get_parameter(first))
    family.write_constants(model, member.d_model, member.n_layers)


def _tied(model: nn.Module) -> dict[str, str]:
    """Return further names of parameters that have several, each with the first name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[one] for name, one in named if first.setdefault(one, name) != name}


def between_parts(model: nn.Module, sharding: Sharding = "full", *, last: bool) -> None:
    """Prepare for one part of a rank's batch: the last part all-reduces gradients and, under "none" and "zero2", reshards weights."""
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if sharding in ("none", "zero2"):
        model.set_reshard_after_backward(last)


def settle(*models: nn.Module) -> None:
    """Reshard the weights, which a forward pass without a backward pass leaves gathered."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def rank_mean(value: Tensor, *, stages: int = 1) -> Tensor:
    """Return the mean over all ranks, on the device; do not wait for a GPU. Of the stages of a pipeline, one has the value."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size() // stages
    return value


def least_of_ranks(value: int, device: torch.device) -> int:
    """Return the smallest value of any rank; all ranks must call this."""
    least = torch.tensor(value, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
