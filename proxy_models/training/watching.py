"""What the modules inside a model put out, seen in passing, and the size of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def watching(model: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Show `look` the name of every module and the tensor it puts out, in the forward passes inside; "" is the model."""

    def hook(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            look(name, output)

    handles = [module.register_forward_hook(partial(hook, name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rms(tensor: Tensor) -> float:
    """Root mean square of all entries, summed in double precision."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) / math.sqrt(tensor.numel())
