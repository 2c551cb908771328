"""Given weights at which trainings start: one file of tensors and its key, and the values that a run takes from it.

The tensors are those of a model whose forward multipliers are 1. A run divides by what its own multipliers are worth
(`Family.absorbed`), so it starts from the given function under any multipliers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from proxy_models.architecture.families import family_of
from proxy_models.files import atomic_directory
from proxy_models.recipes.recipe import Recipe
from proxy_models.tensor_files import TensorFiles, write_tensors
from proxy_models.training.numerics import WEIGHTS_MANIFEST, Numerics, key_of_weights
from proxy_models.training.optimizer import multipliers_of

_FILE = "model.safetensors"


def write_initial_weights(
    folder: Path, shapes: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], **facts: str
) -> str:
    """Write tensors into a new folder, completely or not at all, one tensor in memory at a time; return their key.

    The key is a hash of names, shapes and values, 16 hexadecimal digits.

    Args:
        shapes: Shape and dtype of each tensor, on any device, in the order of `tensors`.
        facts: Further entries of the manifest.

    Raises:
        FileExistsError: If there is something in the folder.
        OSError: If writing fails.
        ValueError: If a value is not finite.
    """
    digest = hashlib.sha256()

    def hashed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name}: all values must be finite")
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            yield name, tensor

    with atomic_directory(folder) as unfinished:
        write_tensors(unfinished / _FILE, shapes, hashed())
        key = digest.hexdigest()[:16]
        (unfinished / WEIGHTS_MANIFEST).write_text(json.dumps({"key": key, **facts}, indent=2) + "\n")
    return key


def starting_values(numerics: Numerics, recipe: Recipe, folder: Path | None) -> Mapping[str, Tensor] | None:
    """Return the values at which a run starts, by name, read when they are asked for; None: the run starts from random values.

    Args:
        folder: Folder of `write_initial_weights`.

    Raises:
        ValueError: If the folder does not hold the run's weights, or the weights can't absorb the run's multipliers.
    """
    if numerics.initial_weights is None:
        return None
    if folder is None or (found := key_of_weights(folder)) != numerics.initial_weights:
        held = "no folder is given" if folder is None else f"{folder} holds {found or 'none'}"
        raise ValueError(f"initial_weights must be the weights {numerics.initial_weights}, but {held}")
    multipliers = multipliers_of(numerics.parametrization(recipe.optimizer), recipe)
    return _Divided(TensorFiles(folder / _FILE), family_of(numerics.model).absorbed(numerics.model, multipliers))


class _Divided(Mapping[str, Tensor]):
    """Tensors divided by a factor each."""

    def __init__(self, tensors: Mapping[str, Tensor], factors: Mapping[str, float]) -> None:
        self._tensors, self._factors = tensors, factors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] / self._factors.get(name, 1.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
