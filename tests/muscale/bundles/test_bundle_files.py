"""Verification: each kind of damage is reported by file, and a manifest can't lead out of its folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muscale.bundles.bundle_files import MANIFEST, verify, write_manifest
from muscale.errors import BundleError
from proxy_models.hashing import file_sha256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    (path / "sub").mkdir(parents=True)
    (path / "one").write_text("1")
    (path / "sub" / "two").write_text("22")
    write_manifest(path, {"plan": "key"})
    return path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_an_intact_folder_passes(folder: Path) -> None:
    found = verify(folder)
    assert found.passed
    assert (found.n_files, found.n_bytes, found.digest) == (2, 3, file_sha256(folder / MANIFEST))
    assert str(found).endswith(": intact")


def test_what_is_missing_different_or_extra_is_named(folder: Path) -> None:
    (folder / "one").write_text("2")  # of the same size
    (folder / "sub" / "two").unlink()
    (folder / "sub" / "three").write_text("")
    found = verify(folder)
    assert not found.passed
    assert (found.missing, found.different, found.extra) == (("sub/two",), ("one",), ("sub/three",))
    assert str(found).splitlines()[1:] == [
        "  missing: sub/two",
        "  different: one",
        "  not in the manifest: sub/three",
    ]


def test_links_and_pipes_are_no_files_of_a_bundle(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / "sub" / "two").rename(outside / "two")
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to(outside)
    (outside / "one").write_text("1")
    (folder / "one").unlink()
    (folder / "one").symlink_to(outside / "one")
    os.mkfifo(folder / "pipe")
    found = verify(folder)
    assert (found.missing, found.different) == ((), ("one", "sub/two"))
    assert found.extra == ("pipe", "sub")
    rewrite(folder, lambda manifest: manifest["files"].update(pipe={"bytes": 0, "sha256": "0"}))
    assert "pipe" in verify(folder).different


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "sub/../../outside",
        "sub//two",
        "./one",
        "",
        ".",
        "sub\\two",
        "C:/x",
        "a\0b",
        MANIFEST,
    ],
)
def test_a_path_that_leaves_the_folder_or_is_not_normalized_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_text("1")
    entry = {"bytes": 1, "sha256": file_sha256(folder.parent / "outside")}
    rewrite(folder, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(BundleError, match="must be named by a plain path below the bundle, got "):
        verify(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a bundle's manifest"),
        ("[]", "it has no table of files"),
        ('{"files": {}}', "format must be 1, which this version reads, got None"),
        ('{"format": 2, "files": {}}', "format must be 1, which this version reads, got 2"),
        ('{"format": 1, "files": {"one": "0123"}}', "one: needs its bytes and its sha256"),
        ('{"format": 1, "files": {"one": {"bytes": true, "sha256": ""}}}', "one: needs its bytes and its sha256"),
        ("[" * 100_000, "not a bundle's manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / MANIFEST).write_text(content)
    with pytest.raises(BundleError, match=message):
        verify(folder)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest.json:"):
        verify(tmp_path)
    (tmp_path / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(BundleError, match="not a bundle's manifest"):
        verify(tmp_path)
