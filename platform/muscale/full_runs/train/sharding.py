"""Sharding of a model: the device mesh, Lightning's strategy for the mesh, and a build in which no device holds the full model.

FSDP2 does data parallelism over one or two mesh dimensions, as when ranks train a proxy together; the model's family does tensor
and context parallelism within it. On a mesh all parameters are DTensors under their original names, which optimizer groups, clipping
and checkpoints use.

Tested on gloo with up to eight ranks, eager and compiled; collectives counted on fake ranks; not tested on several GPUs or nodes.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from muscale.errors import StageError
from muscale.full_runs.distributed import of_all_ranks
from muscale.full_runs.train.roll_call import RollCall
from muscale.settings.parallelism import Parallelism, RankGrid
from proxy_models.architecture.families import build, family_of
from proxy_models.architecture.memory import largest_micro_batch
from proxy_models.architecture.sharded import made_groups
from proxy_models.architecture.stage import Stage, edges_of
from proxy_models.architecture.stage_layout import blocks_of_stages, n_stages, stages_of_rank
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.device import memory_limit
from proxy_models.training.fsdp import allocate, shard
from proxy_models.training.initial_weights import starting_values
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize, multipliers_of, set_multipliers
from proxy_models.training.pipeline import Pipeline
from proxy_models.training.precision import DTYPES
from proxy_models.training.traced_memory import estimated_memory

# A norm over two mesh dimensions takes two reductions, about which torch warns; ranks still agree.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

_STAGES, _REPLICAS, _SHARDS, _TENSOR = RankGrid._fields
_EXPERTS = "experts"


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's model-parallel strategy with our mesh and the rank's device, and a separate timeout after the first step."""

    def __init__(
        self, parallelism: Parallelism, device: torch.device, *, step_timeout: timedelta, step: Callable[[], int]
    ) -> None:
        """Lay the run out over its ranks; `step` returns the last step that this rank took."""
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=True)
        self._parallelism, self._device, self._step_timeout, self._step = parallelism, device, step_timeout, step
        self._roll_call: RollCall | None = None
        self._meshes: Meshes | None = None

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    def setup_environment(self) -> None:
        """Create the mesh, for which Lightning supports two dimensions only; raise StageError if the ranks do not fit the layout."""
        self._setup_distributed()
        try:
            grid = rank_grid(self._parallelism)
            self._meshes = Meshes.of(self._parallelism, grid, self._device.type)
        except ValueError as error:
            raise StageError(f"promote: {error}") from error
        self._device_mesh = self._meshes.ranks
        module: Any = self.lightning_module
        module.meshes = self._meshes
        self._roll_call = RollCall(self._step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the timeout of steps after the first step, in which blocks are compiled.

        torch has no public function for this; torchtitan (https://github.com/pytorch/torchtitan, `set_pg_timeouts`) does the same.
        """
        if batch_idx == 1 and self._roll_call:
            self.barrier()  # with the longer timeout, since ranks may still compile
            groups = [group for mesh in self._meshes or () if mesh for group in mesh.get_all_groups()]
            for group in (None, *groups, *made_groups()):
                _set_pg_timeout(self._step_timeout, group)
            self._roll_call.patience = self._step_timeout.total_seconds() / 2

    def teardown(self) -> None:
        """End the roll call."""
        if self._roll_call:
            self._roll_call.end()
        super().teardown()


def rank_grid(parallelism: Parallelism) -> RankGrid:
    """The grid of a layout over the ranks, which all call this; raises ValueError if their number or the nodes' sizes don't fit it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # ranks on this node
    by_rank = of_all_ranks(int(ranks) if ranks else None)
    if parallelism.sharding == "hybrid" and parallelism.shard_ranks is None and len(set(by_rank)) > 1:
        first = {n: by_rank.index(n) for n in dict.fromkeys(by_rank)}
        raise ValueError(
            'sharding = "hybrid" needs the same number of ranks on each node, got '
            + " and ".join(f"{n} on the node of rank {rank}" for n, rank in first.items())
            + "; start the same number on each, or set promote.shard_ranks"
        )
    return parallelism.grid(len(by_rank), node_ranks=by_rank[0])


def mesh_of(grid: RankGrid, device_type: str) -> DeviceMesh:
    """The mesh of a grid, without dimensions of size 1 for stages and products."""
    sizes = {name: n for name, n in grid._asdict().items() if n > 1 or name in (_REPLICAS, _SHARDS)}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def context_mesh(parallelism: Parallelism, device_type: str) -> DeviceMesh | None:
    """The mesh of the ranks that share this rank's sequences, None for a single one; all ranks call this."""
    tensor, context = parallelism.tensor_parallel, parallelism.context_parallel
    if context == 1:
        return None
    sizes = (dist.get_world_size() // (context * tensor), context, tensor)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("sequences", "context", "tensor"))["context"]


def expert_mesh(parallelism: Parallelism, grid: RankGrid, device_type: str) -> DeviceMesh | None:
    """The mesh (replicas, shards, experts) of ranks that share out experts, None if each has all; all ranks call this."""
    n = parallelism.expert_parallel
    if n == 1:
        return None
    sizes = (grid.replicas // n, 1, n) if parallelism.sharding == "none" else (grid.replicas, grid.shards // n, n)
    return init_device_mesh(device_type, sizes, mesh_dim_names=(_REPLICAS, _SHARDS, _EXPERTS))


class Meshes(NamedTuple):
    """Device meshes of this rank: that of `mesh_of`, and those of ranks that share its sequences or have other experts."""

    ranks: DeviceMesh
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def of(cls, parallelism: Parallelism, grid: RankGrid, device_type: str) -> Self:
        """Make the meshes of a layout; all ranks call this."""
        ranks, context = mesh_of(grid, device_type), context_mesh(parallelism, device_type)
        return cls(ranks, context, expert_mesh(parallelism, grid, device_type))


def build_model(
    numerics: Numerics,
    recipe: Recipe,
    parallelism: Parallelism,
    *,
    device: torch.device,
    meshes: Meshes | None,
    min_unit_params: int = 0,
    compiled: bool = False,
    initial_values: bool = True,
    initial_weights: Path | None = None,
) -> nn.Module:
    """Build the model with initial values that do not depend on the layout; on a mesh each rank creates only its part.

    Args:
        meshes: None in one process.
        min_unit_params: Blocks, embeddings and readouts with fewer parameters are sharded together with the rest of the model.
        initial_values: Whether to write initial values: a checkpoint would replace them, and drawing those of 70B takes minutes.
        initial_weights: Folder of the weights of `Numerics.initial_weights`.

    Raises:
        ValueError: If the layout does not fit the model.
    """
    model = _without_values(numerics, parallelism, device=device, meshes=meshes, compiled=compiled)
    family = family_of(numerics.model)
    if meshes is not None:
        experts = meshes.experts
        shard(
            model,
            family,
            _of_a_batch(meshes.ranks, parallelism),
            parallelism.sharding,
            min_unit_params=min_unit_params,
            experts=list(family.share_experts(model, experts[_EXPERTS])) if experts else (),
            expert_mesh=_of_a_batch(experts, parallelism) if experts else None,
        )
    _give_values(model, numerics, recipe, device=device, initial_values=initial_values, initial_weights=initial_weights)
    return model


def build_pipeline(
    numerics: Numerics,
    recipe: Recipe,
    parallelism: Parallelism,
    *,
    device: torch.device,
    meshes: Meshes,
    micro_batch: int | None = None,
    min_unit_params: int = 0,
    compiled: bool = False,
    initial_values: bool = True,
    initial_weights: Path | None = None,
) -> Pipeline:
    """Build this rank's stages of the model as `build_model` builds a whole one.

    Args:
        micro_batch: Most sequences of a micro-batch.

    Raises:
        ValueError: If the layout does not fit the model, or the model can't be cut into stages.
    """
    family, schedule, mesh = family_of(numerics.model), parallelism.pipeline_schedule, meshes.ranks
    ranks, rank = mesh[_STAGES].size(), mesh[_STAGES].get_local_rank()
    edges = edges_of(numerics.model, DTYPES[numerics.precision])
    blocks = blocks_of_stages(numerics.model, n_stages(schedule, ranks))
    stages = {}
    for number in stages_of_rank(schedule, rank, ranks):
        model = _without_values(numerics, parallelism, device=device, meshes=meshes, compiled=compiled)
        stage = Stage(model, family, blocks[number], edges, device=device)
        of_a_batch = _of_a_batch(mesh, parallelism)
        shard(model, family, of_a_batch, parallelism.sharding, min_unit_params=min_unit_params, root=stage)
        _give_values(
            model,
            numerics,
            recipe,
            device=device,
            initial_values=initial_values,
            initial_weights=initial_weights,
            is_stage=True,
        )
        stages[number] = stage
    own_positions = edges.stream.shape[1] // parallelism.sequence_ranks
    return Pipeline(
        stages,
        schedule,
        group=mesh[_STAGES].get_group(),
        stream=edges.stream[:, :own_positions],
        micro_batch=micro_batch,
    )


def _without_values(
    numerics: Numerics, parallelism: Parallelism, *, device: torch.device, meshes: Meshes | None, compiled: bool
) -> nn.Module:
    """The whole model on the meta device, with precision, checkpointing, shared products and sequences, and compilation."""
    parallelism.require(numerics.model)
    member, family = numerics.model, family_of(numerics.model)
    mesh, context, experts = meshes or (None, None, None)
    tensor, stages = (mesh[of] if mesh is not None and of in _names(mesh) else None for of in (_TENSOR, _STAGES))
    needed = {
        "tensor_parallel": tensor,
        "context_parallel": context,
        "expert_parallel": experts[_EXPERTS] if experts else None,
        "pipeline_parallel": stages,
    }
    for name, ranks in needed.items():
        if (wanted := getattr(parallelism, name)) != (ranks.size() if ranks else 1):
            raise ValueError(f"{name} = {wanted} needs as many ranks, launched together")
    with torch.device("meta"):
        model = build(member)
    family.set_precision(model, DTYPES[numerics.precision])
    family.set_checkpointing(model, parallelism.checkpointing)
    if tensor:
        family.share_products(model, tensor)
    if context:
        family.share_sequences(model, context)
    # torch 2.13 saves the CPU's random state for recomputed fused attention, and mistakes it for the mesh that a graph of DTensors
    # saves (`functionalize_rng_ops` in torch/_functorch/partitioners.py); a GPU's random state is saved elsewhere.
    for block in family.blocks_of(model) if compiled else ():
        family.compile_block(block, outside_recomputing=tensor is not None and device.type == "cpu")
    if compiled:
        family.compile_loss(model)
    return model


def _of_a_batch(mesh: DeviceMesh, parallelism: Parallelism) -> DeviceMesh:
    """The mesh of the ranks that share a batch."""
    return mesh[_REPLICAS, _SHARDS] if parallelism.sharding in ("none", "hybrid") else mesh[_SHARDS]


def _give_values(
    model: nn.Module,
    numerics: Numerics,
    recipe: Recipe,
    *,
    device: torch.device,
    initial_values: bool,
    initial_weights: Path | None,
    is_stage: bool = False,
) -> None:
    """Move a model without values to the device, and write its constants, multipliers and initial values."""
    allocate(model, family_of(numerics.model), numerics.model, device)
    parametrization = numerics.parametrization(recipe.optimizer)
    if initial_values:
        values = starting_values(numerics, recipe, initial_weights)
        initialize(model, parametrization, recipe, seed=numerics.seed, is_stage=is_stage, values=values)
    else:
        set_multipliers(model, multipliers_of(parametrization, recipe))


def fitting_micro_batch(
    numerics: Numerics, recipe: Recipe, parallelism: Parallelism, *, device: torch.device
) -> int | None:
    """Sequences per pass: on GPUs the largest divisor of a share that fits each GPU by the estimate; else None, the whole share.

    None is also returned for a model that can't be traced; promote.micro_batch sets the value then. All ranks call this and get the
    same number, even on unequal GPUs: each pass has collectives, so all ranks need the same number of passes.
    """
    if device.type != "cuda":
        return None
    grid = rank_grid(parallelism)
    shares = parallelism.data_ranks(math.prod(grid)) * numerics.model.context_length
    first, share = (-(-tokens // shares) for tokens in (recipe.ramp.first_batch_tokens, recipe.batch_tokens))
    estimate = partial(
        estimated_memory,
        numerics.model,
        precision=numerics.precision,
        optimizer=recipe.optimizer,
        **parallelism.memory_conditions(grid, share),
    )
    try:
        pipeline = parallelism.pipeline(first, doublings=recipe.batch_doublings)
        sequences = first if pipeline else share  # the smaller batches of a ramp take one pass
        fitting = largest_micro_batch(estimate, sequences, limit=memory_limit(device), pipeline=pipeline)
    except ValueError:
        return None
    return min(of_all_ranks(fitting))


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()
