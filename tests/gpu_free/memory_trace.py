"""Bytes that a device holds while a block of code runs on fake tensors: at most, and by what they are for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from proxy_models.architecture import cross_entropy


def _uncompiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: kernel(*arguments[:-1], False)


_COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.ops.muscale.logit_statistics.default: _uncompiled(cross_entropy._statistics),
    torch.ops.muscale.logit_gradients.default: _uncompiled(cross_entropy._gradients),
}
"""Operators of our own that make tensors inside, of which a fake call makes none; uncompiled, which takes the most memory."""
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_LOGSUMEXP = torch.ops.aten.logsumexp.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ACTIVATIONS, _IGNORED = "activations", "ignored"


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that live at a time.

    Attributes:
        most: Largest number of bytes at a time.
        peak: These by kind: what `hold` was given, "gathered" and "reduced" by FSDP2, and else "activations", to which whole
            gradients belong before they are reduced.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self.peak: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._alive: dict[int, tuple[str, int]] = {}
        self._kind = _ACTIVATIONS
        self._patches = [
            patch.object(torch.UntypedStorage, "resize_", self._resizing()),
            # DTensor asks for the shapes of whole tensors, which no device holds.
            self._labelled(ShardingPropagator, "_propagate_tensor_meta_non_cached", _IGNORED),
            self._labelled(_fsdp_param_group, "foreach_all_gather", "gathered"),
            self._labelled(_fsdp_param_group, "foreach_all_gather_copy_out", "gathered"),
            self._labelled(_fsdp_param_group, "foreach_reduce", "reduced"),
        ]

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before."""
        with self._of(kind):
            for tensor in tensors:
                self._add(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Count what is made inside."""
        with ExitStack() as stack:
            for one in self._patches:
                stack.enter_context(one)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and count what it makes."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators are of ordinary tensors
        if function in _COMPOSED:
            with self:
                return _COMPOSED[function](*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if function is _WAIT:
            self._remove(id(args[0].untyped_storage()))  # the same tensor, where it is not fake
        tree_map_only(Tensor, self._add, result)
        self._count("workspace", workspace := _workspace(function, args))
        self._count("workspace", -workspace)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._alive or self._kind == _IGNORED:
            return
        self._alive[id(storage)] = self._kind, storage.nbytes()
        self._count(self._kind, storage.nbytes())
        weakref.finalize(storage, self._remove, id(storage))

    def _remove(self, key: int) -> None:
        kind, size = self._alive.pop(key, (self._kind, 0))
        self._count(kind, -size)

    def _count(self, kind: str, size: int) -> None:
        self._now[kind] += size
        if size > 0 and (total := self._now.total()) > self.most:
            self.most, self.peak = total, +self._now

    @contextmanager
    def _of(self, kind: str) -> Iterator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def _labelled(self, owner: Any, name: str, kind: str) -> Any:
        function = getattr(owner, name)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self._of(kind):
                return function(*args, **kwargs)

        return patch.object(owner, name, called)

    def _resizing(self) -> Callable[..., Any]:
        """FSDP2 empties and fills the storages of gathered weights in place."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            kind, before = self._alive.get(id(storage), ("gathered", 0))
            if id(storage) not in self._alive:
                weakref.finalize(storage, self._remove, id(storage))
            self._alive[id(storage)] = kind, size
            self._count(kind, size - before)
            return resize(storage, size)

        return resized


def _workspace(function: Any, args: Any) -> int:
    """Bytes that a GPU's kernel allocates for itself, of those with much.

    FlashAttention backward: queries' gradients in fp32 and, of grouped heads, keys' and values' for every query head (`mha_bwd` in
    flash_api.cpp). Log-sum-exp: the exponentials (`logsumexp_out_impl` in ReduceOps.cpp).
    """
    if function is _LOGSUMEXP:
        return int(args[0].nbytes)
    if function is not _FLASH_BACKWARD:
        return 0
    query, key = args[1:3]
    return int(4 * query.numel() + (2 * query.nbytes if key.shape[1] < query.shape[1] else 0))
