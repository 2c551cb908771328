"""Measurements along a run: a row for each step, and at intervals the validation loss and the size of every layer.

Observing changes no bit of the training: everything but the step's own numbers is measured in separate passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxy_models.training.device import CPU, wait

WAIT_EVERY = 32
"""Steps after which a GPU is waited for, so that the time of as many steps is known."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Quantities to measure along a run, each at the first step that passes a multiple of so many tokens; None: never.

    Attributes:
        evaluate_every_tokens: Validation loss of the current weights.
        layers_every_tokens: Root mean square of each module's output before the step, and of each parameter's change in it.
    """

    evaluate_every_tokens: int | None = None
    layers_every_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("evaluate_every_tokens", "layers_every_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive or None, got {value}")


def passes(every_tokens: int | None, before: int, after: int) -> bool:
    """Return True if a multiple of `every_tokens` lies in (before, after]."""
    return every_tokens is not None and after // every_tokens > before // every_tokens


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One entry a step, in the order of training.

    Attributes:
        start: Tokens seen before the first step.
        tokens: Tokens seen after the step.
        train_loss: The minimised loss on the step's batch before the step, nats per token; with label smoothing or z-loss it
            is not the validation loss's kind.
        grad_norm: Global norm before clipping.
        seconds: Wall time since the first step began, at the step's end, without observation; on a GPU, which is waited for
            every `window` steps, other steps are but launched then.
        val_loss: Nats per token after the step, NaN where it was not evaluated.
        layers: Columns tokens, name, quantity ("activation", before the step, or "update"), rms.
        window: Steps over which a time means anything: 1 on the CPU, `WAIT_EVERY` on a GPU.
    """

    start: int
    tokens: NDArray[np.int64]
    train_loss: NDArray[np.float32]
    grad_norm: NDArray[np.float32]
    rate_factor: NDArray[np.float64]
    seconds: NDArray[np.float64]
    val_loss: NDArray[np.float64]
    layers: pd.DataFrame
    window: int = 1

    def table(
        self,
        *,
        bytes_per_token: float | None = 1.0,
        train_flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> pd.DataFrame:
        """Return a row for each step with derived columns: bits per byte, perplexity, tokens per second, utilisation.

        The last two are means over the latest `window` steps, and NaN before there are so many.

        Args:
            bytes_per_token: Bytes of text per token, such as `Corpus.bytes_per_token`; None where unknown: bits per byte are NaN then.
            train_flops_per_token: `Member.train_flops_within`.
            peak_flops: FLOP/s of the device in the run's precision, such as `device.datasheet_flops`; with both, the column `mfu`
                is the share that was used (Chowdhery et al., arXiv 2204.02311, appendix B).
        """
        tokens, seconds = np.array([self.start, *self.tokens]), np.array([0.0, *self.seconds])
        rate = np.full(len(self.tokens), np.nan)
        rate[self.window - 1 :] = (tokens[self.window :] - tokens[: -self.window]) / np.maximum(
            seconds[self.window :] - seconds[: -self.window], 1e-9
        )
        nats_per_bit_per_byte = np.log(2) * (bytes_per_token or np.nan)
        columns = {
            "tokens": self.tokens,
            "train_loss": self.train_loss,
            "train_bits_per_byte": self.train_loss / nats_per_bit_per_byte,
            "val_loss": self.val_loss,
            "val_bits_per_byte": self.val_loss / nats_per_bit_per_byte,
            "val_perplexity": np.exp(self.val_loss),
            "grad_norm": self.grad_norm,
            "rate_factor": self.rate_factor,
            "seconds": self.seconds,
            "tokens_per_second": rate,
        }
        if train_flops_per_token is not None and peak_flops is not None:
            columns["mfu"] = rate * train_flops_per_token / peak_flops
        return pd.DataFrame(columns)


class Recorder:
    """Collects a curve; losses and norms stay tensors until they are read, so that no step waits for them."""

    def __init__(self, start: int, module: nn.Module, observation: Observation, evaluate: Callable[[], float]) -> None:
        """Begin, and start the clock.

        Args:
            start: Tokens seen before the first step.
            observation: Quantities to measure besides the steps.
            evaluate: Returns the validation loss of the module as it is.
        """
        self._start, self._module, self._observation, self._evaluate = start, module, observation, evaluate
        self._device = next(module.parameters()).device
        self.losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._steps: list[tuple[int, float, float]] = []
        self._val_losses: dict[int, float] = {}
        self._layers: list[dict[str, Any]] = []
        self._started = time.perf_counter()

    def add(self, tokens: int, loss: Tensor, norm: Tensor, rate_factor: float) -> None:
        """Count the step that ended at `tokens`."""
        self.losses.append(loss)
        self._norms.append(norm)
        if len(self.losses) % WAIT_EVERY == 0:
            wait(self._device)
        self._steps.append((tokens, rate_factor, time.perf_counter() - self._started))

    @contextmanager
    def observing(self, tokens: int, after: int, sequences: Tensor) -> Iterator[None]:
        """Measure what is due around the step from `tokens` to `after`, without counting the time that it takes."""
        layers = passes(self._observation.layers_every_tokens, tokens, after)
        if layers:
            with self._stopped():
                self._add_layers(after, "activation", activation_rms(self._module, sequences))
                before = {name: parameter.detach().clone() for name, parameter in self._module.named_parameters()}
        yield
        if layers:
            with self._stopped():
                self._add_layers(after, "update", update_rms(self._module, before))
        if passes(self._observation.evaluate_every_tokens, tokens, after):
            with self._stopped():
                self._val_losses[after] = self._evaluate()

    def _add_layers(self, tokens: int, quantity: str, rms: dict[str, float]) -> None:
        self._layers += [{"tokens": tokens, "name": n, "quantity": quantity, "rms": value} for n, value in rms.items()]

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        wait(self._device)  # the steps that were launched count
        began = time.perf_counter()
        yield
        self._started += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Seconds so far, without those of measuring."""
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
            val_loss=np.array([self._val_losses.get(at, np.nan) for at in tokens]),
            layers=pd.DataFrame(self._layers, columns=["tokens", "name", "quantity", "rms"]),
            window=1 if self._device == CPU else WAIT_EVERY,
        )


@torch.no_grad()
def activation_rms(module: nn.Module, sequences: Tensor) -> dict[str, float]:
    """Root mean square of every module's output on a batch, by name ("" is the model), in evaluation mode."""
    sizes: dict[str, float] = {}
    was_training = module.training
    module.eval()
    try:
        with watching(module, lambda name, output: sizes.update({name: rms(output)})):
            module(sequences[:, :-1])
    finally:
        module.train(was_training)
    return sizes


@torch.no_grad()
def update_rms(module: nn.Module, before: dict[str, Tensor]) -> dict[str, float]:
    """Root mean square of every parameter's change since `before`, by name."""
    return {name: rms(parameter - before[name]) for name, parameter in module.named_parameters()}


@contextmanager
def watching(model: nn.Module, look: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Show `look` the name of every module and the tensor it puts out, in the forward passes inside; "" is the model.

    Of a tuple it is the first entry: the values of torch's recurrent layers and of its attention, beside states and weights.
    """

    def hook(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        values = output[0] if isinstance(output, tuple) and output else output
        if isinstance(values, Tensor):
            look(name, values)

    handles = [module.register_forward_hook(partial(hook, name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rms(tensor: Tensor) -> float:
    """Root mean square of all entries, summed in double precision."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) / math.sqrt(tensor.numel())
