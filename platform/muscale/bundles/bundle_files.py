"""The manifest of a bundle: hashes of all files, and their verification.

The manifest names plain files below its folder, each with its size and SHA-256. Somebody who changes a file could also write a
new manifest; the hash of the manifest itself, shown when a bundle is written and when it is verified, reveals that.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from muscale.errors import BundleError
from muscale.formatting import format_read_error
from proxy_models.hashing import file_sha256
from scaling.serialization import JsonResult

MANIFEST = "manifest.json"
FORMAT = 1
_LONGEST_NAME = 255  # bytes, a limit of Linux' file systems
_LONGEST_PATH = 2000  # characters, which leaves space for the folder's own path
_MAX_MANIFEST_BYTES = 16 << 20  # a manifest of a few dozen files takes some kilobytes; assumed


@dataclass(frozen=True, kw_only=True)
class Verification(JsonResult):
    """Comparison of a bundle with its manifest.

    Attributes:
        path: The bundle.
        digest: SHA-256 of its manifest.
        n_files, n_bytes: Number of files in the manifest, and their total bytes.
        missing: Files that are gone.
        different: Files with another size or hash, unreadable files, and files that are not plain.
        extra: Files that the manifest does not list.
    """

    DERIVED = ("passed",)

    path: str
    digest: str
    n_files: int
    n_bytes: int
    missing: tuple[str, ...]
    different: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every file is unchanged."""
        return not (self.missing or self.different or self.extra)

    def __str__(self) -> str:
        head = f"{self.path}: {self.n_files} files, {self.n_bytes:,} bytes, manifest sha256 {self.digest}"
        odd = {"missing": self.missing, "different": self.different, "not in the manifest": self.extra}
        lines = [f"  {what}: {name}" for what, names in odd.items() for name in names]
        return "\n".join([f"{head}: {'intact' if self.passed else 'DAMAGED'}", *lines])


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest: every file of a finished folder, and some facts."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)} for name in names}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **facts, "files": files}, indent=1) + "\n")


def verify(path: str | Path) -> Verification:
    """Check a bundle's files against its manifest; raise BundleError if that is unusable or names a file outside the folder."""
    folder = Path(path)
    content, files = _read_manifest(folder)
    present = _present(folder)
    missing = sorted(name for name in files if name not in present and not _passes_link(folder, name))
    different = sorted(name for name, entry in files.items() if name not in missing and not _holds(folder, name, entry))
    return Verification(
        path=str(folder),
        digest=hashlib.sha256(content).hexdigest(),
        n_files=len(files),
        n_bytes=sum(int(entry["bytes"]) for entry in files.values()),
        missing=tuple(missing),
        different=tuple(different),
        extra=tuple(sorted(present - files.keys() - {MANIFEST})),
    )


def _read_manifest(folder: Path) -> tuple[bytes, dict[str, dict[str, Any]]]:
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BundleError(f"{path}: not a bundle's manifest")
        content = path.read_bytes()
        manifest = json.loads(content)
    except OSError as error:
        raise BundleError(f"{folder}: not a bundle, its {MANIFEST}: {format_read_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not a bundle's manifest ({error})") from error
    if not isinstance(manifest, dict) or not isinstance(files := manifest.get("files"), dict):
        raise BundleError(f"{path}: not a bundle's manifest: it has no table of files")
    if manifest.get("format") != FORMAT:
        raise BundleError(f"{path}: format must be {FORMAT}, which this version reads, got {manifest.get('format')!r}")
    for name, entry in files.items():
        _require_inside(path, name)
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("sha256"), str)
            or type(entry.get("bytes")) is not int
        ):
            raise BundleError(f"{path}: {name}: needs its bytes and its sha256, got {entry!r}")
    return content, files


def _require_inside(manifest: Path, name: str) -> None:
    """Raise unless a name is a plain relative path, here and on Windows."""
    plain = PurePosixPath(name)
    windows = PureWindowsPath(name)
    odd = (
        not name
        or "\0" in name
        or "\\" in name
        or plain.is_absolute()
        or bool(windows.drive)
        or ".." in plain.parts
        or plain.as_posix() != name
        or name in (".", MANIFEST)
        or _cannot_be_written(name)
    )
    if odd:
        raise BundleError(f"{manifest}: a file must be named by a plain path below the bundle, got {name!r}")


def _cannot_be_written(name: str) -> bool:
    """Whether no file can have this name: the name holds half a character (a surrogate, which JSON can express) or is too long."""
    try:
        return len(name) > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in name.split("/"))
    except UnicodeEncodeError:
        return True


def _present(folder: Path) -> set[str]:
    """Paths of all files and links below the folder; links are not followed."""
    found: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=False):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        found |= {(Path(root) / name).relative_to(folder).as_posix() for name in [*files, *links]}
    return found


def _passes_link(folder: Path, name: str) -> bool:
    """Whether a folder on the way to the file is a link."""
    parents = [folder / parent for parent in PurePosixPath(name).parents if parent != PurePosixPath(".")]
    return any(parent.is_symlink() for parent in parents)


def _holds(folder: Path, name: str, entry: dict[str, Any]) -> bool:
    path = folder / name
    if _passes_link(folder, name) or not stat.S_ISREG(path.lstat().st_mode):
        return False
    try:
        return bool(path.stat().st_size == entry["bytes"]) and file_sha256(path) == entry["sha256"]
    except OSError:
        return False  # an unreadable file can't be checked against its hash
