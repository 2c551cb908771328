"""The folder of a full run's checkpoints, and their integrity: reads names and hashes without torch.

A folder `tokens=<n>` holds the state after n tokens and, written last, a manifest of its files' hashes.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from muscale.errors import StageError
from muscale.formatting import listed
from proxy_models.hashing import file_sha256

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARAMETRIZATION = "parametrization.json"
_NEEDED = {".metadata", PARAMETRIZATION}  # required to resume
_SHARD = re.compile(r"__(\d{1,9})_\d+\.distcp")  # the rank that wrote the file, as torch names it


class CheckpointFolder:
    """The checkpoints of one run, in a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def intact(self) -> Iterator[tuple[int, Path]]:
        """Tokens and path of each checkpoint whose hashes match, newest first; hashed one at a time."""
        for tokens, path in self.found():
            if damaged := find_damage(path):
                warn_of_damage(path, damaged)
            else:
                yield tokens, path

    def kept(self) -> tuple[int, ...]:
        """Tokens of every checkpoint, intact or not, newest first."""
        return tuple(tokens for tokens, _ in self.found())

    def path(self, tokens: int) -> Path:
        """Path of the checkpoint after this many tokens, which may not exist."""
        return self.folder / f"tokens={tokens}"

    def hold(self, tokens: int, run: str) -> None:
        """Keep a checkpoint as long as `run`, which starts from it, may need it."""
        self._hold(tokens, run).touch()

    def release(self, tokens: int, run: str) -> None:
        """End what `hold` began; the next save deletes the checkpoint unless another rule keeps it."""
        self._hold(tokens, run).unlink(missing_ok=True)

    def is_held(self, tokens: int) -> bool:
        """Whether another run may need a checkpoint."""
        return any(self.folder.glob(f"held.{self.path(tokens).name}.*"))

    def _hold(self, tokens: int, run: str) -> Path:
        return self.folder / f"held.{self.path(tokens).name}.{run}"

    def found(self) -> list[tuple[int, Path]]:
        """Tokens and path of every checkpoint, newest first."""
        return sorted(((tokens_of(path), path) for path in self.folder.glob("tokens=*[0-9]")), reverse=True)

    def newest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest checkpoint; hashes are not checked."""
        return next(iter(self.found()), None)


def manifest_hash(checkpoint: Path) -> str | None:
    """SHA-256 of a checkpoint's manifest, which identifies it; None if the checkpoint is not intact."""
    return None if find_damage(checkpoint) else file_sha256(checkpoint / MANIFEST)


def tokens_of(checkpoint: Path) -> int:
    """Tokens trained at a checkpoint, from the folder's name; raises StageError if the name is not that of a checkpoint."""
    tokens = checkpoint.name.removeprefix("tokens=")
    if not checkpoint.name.startswith("tokens=") or not tokens.isdecimal():
        raise StageError(f"{checkpoint}: is neither a full run's directory nor its checkpoint, tokens=<number>")
    return int(tokens)


def require_intact(checkpoint: Path, find: Callable[[Path], list[str]] | None = None) -> None:
    """Check a checkpoint before it is read; raise StageError if it does not exist or does not match the hashes of its manifest.

    Args:
        find: Finds the damage, by default `find_damage`.
    """
    tokens_of(checkpoint)
    if not checkpoint.is_dir():
        raise StageError(f"{checkpoint}: no such checkpoint")
    if damaged := (find or find_damage)(checkpoint):
        raise StageError(f"{checkpoint}: does not match the hashes of its manifest: {listed(damaged)}")


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """Write the manifest, the last file of a checkpoint, which makes it valid."""
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1, sort_keys=True))


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a finished checkpoint into place, replacing an older checkpoint at the same tokens."""
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def find_damage(checkpoint: Path, *, rank: int = 0, ranks: int = 1) -> list[str]:
    """Names of files that are missing or do not match the manifest; only the manifest's name if it can't be used.

    Args:
        rank, ranks: When `ranks` share the hashing, `rank` checks its own shards and a part of those from ranks that no longer
            exist; rank 0 checks all other files.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not manifest.keys() >= _NEEDED:
            return [MANIFEST]
    except (OSError, ValueError, RecursionError):
        return [MANIFEST]
    share = (name for name in manifest if _writer(name) % ranks == rank)
    return [name for name in share if not _matches(checkpoint, name, manifest[name])]


def warn_of_damage(checkpoint: Path, damaged: Sequence[str]) -> None:
    """Log that a checkpoint is skipped, and which files are damaged."""
    logging.getLogger(__name__).warning(
        "%s does not match the hashes of its manifest: %s; skipped", checkpoint, listed(damaged)
    )


def _writer(name: str) -> int:
    """The rank that wrote a file; 0 for files that are not shards."""
    shard = _SHARD.fullmatch(name)
    return int(shard[1]) if shard else 0


def _matches(checkpoint: Path, name: str, digest: object) -> bool:
    """Whether a file inside the checkpoint has this hash; pipes, which would wait for a writer, and links don't match."""
    path = checkpoint / name
    try:
        return path.parent == checkpoint and stat.S_ISREG(path.lstat().st_mode) and file_sha256(path) == digest
    except (OSError, ValueError):
        return False
