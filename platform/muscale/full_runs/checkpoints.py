"""Checkpoints of a full run: sharded (`torch.distributed.checkpoint`), written while training goes on, hashed, moved into place whole.

The parametrization's table lies beside the shards. The manifest of hashes is written last, and only then the folder gets its
name, so that a kill at any time leaves a checkpoint that is whole, or none. One whose hashes do not hold is never opened; they
guard against damage, not against an author. Against one, nothing of it is unpickled but plain records: see `stored_weights`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from muscale.errors import StageError
from muscale.full_runs.ranks import barrier, from_first, rank, side_group
from muscale.full_runs.stored_weights import PlainPlanner, RecordReader, told
from proxy_models.metrics import passes
from proxy_models.parametrization import Parametrization
from proxy_models.state import capture
from proxy_models.step import GOOD, Stepper

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARAMETRIZATION = "parametrization.json"
_MEMORY = "memory"  # of the stepper, in a checkpoint
_NEEDED = {".metadata", PARAMETRIZATION}  # no run goes on without them
_UNFINISHED = ".unfinished"


class Checkpoints:
    """Sharded checkpoints of one run: `tokens=<n>` holds the state after n tokens and a manifest of its files' hashes.

    Attributes:
        folder: Where they lie; every rank sees the same.
        keep_last: The newest so many are kept.
        keep_every_tokens: Kept for ever is the first at or after each multiple of it; None: none is.
    """

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_every_tokens: int | None = None) -> None:
        self.folder = folder
        self.keep_last, self.keep_every_tokens = keep_last, keep_every_tokens
        self._thread: ThreadPoolExecutor | None = None
        self._write: Future[None] | None = None

    def latest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest checkpoint whose hashes hold, or None; rank 0 reads them, and all ranks are told."""
        self.finish()
        return from_first(lambda: next(self.whole(), None))

    def whole(self) -> Iterator[tuple[int, Path]]:
        """Tokens and path of each checkpoint whose hashes hold, the newest first; one is hashed when it is reached."""
        for tokens, path in self._found():
            if _is_whole(path):
                yield tokens, path
            else:
                logging.getLogger(__name__).warning("%s does not hold the hashes of its manifest: passed over", path)

    def kept(self) -> tuple[int, ...]:
        """Tokens of each there is, whole or not, the newest first."""
        return tuple(tokens for tokens, _ in self._found())

    def path(self, tokens: int) -> Path:
        """Where the one after so many tokens lies, if it is there."""
        return self.folder / f"tokens={tokens}"

    def _found(self) -> list[tuple[int, Path]]:
        """Tokens and path of each, the newest first."""
        return sorted(((tokens_of(path), path) for path in self.folder.glob("tokens=*[0-9]")), reverse=True)

    def newest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest, whose hashes are not read."""
        return next(iter(self._found()), None)

    def save(self, stepper: Stepper, tokens: int) -> None:
        """Copy the state of all ranks, and have it written while they go on; a write before it is waited for.

        Raises:
            Exception: What ended the write before it.
        """
        self.finish()
        unfinished = self.folder / f"tokens={tokens}{_UNFINISHED}"
        if rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        barrier()
        weights, moments = get_state_dict(stepper.module, stepper.optimizer)
        state = {"model": weights, "optimizer": moments, _MEMORY: stepper.memory()}
        shards = async_save(state, checkpoint_id=unfinished, process_group=side_group())
        if not isinstance(shards, Future):
            shards = shards.upload_completion
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write = self._thread.submit(self._seal, shards, unfinished, tokens, stepper.parametrization)

    def finish(self) -> None:
        """Wait until what `save` began lies in its place.

        Raises:
            Exception: What ended the write.
        """
        write, self._write = self._write, None
        if write:
            write.result()

    @property
    def is_writing(self) -> bool:
        """Whether a write goes on."""
        return self._write is not None and not self._write.done()

    def _seal(self, shards: Future[Any], unfinished: Path, tokens: int, table: Parametrization) -> None:
        """Once the shards are written: each rank hashes its own; rank 0 writes the manifest, names the folder, drops the oldest."""
        shards.result()
        hashes = _gathered({file.name: _sha256(file) for file in unfinished.glob(f"__{rank()}_*")})
        if rank() != 0:
            return
        (unfinished / PARAMETRIZATION).write_text(json.dumps(table.to_dict(), indent=1))
        for file in sorted(unfinished.iterdir()):
            if file.name not in hashes:
                hashes[file.name] = _sha256(file)
        write_manifest(unfinished, hashes)
        put_in_place(unfinished, self.path(tokens))
        self._drop(tokens)

    def _drop(self, tokens: int) -> None:
        """All but the kept; a later one did not hold its hashes, or was gone back behind, as this is the newest."""
        standing = [(number, path) for number, path in reversed(self._found()) if number <= tokens]
        kept, before = {path for _, path in standing[-self.keep_last :]}, 0
        for number, path in standing:
            if passes(self.keep_every_tokens, before, number):
                kept.add(path)
            before = number
        for _, path in self._found():
            if path not in kept:
                unfinished = path.with_name(path.name + _UNFINISHED)
                shutil.rmtree(unfinished, ignore_errors=True)
                path.rename(unfinished)  # at once, so that who reads it or dies here leaves no half of it
        for path in self.folder.glob(f"tokens=*{_UNFINISHED}"):  # of an attempt that was killed, too
            shutil.rmtree(path)

    def load(self, path: Path, stepper: Stepper, *, memory: bool = True) -> None:
        """Read a checkpoint that was found whole, at whatever world size this is.

        Args:
            path: One of `latest` or `whole`, or one whose `seal_of` is known.
            stepper: Takes its state.
            memory: Whether it takes the stepper's memory too, or begins with none.

        Raises:
            ValueError: If it was trained under another table than the stepper's.
            StageError: If its record or its table can't be read.
        """
        stepper.parametrization.require(_table(path / PARAMETRIZATION))
        module, optimizer = stepper.module, stepper.optimizer
        weights, moments = get_state_dict(module, optimizer)
        reader = RecordReader(path)
        saved = reader.names()
        places = stepper.memory() | {f"{GOOD}{name}": tensor for name, tensor in capture(module, optimizer).items()}
        remembered = {name: tensor for name, tensor in places.items() if memory and f"{_MEMORY}.{name}" in saved}
        state: dict[str, Any] = {"model": weights, "optimizer": moments, _MEMORY: remembered}
        try:
            load_sharded(state, storage_reader=reader, planner=PlainPlanner())
        except CheckpointException as error:
            raise StageError(f"{path}: can't be read ({told(error)})") from error
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if memory:
            stepper.remember(state[_MEMORY])


def _table(path: Path) -> Parametrization:
    try:
        return Parametrization.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StageError(f"{path}: can't be read as a parametrization's table ({error})") from error


def seal_of(checkpoint: Path) -> str | None:
    """SHA-256 of the manifest of a checkpoint whose hashes hold: what tells it from any other; None of one that is not whole."""
    return _sha256(checkpoint / MANIFEST) if _is_whole(checkpoint) else None


def tokens_of(checkpoint: Path) -> int:
    """That the run had seen, by the folder's name.

    Raises:
        StageError: If no checkpoint is called so.
    """
    tokens = checkpoint.name.removeprefix("tokens=")
    if not checkpoint.name.startswith("tokens=") or not tokens.isdecimal():
        raise StageError(f"{checkpoint}: is neither a full run's directory nor its checkpoint, tokens=<number>")
    return int(tokens)


def require_whole(checkpoint: Path) -> None:
    """Let a checkpoint be read.

    Raises:
        StageError: If it is none, is not there, or does not hold the hashes of its manifest.
    """
    tokens_of(checkpoint)
    if not checkpoint.is_dir():
        raise StageError(f"{checkpoint}: no such checkpoint")
    if not _is_whole(checkpoint):
        raise StageError(f"{checkpoint}: does not hold the hashes of its manifest")


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """The last file of a checkpoint: without it, the folder is none."""
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1, sort_keys=True))


def put_in_place(unfinished: Path, path: Path) -> None:
    """Give a checkpoint its name, in place of one that was trained again."""
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def _gathered(hashes: dict[str, str]) -> dict[str, str]:
    """Those of all ranks, on rank 0."""
    group = side_group()
    if group is None:
        return hashes
    of_ranks: list[dict[str, str]] | None = [{}] * dist.get_world_size() if rank() == 0 else None
    dist.gather_object(hashes, of_ranks, dst=0, group=group)
    return {name: digest for hashes in of_ranks or [] for name, digest in hashes.items()}


def _is_whole(checkpoint: Path) -> bool:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not manifest.keys() >= _NEEDED:
            return False
        # Names alone: a checkpoint has no folders, and nothing of it lies elsewhere.
        plain = all(Path(name).name == name and _is_plain(checkpoint / name) for name in manifest)
        return plain and all(_sha256(checkpoint / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, RecursionError):
        return False


def _is_plain(path: Path) -> bool:
    """Whether it is a file itself: reading a pipe would wait for a writer."""
    return stat.S_ISREG(path.lstat().st_mode)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
