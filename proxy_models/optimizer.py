"""Initial values, parameter groups, rates and clipping: one definition for the lean loop and for Lightning, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from proxy_models.decoder import Decoder
from proxy_models.hyperparameters import Recipe
from proxy_models.parametrization import Parametrization


@torch.no_grad()
def initialize(model: nn.Module, parametrization: Parametrization, recipe: Recipe, *, seed: int) -> None:
    """Write the initial values in place: N(0, (init_scale · init_std)²), gains 1, biases 0, and the forward multipliers.

    Each tensor draws from a generator of its own, seeded by (seed, name): the values do not depend on the order of the
    parameters, nor on how they are sharded.

    Raises:
        ValueError: If the model's parameter names are not the table's.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != parametrization.rules.keys():
        odd = sorted(parameters.keys() ^ parametrization.rules.keys())
        raise ValueError(f"the parametrization is of another model: {', '.join(odd)} stand in only one of the two")
    for name, parameter in parameters.items():
        rule = parametrization.rules[name]
        if rule.init_std == 0:
            parameter.fill_(rule.init_mean)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(parameter.shape, generator=generator) * (recipe.init_scale * rule.init_std)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(values.to(parameter.device), mesh, placements))
        else:
            parameter.copy_(values)
    if isinstance(model, Decoder):
        model.set_multipliers(
            parametrization.multipliers.tuned(
                embedding=recipe.embedding_multiplier,
                readout=recipe.output_multiplier,
                attention=recipe.attention_multiplier,
            )
        )


def adamw(model: nn.Module, parametrization: Parametrization, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with one group for each distinct (rate, decay, eps); `peak_lr` in a group is its rate at schedule factor 1."""
    groups: dict[tuple[float, float, float], list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        rule = parametrization.rules[name]
        key = (
            recipe.learning_rate * rule.lr_factor,
            recipe.weight_decay * rule.weight_decay_factor,
            recipe.eps * rule.eps_factor,
        )
        groups.setdefault(key, []).append((name, parameter))
    settings: list[dict[str, Any]] = [
        {"params": parameters, "lr": lr, "peak_lr": lr, "weight_decay": decay, "eps": eps}
        for (lr, decay, eps), parameters in groups.items()
    ]
    return torch.optim.AdamW(settings, betas=(recipe.beta1, recipe.beta2), fused=True)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group to its own peak rate times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def clip(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`, and return the norm before; true also for sharded gradients."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
