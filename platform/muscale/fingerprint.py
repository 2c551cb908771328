"""Which muscale a process runs: a key means the same training only where the code is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from muscale.errors import PackageMismatchError

_PACKAGES = ("muscale", "proxy_models", "scaling", "search_spaces")


def package_files() -> Iterator[tuple[str, Path]]:
    """(name below the packages' common folder, path) of every file of all packages that belong to muscale."""
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    yield f"{package}/{path.relative_to(folder).as_posix()}", path


@cache
def package_fingerprint() -> str:
    """The version, and a hash of the source files of all packages that belong to it: 0.1.0+3f09c2a1b44d."""
    digest = hashlib.sha256()
    for name, path in package_files():
        if path.suffix == ".py":
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    public = metadata.version("muscale").partition("+")[0]  # a wheel made by `muscale wheel` has the hash in its own
    return f"{public}+{digest.hexdigest()[:12]}"


def require_same_package(driver: str) -> None:
    """Refuse to work for a driver that runs another package.

    Raises:
        PackageMismatchError: Naming both, and the remedy.
    """
    if (own := package_fingerprint()) != driver:
        raise PackageMismatchError(
            f"this process runs muscale {own}, the driver runs {driver}: ship the driver's own to every node, "
            'ray job submit --runtime-env-json \'{"py_modules": ["dist/muscale-….whl"]}\' -- python -m muscale …, '
            "or install the same version on all of them"
        )
