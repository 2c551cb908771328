"""Initial values, parameter groups, rates and clipping, by parameter name; the lean loop and Lightning share them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.parametrization import (
    HIDDEN_MATRICES,
    MULTIPLIERS,
    ForwardMultipliers,
    OptimizerName,
    Parametrization,
    TensorClass,
    TensorRule,
)
from proxy_models.architecture.sharded import is_sharded, whole, write
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.adafactor import Adafactor
from proxy_models.training.lamb import LAMB
from proxy_models.training.muon import MuonWithAdamW
from proxy_models.training.soap import SOAPWithAdamW

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MARKS: dict[OptimizerName, str] = {"muon": MuonWithAdamW.mark, "soap": SOAPWithAdamW.mark, "lamb": LAMB.mark}
"""Mark of the groups that an optimizer moves by its own rule: Muon and SOAP hidden matrices, LAMB all tensors that start at random
values. AdamW's rule moves the other groups."""


@torch.no_grad()
def initialize(
    model: nn.Module,
    parametrization: Parametrization,
    recipe: Recipe,
    *,
    seed: int,
    is_stage: bool = False,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the initial values in place: N(0, (init_scale · init_std)²), gains 1, biases 0, and the forward multipliers.

    A recipe may start the readout at 0. Given `values` replace the random ones, those of buffers too
    (`proxy_models.training.initial_weights`).

    Each tensor has its own generator, seeded by (seed, name), so the values depend neither on the order of the
    parameters nor on their sharding. A stage of a pipeline (`is_stage`) has some of the table's parameters.

    Raises:
        ValueError: If the model's parameter names differ from the table's, a tied readout would start at zero, there is a rate
            for embeddings but no untied embedding, or as `set_multipliers`.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != parametrization.rules.keys() and not (
        is_stage and parameters.keys() <= parametrization.rules.keys()
    ):
        odd = sorted(parameters.keys() ^ parametrization.rules.keys())
        raise ValueError(
            f"the parametrization must belong to this model; got parameters that only one of the two has: {', '.join(odd)}"
        )
    classes = {rule.tensor_class for rule in parametrization.rules.values()}
    if recipe.embedding_rate != 1 and TensorClass.EMBEDDING not in classes:
        raise ValueError(
            f"embedding_rate: must be 1 for a tied table, which follows output_rate; got {recipe.embedding_rate}"
        )
    if recipe.zero_readout and TensorClass.TIED in classes:
        raise ValueError("zero_readout: must be false for a readout that is tied to the embedding, got true")
    if values is not None:
        stored = {name: buffer for name, buffer in model.named_buffers() if name in values}
        for name, tensor in (parameters | stored).items():
            write(tensor, values[name])
        parameters = {}
    for name, parameter in parameters.items():
        rule = parametrization.rules[name]
        if not (std := initial_std(rule, recipe)):
            parameter.fill_(rule.init_mean)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = torch.randn(parameter.shape, generator=generator) * std
        write(parameter, drawn)
    set_multipliers(model, multipliers_of(parametrization, recipe))


@torch.no_grad()
def set_multipliers(model: nn.Module, multipliers: ForwardMultipliers) -> None:
    """Write the forward multipliers into the buffers `MULTIPLIERS`; raise FamilyError if one other than 1 has no buffer."""
    buffers = dict(model.named_buffers())
    for name, buffer in MULTIPLIERS.items():
        value = getattr(multipliers, name)
        if buffer in buffers:
            buffers[buffer].fill_(value)
        elif value != 1:
            raise FamilyError(
                f"{type(model).__name__} must apply the multiplier {name} = {value:g} in its forward pass by a buffer {buffer}, "
                f'and has none: self.register_buffer("{buffer}", torch.ones(()), persistent=False)'
            )


def multipliers_of(parametrization: Parametrization, recipe: Recipe) -> ForwardMultipliers:
    """Return the forward multipliers of the table times the tuned ones of the recipe."""
    return parametrization.multipliers.tuned(
        embedding=recipe.embedding_multiplier, readout=recipe.output_multiplier, attention=recipe.attention_multiplier
    )


def rate_decay_eps(rule: TensorRule, recipe: Recipe, optimizer: OptimizerName) -> tuple[float, float, float]:
    """Return a tensor's absolute peak rate, weight decay and Adam's eps: the tuned values of the recipe times muP's factors.

    The table has one factor for each (`TensorRule`); `set_rates` multiplies the rate by the schedule's factor at each step.
    """
    rates = {
        TensorClass.EMBEDDING: recipe.embedding_rate,
        TensorClass.READOUT: recipe.output_rate,
        TensorClass.TIED: recipe.output_rate,
    }
    return (
        recipe.learning_rate * rule.lr_factor * rates.get(rule.tensor_class, 1.0),
        0.0 if optimizer == "adam" else recipe.weight_decay * rule.weight_decay_factor,
        recipe.eps * rule.eps_factor,
    )


def initial_std(rule: TensorRule, recipe: Recipe) -> float:
    """Return the standard deviation of a tensor's initial values; 0: all values are `rule.init_mean`."""
    zero = recipe.zero_readout and rule.tensor_class is TensorClass.READOUT
    return 0.0 if zero else recipe.init_scale * rule.init_std


def make_optimizer(model: nn.Module, parametrization: Parametrization, recipe: Recipe) -> torch.optim.Optimizer:
    """Make the table's optimizer, with one group for each distinct (rate, decay, eps, algorithm).

    `peak_lr` in a group is its rate at schedule factor 1. `MARKS` lists the optimizers that leave some tensors to AdamW.
    "adam" has no weight decay. AdamW is torch's fused kernel on every device, since it rounds differently from the unfused one.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    name_of = parametrization.optimizer
    for name, parameter in model.named_parameters():
        rule = parametrization.rules[name]
        key = (*rate_decay_eps(rule, recipe, name_of), *_marks(rule, recipe, name_of).items())
        groups.setdefault(key, []).append((name, parameter))
    settings: list[dict[str, Any]] = []
    for (lr, decay, eps, *marks), parameters in groups.items():
        group = {"params": parameters, "lr": lr, "peak_lr": lr, "weight_decay": decay, **dict(marks)}
        if name_of not in ("lion", "adafactor") and not group.get("orthogonal"):
            group["eps"] = eps
        settings.append(group)
    betas = (recipe.beta1, recipe.beta2)
    match name_of:
        case "lion":
            from pytorch_optimizer import Lion  # a late import, since it is slow and rarely needed

            return cast(torch.optim.Optimizer, Lion(settings, betas=betas))
        case "adafactor":
            return Adafactor(settings)
        case "lamb":
            return LAMB(settings, betas=betas)
        case "muon":
            return MuonWithAdamW(settings, betas=betas)
        case "soap":
            return SOAPWithAdamW(settings, betas=betas)
    return torch.optim.AdamW(settings, betas=betas, fused=True)


def _marks(rule: TensorRule, recipe: Recipe, optimizer: OptimizerName) -> dict[str, bool]:
    """Return the marks of a tensor's group, none if AdamW's rule moves the tensor."""
    is_marked = initial_std(rule, recipe) > 0 if optimizer == "lamb" else rule.tensor_class in HIDDEN_MATRICES
    if optimizer not in MARKS or not is_marked:
        return {}
    return {MARKS[optimizer]: True, "stack": rule.tensor_class is TensorClass.HIDDEN_STACK}


def set_rates(optimizer: torch.optim.Optimizer, schedule_factor: float) -> None:
    """Set every group's rate to its peak rate, which includes muP's factor, times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * schedule_factor


def clip(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm`, and return the previous norm; also for sharded gradients."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh if is_sharded(parameter) else None, []).append(parameter)
    first, *others = by_mesh.values()
    if not others:
        return whole(clip_grad_norm_(first, max_norm, foreach=True))
    gradients = [[p.grad for p in of_mesh if p.grad is not None] for of_mesh in by_mesh.values()]
    norms = torch.stack([whole(get_total_norm(of_mesh, foreach=True)) for of_mesh in gradients])
    norm = cast(Tensor, torch.linalg.vector_norm(norms))
    for of_mesh in by_mesh.values():
        clip_grads_with_norm_(of_mesh, max_norm, norm, foreach=True)
    return norm
