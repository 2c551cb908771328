"""Precision of a training: the dtype in which a model computes, and fp16's loss scale; weights, moments and the loss are always fp32.

On a GPU, fp32 does not mean TF32, unless the process allows TF32 by `torch.set_float32_matmul_precision`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from proxy_models.architecture.memory import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`Decoder.compute_dtype` of each precision."""
LEAST_SCALE = 2.0**-14  # gradients that overflow at a smaller loss scale overflow at any
_FIRST_SCALE = 2.0**16  # torch's default; the scale halves at each overflow and doubles after 2000 steps without one


@cache
def unsupported(precision: Precision, device: torch.device) -> str | None:
    """Return the reason why this device cannot train in this precision, or None; a small matrix product shows it."""
    try:
        matrix = torch.ones(2, 2, device=device, dtype=DTYPES[precision])
        _ = matrix @ matrix
    except RuntimeError as error:
        return str(error)
    return None


class LossScaler:
    """Loss scale of fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2); leaves out a step whose gradients overflow.

    The scale is read after every step, which waits for a GPU; bf16 needs no scale.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE)

    @property
    def scale(self) -> float:
        return float(self._scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *, take: bool = True) -> None:
        """Step unless the gradients overflowed or `take` is false, and adapt the scale."""
        if take:
            self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> Tensor:
        """Return the scale and the number of steps without overflow."""
        values = self._scaler.state_dict()
        return torch.tensor([values["scale"], values["_growth_tracker"]], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        scale, tracker = state.tolist()
        self._scaler.load_state_dict({**self._scaler.state_dict(), "scale": scale, "_growth_tracker": int(tracker)})
