"""Measurements along a run: a row for each step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxy_models.training.device import CPU, wait

WAIT_EVERY = 32
"""Number of steps between waits for a GPU, so that the time of this many steps is known."""


def passes(every_tokens: int | None, before: int, after: int) -> bool:
    """Return True if a multiple of `every_tokens` lies in (before, after]."""
    return every_tokens is not None and after // every_tokens > before // every_tokens


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values for each step, in the order of training.

    Attributes:
        start: Tokens seen before the first step.
        tokens: Tokens seen after the step.
        train_loss: The minimised loss on the step's batch before the step, nats per token; with label smoothing or z-loss it
            can't be compared with the validation loss.
        grad_norm: Global norm before clipping.
        seconds: Wall time since the first step began, at the step's end; on a GPU, which is waited for
            every `window` steps, other steps are but launched then.
        window: Steps over which a time means anything: 1 on the CPU, `WAIT_EVERY` on a GPU.
        figures: What the family reports of each step (`Family.end_step`), by name.
    """

    start: int
    tokens: NDArray[np.int64]
    train_loss: NDArray[np.float32]
    grad_norm: NDArray[np.float32]
    rate_factor: NDArray[np.float64]
    seconds: NDArray[np.float64]
    window: int = 1
    figures: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def table(
        self,
        *,
        bytes_per_token: float | None = 1.0,
        train_flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> pd.DataFrame:
        """Return a row for each step with derived columns: bits per byte, tokens per second, utilisation.

        The last two are means over the latest `window` steps, and NaN before that many steps.

        Args:
            bytes_per_token: Bytes of text per token, such as `Corpus.bytes_per_token`; None if unknown: bits per byte are NaN then.
            train_flops_per_token: Training FLOPs per token by `Member.train_flops_within`.
            peak_flops: FLOP/s of the device in the run's precision, such as `device.datasheet_flops`; with both, the column `mfu`
                is the used share (Chowdhery et al., arXiv 2204.02311, appendix B).
        """
        tokens, seconds = np.array([self.start, *self.tokens]), np.array([0.0, *self.seconds])
        rate = np.full(len(self.tokens), np.nan)
        rate[self.window - 1 :] = (tokens[self.window :] - tokens[: -self.window]) / np.maximum(
            seconds[self.window :] - seconds[: -self.window], 1e-9
        )
        columns = {
            "tokens": self.tokens,
            "train_loss": self.train_loss,
            "train_bits_per_byte": self.train_loss / (np.log(2) * (bytes_per_token or np.nan)),
            "grad_norm": self.grad_norm,
            "rate_factor": self.rate_factor,
            "seconds": self.seconds,
            "tokens_per_second": rate,
            **self.figures,
        }
        if train_flops_per_token is not None and peak_flops is not None:
            columns["mfu"] = rate * train_flops_per_token / peak_flops
        return pd.DataFrame(columns)


class Recorder:
    """Recorder of a curve; losses and norms stay tensors until they are read, so that no step waits for them."""

    def __init__(self, start: int, device: torch.device) -> None:
        """Begin at `start`, the tokens seen before the first step, and start the clock."""
        self._start, self._device = start, device
        self.losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._figures: dict[str, list[Tensor]] = {}
        self._steps: list[tuple[int, float, float]] = []
        self._started = time.perf_counter()

    def add(
        self, tokens: int, loss: Tensor, norm: Tensor, rate_factor: float, figures: Mapping[str, Tensor] | None = None
    ) -> None:
        """Count the step that ended at `tokens`; every step has the same further figures."""
        self.losses.append(loss)
        self._norms.append(norm)
        for name, figure in (figures or {}).items():
            if not figure.dim():
                self._figures.setdefault(name, []).append(figure)
        if len(self.losses) % WAIT_EVERY == 0:
            wait(self._device)
        self._steps.append((tokens, rate_factor, time.perf_counter() - self._started))

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._started

    @property
    def last_norm(self) -> float:
        return float(self._norms[-1])

    def curve(self) -> Curve:
        tokens, factors, seconds = zip(*self._steps, strict=True)
        return Curve(
            start=self._start,
            tokens=np.array(tokens, dtype=np.int64),
            train_loss=torch.stack(self.losses).float().cpu().numpy(),
            grad_norm=torch.stack(self._norms).float().cpu().numpy(),
            rate_factor=np.array(factors),
            seconds=np.array(seconds),
            window=1 if self._device == CPU else WAIT_EVERY,
            figures={name: torch.stack(of_steps).float().cpu().numpy() for name, of_steps in self._figures.items()},
        )
