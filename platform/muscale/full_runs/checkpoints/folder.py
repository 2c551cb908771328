"""The folder of a full run's checkpoints, and their integrity: names and hashes, read without torch.

A folder `tokens=<n>` holds the state after n tokens and, written last, a manifest of its files' hashes.
"""

from __future__ import annotations

import json
import logging
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from muscale.errors import StageError
from proxy_models.hashing import file_sha256

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARAMETRIZATION = "parametrization.json"
_NEEDED = {".metadata", PARAMETRIZATION}  # required to resume


class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        folder: Shared by all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def intact(self) -> Iterator[tuple[int, Path]]:
        """Tokens and path of each checkpoint whose hashes match, newest first; hashed one at a time."""
        for tokens, path in self.found():
            if is_intact(path):
                yield tokens, path
            else:
                logging.getLogger(__name__).warning("%s does not match the hashes of its manifest: skipped", path)

    def kept(self) -> tuple[int, ...]:
        """Tokens of every checkpoint, intact or not, newest first."""
        return tuple(tokens for tokens, _ in self.found())

    def path(self, tokens: int) -> Path:
        """Path of the checkpoint after this many tokens, which may not exist."""
        return self.folder / f"tokens={tokens}"

    def found(self) -> list[tuple[int, Path]]:
        """Tokens and path of every checkpoint, newest first."""
        return sorted(((tokens_of(path), path) for path in self.folder.glob("tokens=*[0-9]")), reverse=True)

    def newest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest checkpoint; hashes are not checked."""
        return next(iter(self.found()), None)


def manifest_hash(checkpoint: Path) -> str | None:
    """SHA-256 of a checkpoint's manifest, which identifies it; None if the checkpoint is not intact."""
    return file_sha256(checkpoint / MANIFEST) if is_intact(checkpoint) else None


def tokens_of(checkpoint: Path) -> int:
    """Tokens trained at a checkpoint, from the folder's name.

    Raises:
        StageError: If it is not the name of a checkpoint.
    """
    tokens = checkpoint.name.removeprefix("tokens=")
    if not checkpoint.name.startswith("tokens=") or not tokens.isdecimal():
        raise StageError(f"{checkpoint}: is neither a full run's directory nor its checkpoint, tokens=<number>")
    return int(tokens)


def require_intact(checkpoint: Path) -> None:
    """Check a checkpoint before it is read.

    Raises:
        StageError: If it is not a checkpoint, does not exist, or does not match the hashes of its manifest.
    """
    tokens_of(checkpoint)
    if not checkpoint.is_dir():
        raise StageError(f"{checkpoint}: no such checkpoint")
    if not is_intact(checkpoint):
        raise StageError(f"{checkpoint}: does not match the hashes of its manifest")


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """Write the manifest, the last file of a checkpoint, which makes it valid."""
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1, sort_keys=True))


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a finished checkpoint into place, over an older one at the same tokens."""
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def is_intact(checkpoint: Path) -> bool:
    """Whether every file exists and matches the manifest."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not manifest.keys() >= _NEEDED:
            return False
        # A name with a path separator could point outside the checkpoint.
        plain = all(Path(name).name == name and _is_plain(checkpoint / name) for name in manifest)
        return plain and all(file_sha256(checkpoint / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, RecursionError):
        return False


def _is_plain(path: Path) -> bool:
    """Whether it is a regular file: reading a pipe would wait for a writer."""
    return stat.S_ISREG(path.lstat().st_mode)
