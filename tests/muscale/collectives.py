"""The collectives that a block of code calls: kind, dtype and bytes of what one rank puts in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
}


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls inside the block, by (kind, dtype, bytes)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, torch.dtype, int]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call of c10d, functional or not, and make it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives of ordinary tensors
        space, name = function.name().split("::")
        name = name.split(".")[0]
        if space in ("c10d", "_c10d_functional") and name in _KINDS:
            given = args[1] if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_") else args[0]
            tensor = given if isinstance(given, Tensor) else given[0]
            self.calls[_KINDS[name], tensor.dtype, tensor.nbytes] += 1
        return function(*args, **(kwargs or {}))

    def of(self, kind: str) -> Counter[tuple[torch.dtype, int]]:
        """Calls of one kind, by (dtype, bytes)."""
        return Counter({(dtype, size): n for (what, dtype, size), n in self.calls.items() if what == kind})
