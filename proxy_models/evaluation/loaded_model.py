"""The model of an evaluation from stored weights, in one process or sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method

from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import build, family_of, with_weights
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.training.fsdp import allocate, shard
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import set_multipliers
from proxy_models.training.precision import DTYPES


def loaded_model(
    weights: Mapping[str, Tensor], numerics: Numerics, multipliers: ForwardMultipliers, *, device: torch.device
) -> nn.Module:
    """Return a model with these weights, by the names of `Family.stored`, as measures see it: in its run's precision, without dropout.

    Raises:
        FamilyError, KeyError, RuntimeError, ValueError: If the weights are those of another model.
    """
    model = with_weights(numerics.model, weights).to(device)
    set_multipliers(model, multipliers)
    family_of(numerics.model).set_precision(model, DTYPES[numerics.precision])
    return model.eval()


def sharded_model(
    fill: Callable[[Mapping[str, Tensor]], None], numerics: Numerics, multipliers: ForwardMultipliers, mesh: DeviceMesh
) -> nn.Module:
    """Return a model as `loaded_model` does, sharded over all ranks, which call this together.

    Args:
        fill: Writes a rank's part of the weights, by the names of `Family.stored`.
        mesh: Mesh of all ranks, with one dimension.
    """
    member, family = numerics.model, family_of(numerics.model)
    with torch.device("meta"):
        model = build(member)
    family.set_precision(model, DTYPES[numerics.precision])
    shard(model, family, mesh)
    allocate(model, family, member, torch.device(mesh.device_type))
    set_multipliers(model, multipliers)
    fill(family.stored(model))
    if isinstance(model, Decoder):
        register_fsdp_forward_method(model, "next_logits")  # which then gathers the weights
    return model.eval()
