"""State from which a training continues exactly, as tensors by name, in memory and on disk."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from proxy_models.architecture.family import FamilyError, state_buffers
from proxy_models.architecture.parametrization import Parametrization
from proxy_models.architecture.sharded import have_same_values, laid_out
from proxy_models.files import atomic_write

WEIGHT = "weight/"  # prefix of a weight's name in a state
BUFFER = "buffer/"  # prefix of the name of a buffer that training changes


class StateError(ValueError):
    """Error for a file without a complete training state: the file is truncated, or changed after writing."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """State of a training after a number of tokens.

    Attributes:
        tensors: Weights, the buffers that training changes, the optimizer's moments, and the state of loss scaling and guard; on the
            CPU, so that training can continue on any device.
    """

    tokens: int
    parametrization: Parametrization
    tensors: dict[str, Tensor]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights and buffers by their names in the model."""
        return {
            key.removeprefix(prefix): tensor
            for prefix in (WEIGHT, BUFFER)
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }

    def save(self, path: Path) -> None:
        """Write the state to `path` atomically; raise OSError if the disk is full or not writable."""
        path.parent.mkdir(parents=True, exist_ok=True)
        table = self.parametrization.to_dict()
        with atomic_write(path) as unfinished, _ErrorKeepingWriter(io.FileIO(unfinished, "w")) as file:
            try:
                torch.save({"tokens": self.tokens, "parametrization": table, "tensors": self.tensors}, file)
            except RuntimeError as error:
                raise file.error or error from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a state that `save` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            StateError: If the file is truncated, or a byte changed after writing.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                changed = archive.testzip()  # torch writes a checksum of each tensor but never reads it
            if changed:
                raise StateError(f"{path}: {changed} does not match its checksum")
            saved = torch.load(path, weights_only=True, map_location="cpu")
            table = Parametrization.from_dict(saved["parametrization"])
            return cls(tokens=saved["tokens"], parametrization=table, tensors=saved["tensors"])
        except Exception as error:  # each layer raises different errors for a damaged file
            if isinstance(error, StateError) or (isinstance(error, OSError) and error.filename is not None):
                raise
            raise StateError(f"{path}: can't be read as a training state: {error}") from error


class _ErrorKeepingWriter(io.BufferedWriter):
    """Writer that keeps the error of a write; torch reports only an unexpected position."""

    error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.error = error
            raise


def buffer_check(module: nn.Module, changing: Container[str] = ()) -> Callable[[], None]:
    """Return a check that the persistent buffers still have their current values, since no state stores them.

    `changing` are the last names of buffers that are stored. The check raises FamilyError if another buffer has changed, and waits
    for the device.
    """
    kept = module.state_dict(keep_vars=True).keys() - state_buffers(module, changing).keys()
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if name in kept}

    def check() -> None:
        after = dict(module.named_buffers())
        changed = [name for name, buffer in before.items() if not have_same_values(buffer, after[name])]
        if changed:
            raise FamilyError(
                f"{type(module).__name__}: buffers must stay constant in a training step; got changes of {', '.join(changed)}; "
                "make them parameters, compute them from the input, or name them in the family's state_buffers"
            )

    return check


def capture(module: nn.Module, optimizer: torch.optim.Optimizer, buffers: Container[str] = ()) -> dict[str, Tensor]:
    """Return copies of the weights, of the state buffers with these last names, and of the optimizer's state.

    The names are `weight/<name>`, `buffer/<name>` and `<kind>/<name>`.
    """
    tensors = {f"{BUFFER}{name}": buffer.clone() for name, buffer in state_buffers(module, buffers).items()}
    for name, parameter in module.named_parameters():
        tensors[f"{WEIGHT}{name}"] = parameter.detach().clone()
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{kind}/{name}"] = value.clone()
    return tensors


def without_moments(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the optimizer's state, also in a guard's snapshot, for training with another optimizer."""
    return {
        key: tensor for key, tensor in tensors.items() if "/" not in key or key.split("/")[-2] in ("weight", "buffer")
    }


@torch.no_grad()
def restore(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], buffers: Container[str] = ()
) -> None:
    """Write back the tensors of `capture`, on the devices of module and optimizer; the caller's tensors stay unchanged.

    Raises:
        StateError: If the tensors lack a state buffer.
    """
    fused = {parameter: group.get("fused") for group in optimizer.param_groups for parameter in group["params"]}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        states.setdefault(name, {})[kind] = tensor
    for name, buffer in state_buffers(module, buffers).items():
        if f"{BUFFER}{name}" not in tensors:
            raise StateError(f"{name}: the state has no value of this buffer, which training changes")
        buffer.copy_(tensors[f"{BUFFER}{name}"])
    for name, parameter in module.named_parameters():
        state = states[name]
        parameter.copy_(laid_out(state["weight"], parameter))
        optimizer.state[parameter] = {
            # torch counts steps on the CPU, except in a fused kernel
            kind: laid_out(tensor, parameter).to(
                "cpu" if kind == "step" and not fused[parameter] else parameter.device, copy=True
            )
            for kind, tensor in state.items()
            if kind != "weight"
        }
