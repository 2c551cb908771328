"""Sharded tensors (torch's DTensor), for code that also handles ordinary tensors.

Importing DTensor takes most of a second, so this module does not: if no other module has imported it, no tensor is sharded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


_made: tuple[object, dict[tuple[int, ...], ProcessGroup]] = None, {}  # the process group, and groups by their ranks


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this device, with gradients; a replicated or ordinary tensor is returned whole."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not is_sharded(tensor):
        return tensor
    return tensor.to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if sharded; all ranks of a sharded tensor must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def have_same_values(one: Tensor, other: Tensor) -> bool:
    """Return True for tensors of the same shape, dtype and bits, so that NaN equals NaN; sharded tensors are gathered."""
    one, other = whole(one), whole(other)
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor laid out for the parameter `like`: sharded as `like`, or copied to each rank if the shapes differ.

    A tensor that is already sharded, is a single number, or belongs to an ordinary parameter is returned unchanged.
    """
    if not is_sharded(like) or is_sharded(values) or not values.ndim:
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    if values.shape != like.shape:
        return DTensor.from_local(values.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = values[part_of(like)].to(like.device)
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def first_row(table: DTensor) -> int:
    """Return the number of this rank's first row in a table sharded by rows over one dimension."""
    group = table.device_mesh.get_group()
    return group.rank() * -(-len(table) // group.size())


def within(ids: Tensor, first: int | None, n_rows: int) -> tuple[Tensor, Tensor | None]:
    """Return the indices of ids among the `n_rows` rows from `first` on, and a mask of ids elsewhere; None: all rows are here."""
    if first is None:
        return ids, None
    index = ids - first
    return index.clamp(0, n_rows - 1), (index < 0) | (index >= n_rows)


@torch.no_grad()
def write(parameter: Tensor, values: Tensor) -> None:
    """Overwrite a parameter with `values` of its global shape; every device takes its part, without communication."""
    if not is_sharded(parameter):
        parameter.copy_(values)
        return
    own(parameter).copy_(values[part_of(parameter)])


def part_of(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that are on this device."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))


def group_of(tensor: DTensor) -> ProcessGroup:
    """Return the group of all ranks of the tensor's mesh, which may be a part of the world, as for a stage of a pipeline.

    The ranks of the mesh make the first call together, which may make the group.
    """
    import torch.distributed as dist

    global _made
    mesh = tensor.device_mesh
    if mesh.size() == dist.get_world_size():
        return cast("ProcessGroup", dist.group.WORLD)
    if mesh.ndim == 1:
        return mesh.get_group()
    if _made[0] is not dist.group.WORLD:
        _made = dist.group.WORLD, {}
    ranks = tuple(mesh.mesh.flatten().tolist())
    if ranks not in _made[1]:
        _made[1][ranks] = cast("ProcessGroup", dist.new_group([*ranks], use_local_synchronization=True))
    return _made[1][ranks]


def made_groups() -> list[ProcessGroup]:
    """Return the groups that `group_of` has made in the current process group."""
    import torch.distributed as dist

    return [*_made[1].values()] if _made[0] is dist.group.WORLD else []
