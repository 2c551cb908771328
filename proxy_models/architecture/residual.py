"""The residual stream before and after a block of any family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from proxy_models.architecture.family import FamilyError


def change_stream(
    change: Callable[[Tensor, Tensor], Tensor], inputs: tuple[Any, ...], named: dict[str, Any], output: Any
) -> Any:
    """Return a block's output with `change(before, after)` in place of the stream after it; for a forward hook with keywords.

    The stream is a block's first input, or the keyword `hidden_states` of transformers, and its output or the first of several.

    Raises:
        FamilyError: If the block's first input and output are not tensors of one shape.
    """
    before = inputs[0] if inputs else named.get("hidden_states")
    is_several = isinstance(output, (tuple, list))
    after = output[0] if is_several else output
    if not (isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape):
        found = (tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (before, after))
        raise FamilyError(
            "a block's first input and its first output must be the residual stream, tensors of one shape; got {} and {}".format(
                *found
            )
        )
    changed = change(before, after)
    return (changed, *output[1:]) if is_several else changed
