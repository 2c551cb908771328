"""Checkpoints of a full run: sharded (`torch.distributed.checkpoint`), written asynchronously, hashed, renamed into place.

The parametrization table is stored with the shards. The manifest of hashes is written last, everything is on the disk before the
folder is renamed, and older checkpoints are deleted after that, so a kill or a power failure always leaves an intact checkpoint. A
checkpoint that does not match its hashes is never opened. Hashes protect against damage, not against forgery; against forgery,
only plain records are unpickled: see `stored_weights`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import (
    MANIFEST,
    PARAMETRIZATION,
    CheckpointFolder,
    find_damage,
    put_in_place,
    warn_of_damage,
    write_manifest,
)
from muscale.full_runs.checkpoints.stored_weights import PlainPlanner, RecordReader, describe
from muscale.full_runs.distributed import barrier, broadcast_from_rank0, of_all_ranks, rank, side_group
from proxy_models.architecture.parametrization import Parametrization
from proxy_models.files import to_disk
from proxy_models.hashing import file_sha256
from proxy_models.training.metrics import passes
from proxy_models.training.step import GOOD, Stepper

_MEMORY = "memory"  # key of the stepper's memory in a checkpoint
_UNFINISHED = ".unfinished"


class Checkpoints(CheckpointFolder):
    """Sharded checkpoints of one run, written and read by its ranks.

    Attributes:
        folder: Folder that all ranks share.
        keep_last: Number of the newest checkpoints to keep.
        keep_every_tokens: The first checkpoint at or after each multiple is kept forever; None: no such checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_every_tokens: int | None = None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to write; rank 0 calls `before_write` before it changes the folder, and an error there ends the write."""
        super().__init__(folder)
        self._before_write = before_write
        self.keep_last, self.keep_every_tokens = keep_last, keep_every_tokens
        self._thread: ThreadPoolExecutor | None = None
        self._write: Future[None] | None = None
        self._stager: DefaultStager | None = None

    def latest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest intact checkpoint, or None; equal on all ranks; each hashes the files that it wrote."""
        self.finish()
        for tokens, path in broadcast_from_rank0(self.found):
            if not (damaged := damage_found_by_ranks(path)):
                return tokens, path
            if rank() == 0:
                warn_of_damage(path, damaged)
        return None

    def save(self, stepper: Stepper, tokens: int) -> None:
        """Copy the state of all ranks to the host and write it in the background, after the previous write has ended.

        The host's copy is reused next time, pinned on a GPU. Training waits for the copy, since its next step changes the state.

        Raises:
            Exception: The error of the previous write.
        """
        self.finish()
        unfinished = self.folder / f"tokens={tokens}{_UNFINISHED}"
        if rank() == 0:
            self._before_write()
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        barrier()
        weights, moments = get_state_dict(stepper.module, stepper.optimizer)
        state = {"model": weights, "optimizer": _by_name(moments), _MEMORY: stepper.memory()}
        self._stager = self._stager or DefaultStager(staging_options(next(stepper.module.parameters()).device))
        shards = async_save(state, checkpoint_id=unfinished, process_group=side_group(), async_stager=self._stager)
        if not isinstance(shards, Future):
            shards = shards.upload_completion
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write = self._thread.submit(self._complete, shards, unfinished, tokens, stepper.parametrization)

    def finish(self) -> None:
        """Wait for the background write, and raise its error."""
        write, self._write = self._write, None
        if write:
            write.result()

    def _complete(self, shards: Future[Any], unfinished: Path, tokens: int, table: Parametrization) -> None:
        """Finish a checkpoint once its shards are written: ranks hash them; rank 0 writes the manifest, renames, deletes old ones."""
        shards.result()
        of_ranks = of_all_ranks({file.name: file_sha256(file) for file in unfinished.glob(f"__{rank()}_*")})
        if rank() != 0:
            return
        hashes = {name: digest for hashes in of_ranks for name, digest in hashes.items()}
        (unfinished / PARAMETRIZATION).write_text(json.dumps(table.to_dict(), indent=1))
        for file in sorted(unfinished.iterdir()):
            if file.name not in hashes:
                hashes[file.name] = file_sha256(file)
        write_manifest(unfinished, hashes)
        for path in (unfinished / PARAMETRIZATION, unfinished / MANIFEST, unfinished):
            to_disk(path)  # torch has already synced the shards and their index to the disk
        self._before_write()  # again, since the write may have taken minutes
        put_in_place(unfinished, self.path(tokens))
        to_disk(self.folder)
        self._drop(tokens)

    def _drop(self, tokens: int) -> None:
        """Delete all but the kept checkpoints; later ones are damaged or from before a rollback, since this one is the newest."""
        standing = [(number, path) for number, path in reversed(self.found()) if number <= tokens]
        kept, before = {path for _, path in standing[-self.keep_last :]}, 0
        for number, path in standing:
            if passes(self.keep_every_tokens, before, number) or self.is_held(number):
                kept.add(path)
            before = number
        for _, path in self.found():
            if path not in kept:
                unfinished = path.with_name(path.name + _UNFINISHED)
                shutil.rmtree(unfinished, ignore_errors=True)
                path.rename(unfinished)  # atomic: neither a reader nor a kill sees half of it
        for path in self.folder.glob(f"tokens=*{_UNFINISHED}"):  # also those of a killed attempt
            shutil.rmtree(path)

    def load(self, path: Path, stepper: Stepper, *, memory: bool = True) -> None:
        """Load an intact checkpoint at any world size.

        Args:
            path: Path from `latest` or `intact`, or one that `manifest_hash` has checked.
            memory: Whether to load the stepper's memory, or start without memory.

        Raises:
            ValueError: If the checkpoint's parametrization table differs from the stepper's.
            StageError: If the checkpoint's index or table can't be read.
        """
        stepper.parametrization.require(read_table(path))
        module, optimizer = stepper.module, stepper.optimizer
        weights, moments = get_state_dict(module, optimizer)
        reader = RecordReader(path)
        saved = reader.names()
        places = stepper.memory()
        if any(name.startswith(f"{_MEMORY}.{GOOD}") for name in saved):
            places |= {f"{GOOD}{name}": tensor for name, tensor in stepper.capture().items()}
        remembered = {name: tensor for name, tensor in places.items() if memory and f"{_MEMORY}.{name}" in saved}
        state: dict[str, Any] = {"model": weights, "optimizer": _by_name(moments), _MEMORY: remembered}
        try:
            load_sharded(state, storage_reader=reader, planner=PlainPlanner())
        except CheckpointException as error:
            raise StageError(f"{path}: can't be read ({describe(error)})") from error
        moments |= state["optimizer"]
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=moments)
        if memory:
            stepper.remember(state[_MEMORY])


