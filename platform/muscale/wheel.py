"""A wheel of the muscale that is running, to be shipped by `ray job submit`: these very sources, and no dependencies.

Ray installs a wheel of `py_modules` on each node with `pip install --target`, which would install whatever it depends on,
torch and Ray among it, a second time on every node; those belong to the nodes' image. And Ray knows a wheel by the name of
its file alone, so that one built again under the same name is not uploaded: the fingerprint makes the name.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from muscale.errors import MuscaleError
from muscale.fingerprint import package_files, package_fingerprint
from proxy_models.files import atomic_write

_TAG = "py3-none-any"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can tell: equal sources make equal files


def write_wheel(folder: Path) -> Path:
    """Write the wheel into a folder, made if it is not there; returns its path.

    Raises:
        MuscaleError: If the folder can't be written to.
    """
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
    """The archive, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in contents.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            wheel.writestr(member, data)


def _digest(data: bytes) -> str:
    """As a wheel's RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
