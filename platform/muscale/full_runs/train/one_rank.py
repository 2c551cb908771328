"""A rank of a full run in this process: two steps of a member, sharded as by a full run, compared with the lean loop.

Before a promotion this finds what FSDP2 can't train, and values that differ if a member is built without values and sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from muscale.full_runs.train.sharding import Meshes, build_model, mesh_of
from muscale.settings.parallelism import Parallelism, RankGrid
from proxy_models.architecture.families import build, family_of
from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.memory import Precision
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.uncounted import sequence_ids
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.step import Stepper

_SEQUENCES = 2
_RELATIVE = 1e-3  # for losses; one rank sums in the lean loop's order, and no family of the tests differs by 1e-6


def require_shardable(numerics: Numerics, hyperparameters: Hyperparameters, corpus: Corpus) -> None:
    """Take two steps of a member on one FSDP2 rank over gloo, with every unit sharded, and compare the losses with the lean loop's.

    Raises:
        FamilyError: If FSDP2 can't train the model, or its losses differ; the message names the modules or parameters.
    """
    n_tokens, context = 10_000 * hyperparameters.batch_tokens, numerics.model.context_length
    plain_values = replace(hyperparameters, batch_doublings=0, batch_ramp_tokens=0, warmup_floor_tokens=0)
    recipe = plain_values.resolve(n_tokens)
    sequences = sequence_ids(
        training_stream(corpus, context, seed=0, run_tokens=n_tokens).batch(0, _SEQUENCES * context)
    )
    # fp16 needs a single process without FSDP2, and a guard needs more steps.
    precision: Precision = "fp32" if numerics.precision == "fp16" else numerics.precision
    numerics = replace(numerics, precision=precision, guard=None)
    member, parametrization = numerics.model, numerics.parametrization(recipe.optimizer)
    family, name = family_of(member), type(family_of(member)).__name__
    with torch.random.fork_rng(devices=[]):
        plain = build(member)
        initialize(plain, parametrization, recipe, seed=numerics.seed)
        uncalled = set(family.units(plain))
        for unit in family.units(plain):
            unit.register_forward_pre_hook(lambda called, _inputs: uncalled.discard(called))
        expected = _losses(plain, numerics, recipe, sequences)
        unused = [module for module, unit in plain.named_modules() if unit in uncalled]
        plain_tensors = [
            f"{name}.{attribute}".lstrip(".")
            for name, module in plain.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor)
        ]
        try:
            with _one_rank():
                meshes = Meshes(mesh_of(RankGrid(1, 1, dist.get_world_size(), 1), "cpu"))
                rank = build_model(numerics, recipe, Parallelism(), device=torch.device("cpu"), meshes=meshes)
                losses = _losses(rank, numerics, recipe, sequences)
        except FamilyError:
            raise
        except Exception as error:  # torch or the model may raise anything
            raise FamilyError(
                f"{name}: must be trainable with FSDP2, but one rank fails: {type(error).__name__}: {error}"
                + (
                    f"; {', '.join(unused)} is not called as a module, but its weights are gathered only when it is called: call it, "
                    "or leave it out of the family's units"
                    if unused
                    else ""
                )
                + (
                    f"; tensors that are no buffers stay on the meta device: register_buffer for {', '.join(plain_tensors)}"
                    if plain_tensors
                    else ""
                )
            ) from error
    if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=_RELATIVE, atol=0.0, equal_nan=True):
        raise FamilyError(
            f"{name}: one rank of a full run must have the losses of the lean loop, {expected}; got {losses}; check the values "
            "that the model computes when it is built: a full run builds it on the meta device, then writes the family's constants"
        )


def _losses(model: nn.Module, numerics: Numerics, recipe: Recipe, sequences: Tensor) -> list[float]:
    """The losses of two steps on one batch."""
    optimizer = make_optimizer(model, numerics.parametrization(recipe.optimizer), recipe)
    stepper = Stepper(model, optimizer, numerics, recipe)
    return [
        float(stepper.step(sequences, number=number, tokens=number * sequences.numel(), rate_factor=1.0)[0])
        for number in range(2)
    ]


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone, unless it is already in a group.

    PyTorch replaces `sys.excepthook` with one that names the rank; a user's script gets its own back.
    """
    if dist.is_initialized():
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