def _by_name(moments: dict[str, Any]) -> dict[str, Any]:
    """The part of an optimizer's state that a checkpoint keeps: by parameter name, without the groups.

    The recipe determines the groups, and two stages of a pipeline number different groups alike.
    """
    return {"state": moments["state"]}


def staging_options(device: torch.device) -> StagingOptions:
    """Options of the copy from a device to the host: from a GPU into pinned memory, without delay."""
    on_gpu = device.type == "cuda"
    return StagingOptions(
        use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
    )


def read_table(checkpoint: Path) -> Parametrization:
    """The parametrization table of a checkpoint; raises StageError if the table can't be read."""
    path = checkpoint / PARAMETRIZATION
    try:
        return Parametrization.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StageError(f"{path}: can't be read as a parametrization's table ({error})") from error


def manifest_hash_by_ranks(checkpoint: Path) -> str | None:
    """Compute `folder.manifest_hash` on all ranks together; each rank hashes the files that it wrote."""
    damaged = damage_found_by_ranks(checkpoint)
    return None if damaged else broadcast_from_rank0(lambda: file_sha256(checkpoint / MANIFEST))


def damage_found_by_ranks(checkpoint: Path) -> list[str]:
    """Find damage as `folder.find_damage` on all ranks together; each rank hashes the files that it wrote."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    found = of_all_ranks(find_damage(checkpoint, rank=rank(), ranks=ranks))
    return sorted({name for names in found for name in names})
