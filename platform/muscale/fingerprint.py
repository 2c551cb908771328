"""Fingerprint of the muscale that a process runs, and its wheel for `ray job submit`: these sources, without dependencies.

A key means the same training only if the code is the same. Ray installs a wheel from `py_modules` on each node with
`pip install --target`. Listed dependencies, such as torch and Ray, would be installed again, though the nodes' image has them.
Ray identifies a wheel by its file name alone, so the name contains the fingerprint: a changed wheel is uploaded again.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from muscale.errors import MuscaleError, PackageMismatchError
from proxy_models.files import atomic_write

_PACKAGES = ("muscale", "proxy_models", "scaling", "search_spaces")
_TAG = "py3-none-any"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date in a zip file; it is fixed so that equal sources make equal files


def package_files() -> Iterator[tuple[str, Path]]:
    """Generate (name below the packages' common folder, path) of every file of all packages that belong to muscale."""
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    yield f"{package}/{path.relative_to(folder).as_posix()}", path


@cache
def package_fingerprint() -> str:
    """Return the version and a hash of the source files of all packages that belong to muscale: 0.1.0+3f09c2a1b44d."""
    digest = hashlib.sha256()
    for name, path in package_files():
        if path.suffix == ".py":
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    public = metadata.version("muscale").partition("+")[0]  # the version in a wheel of `muscale wheel` has the hash
    return f"{public}+{digest.hexdigest()[:12]}"


def require_same_package(driver: str) -> None:
    """Refuse to work for a driver whose package differs: raise PackageMismatchError with both packages and the remedy."""
    if (own := package_fingerprint()) != driver:
        raise PackageMismatchError(
            f"this process runs muscale {own}, the driver runs {driver}: ship the driver's version to every node, "
            'ray job submit --runtime-env-json \'{"py_modules": ["dist/muscale-….whl"]}\' -- python -m muscale …, '
            "or install the same version on all of them"
        )


def write_wheel(folder: Path) -> Path:
    """Write the wheel into a folder, created if missing, and return its path; raise MuscaleError if the folder is not writable."""
    version = package_fingerprint()
    info = f"muscale-{version}.dist-info"
    contents = {name: path.read_bytes() for name, path in package_files()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: muscale\nVersion: {version}\n".encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: muscale\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    rows = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in contents.items()]
    contents[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    path = folder / f"muscale-{version}-{_TAG}.whl"
    try:
        _write(path, contents)
    except OSError as error:
        raise MuscaleError(f"{folder}: can't hold a wheel: {error.strerror}") from error
    return path


def _write(path: Path, contents: dict[str, bytes]) -> None:
    """Write the archive atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in contents.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            wheel.writestr(member, data)


def _digest(data: bytes) -> str:
    """Return a hash in the format of a wheel's RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
