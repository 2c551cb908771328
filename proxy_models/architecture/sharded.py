"""Tensors of which a device holds a part (torch's DTensor), for code that works on whole ones too.

Importing DTensor takes most of a second, so it is not imported here: where nobody has, there is none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own(tensor: Tensor) -> Tensor:
    """What this device holds of it, with gradients: of a replicated one, and of one that is no DTensor, the whole."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not is_sharded(tensor):
        return tensor
    return tensor.to_local()


@torch.no_grad()
def write(parameter: Tensor, values: Tensor) -> None:
    """Overwrite a parameter with `values` of its whole shape, of which every device takes its own part; nothing is sent."""
    if not is_sharded(parameter):
        parameter.copy_(values)
        return
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    part = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
    own(parameter).copy_(values[part])
