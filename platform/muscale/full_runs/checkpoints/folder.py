"""Where the checkpoints of a full run lie, and whether one is whole: names and hashes, read without torch.

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
_NEEDED = {".metadata", PARAMETRIZATION}  # no run goes on without them


class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        folder: Where they lie; every rank sees the same.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def whole(self) -> Iterator[tuple[int, Path]]:
        """Tokens and path of each checkpoint whose hashes hold, the newest first; one is hashed when it is reached."""
        for tokens, path in self.found():
            if is_whole(path):
                yield tokens, path
            else:
                logging.getLogger(__name__).warning("%s does not hold the hashes of its manifest: passed over", path)

    def kept(self) -> tuple[int, ...]:
        """Tokens of each there is, whole or not, the newest first."""
        return tuple(tokens for tokens, _ in self.found())

    def path(self, tokens: int) -> Path:
        """Where the one after so many tokens lies, if it is there."""
        return self.folder / f"tokens={tokens}"

    def found(self) -> list[tuple[int, Path]]:
        """Tokens and path of each, the newest first."""
        return sorted(((tokens_of(path), path) for path in self.folder.glob("tokens=*[0-9]")), reverse=True)

    def newest(self) -> tuple[int, Path] | None:
        """Tokens and path of the newest, whose hashes are not read."""
        return next(iter(self.found()), None)


def seal_of(checkpoint: Path) -> str | None:
    """SHA-256 of the manifest of a checkpoint whose hashes hold: what tells it from any other; None of one that is not whole."""
    return file_sha256(checkpoint / MANIFEST) if is_whole(checkpoint) else None


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
    if not is_whole(checkpoint):
        raise StageError(f"{checkpoint}: does not hold the hashes of its manifest")


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """The last file of a checkpoint: without it, the folder is none."""
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1, sort_keys=True))


def put_in_place(unfinished: Path, path: Path) -> None:
    """Give a checkpoint its name, in place of one that was trained again."""
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def is_whole(checkpoint: Path) -> bool:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        if not isinstance(manifest, dict) or not manifest.keys() >= _NEEDED:
            return False
        # Names alone: a checkpoint has no folders, and nothing of it lies elsewhere.
        plain = all(Path(name).name == name and _is_plain(checkpoint / name) for name in manifest)
        return plain and all(file_sha256(checkpoint / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, RecursionError):
        return False


def _is_plain(path: Path) -> bool:
    """Whether it is a file itself: reading a pipe would wait for a writer."""
    return stat.S_ISREG(path.lstat().st_mode)
