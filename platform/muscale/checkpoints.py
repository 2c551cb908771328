"""Checkpoints of a full run: sharded (`torch.distributed.checkpoint`), hashed, and moved into place whole.

The parametrization's table lies beside the shards. A checkpoint whose hashes do not hold is never opened; the hashes guard
against damage, not against an author, and torch unpickles the metadata: go on only from runs that are your own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from proxy_models.parametrization import Parametrization
from proxy_models.state import capture
from proxy_models.step import GOOD, Stepper

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARAMETRIZATION = "parametrization.json"
_MEMORY = "memory"  # of the stepper, in a checkpoint
_KEEP = 2


class Checkpoints:
    """Sharded checkpoints of one run: `tokens=<n>` holds the state after n tokens and a manifest of its files' hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest checkpoint whose hashes hold, or None."""
        return next(self.whole(), None)

    def whole(self) -> Iterator[tuple[int, Path]]:
        """Tokens and path of each checkpoint whose hashes hold, the newest first; one is hashed when it is reached."""
        for tokens, path in self._found():
            if _is_whole(path):
                yield tokens, path
            else:
                logging.getLogger(__name__).warning("%s does not hold the hashes of its manifest: passed over", path)

    def _found(self) -> list[tuple[int, Path]]:
        """Tokens and path of each, the newest first."""
        paths = self.folder.glob("tokens=*[0-9]")
        return sorted(((int(path.name.removeprefix("tokens=")), path) for path in paths), reverse=True)

    def save(self, stepper: Stepper, tokens: int) -> None:
        """Write the state of all ranks; rank 0 hashes it and moves it into place, then drops the oldest."""
        path = self.folder / f"tokens={tokens}"
        unfinished = self.folder / f"tokens={tokens}.unfinished"
        if _rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        _barrier()
        weights, moments = get_state_dict(stepper.module, stepper.optimizer)
        state = {"model": weights, "optimizer": moments, _MEMORY: stepper.memory()}
        save_sharded(state, checkpoint_id=unfinished)
        _barrier()
        if _rank() == 0:
            (unfinished / PARAMETRIZATION).write_text(json.dumps(stepper.parametrization.to_dict(), indent=1))
            manifest = {file.name: _sha256(file) for file in sorted(unfinished.iterdir())}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
            kept = [path for number, path in self._found() if number <= tokens][:_KEEP]
            for _, other in self._found():  # a later one did not hold its hashes, or this would not be trained again
                if other not in kept:
                    shutil.rmtree(other)
        _barrier()

    def load(self, path: Path, stepper: Stepper) -> None:
        """Read a checkpoint that `latest` found whole, at whatever world size this is.

        Raises:
            ValueError: If it was trained under another table than the stepper's.
        """
        table = json.loads((path / PARAMETRIZATION).read_text())
        stepper.parametrization.require(Parametrization.from_dict(table))
        module, optimizer = stepper.module, stepper.optimizer
        weights, moments = get_state_dict(module, optimizer)
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        places = stepper.memory() | {f"{GOOD}{name}": tensor for name, tensor in capture(module, optimizer).items()}
        memory = {name: tensor for name, tensor in places.items() if f"{_MEMORY}.{name}" in saved}
        state: dict[str, Any] = {"model": weights, "optimizer": moments, _MEMORY: memory}
        load_sharded(state, checkpoint_id=path)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        stepper.remember(state[_MEMORY])


def _is_whole(checkpoint: Path) -> bool:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        return all(_sha256(checkpoint / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
