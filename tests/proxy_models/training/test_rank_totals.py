"""Ranks of a part of the world, as in a pipeline's stage, train their parameters by themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from proxy_models.architecture.sharded import whole
from proxy_models.training.adafactor import Adafactor
from proxy_models.training.lamb import LAMB
from proxy_models.training.muon import MuonWithAdamW
from proxy_models.training.soap import SOAPWithAdamW
from tests.muscale.gloo_ranks import GlooRanks

STAGES = 2
TOLERANCE = {"adafactor": 1e-5, "lamb": 1e-5, "soap": 1e-4, "muon": 2e-2}  # Muon's matrices are computed in bf16


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    group: dict[str, Any] = {"params": parameters, "lr": 0.01, "weight_decay": 0.1}
    if name == "adafactor":
        return Adafactor([group])
    if name == "lamb":
        return LAMB([group | {"eps": 1e-12, "adapted": True}], betas=(0.9, 0.95))
    if name == "soap":
        return SOAPWithAdamW([group | {"eps": 1e-12, "rotated": True, "stack": False}], betas=(0.9, 0.95))
    return MuonWithAdamW([group | {"orthogonal": True, "stack": False}], betas=(0.9, 0.95))


def trained(name: str, stage: int, laid_out: Any = lambda values: values) -> list[Tensor]:
    """Return the parameters of a stage after three steps; stages differ in shapes, values and number of tensors."""
    generator = torch.Generator().manual_seed(stage)
    shapes = [(6, 4), (8, 10 + stage), *([(3, 5)] * stage)]
    parameters = [nn.Parameter(laid_out(torch.randn(shape, generator=generator))) for shape in shapes]
    optimizer = optimizer_of(name, parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = laid_out(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _train_stages() -> None:
    dist.init_process_group("gloo")
    world = init_device_mesh("cpu", (STAGES, 2, 1), mesh_dim_names=("stages", "shards", "tensor"))
    stage = world.get_local_rank("stages")
    for mesh, placements in ((world["shards"], [Shard(0)]), (world["shards", "tensor"], [Shard(0), Replicate()])):
        for name, tolerance in TOLERANCE.items():
            found = trained(name, stage, partial(distribute_tensor, device_mesh=mesh, placements=placements))
            for ours, alone in zip(found, trained(name, stage), strict=True):
                torch.testing.assert_close(whole(ours), alone, rtol=tolerance, atol=tolerance)


def test_ranks_of_a_part_of_the_world_train_as_one_process(gloo_ranks: GlooRanks) -> None:
    gloo_ranks.call(_train_stages, world_size=4)
