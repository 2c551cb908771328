"""A folder is there with all of its files, or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from proxy_models.files import atomic_directory


def test_it_appears_at_the_end_only_also_over_an_empty_folder(tmp_path: Path) -> None:
    for name in ("new/inside", "empty"):
        path = tmp_path / name
        if name == "empty":
            path.mkdir()
        with atomic_directory(path) as unfinished:
            (unfinished / "sub").mkdir()
            (unfinished / "sub" / "file").write_text("text")
            assert not (path / "sub").exists()
        assert (path / "sub" / "file").read_text() == "text"
        assert [entry.name for entry in path.parent.iterdir() if "unfinished" in entry.name] == []


def test_its_files_may_be_read_by_whom_the_folder_may(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "folder") as unfinished:
        (unfinished / "file").write_text("text")
        (unfinished / "file").chmod(0o600)
    mode = (tmp_path / "folder").stat().st_mode
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == mode & 0o666


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_directory(tmp_path / "folder") as unfinished:
        (unfinished / "file").write_text("text")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from proxy_models.files import atomic_directory\n"
        "with atomic_directory(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').write_text('text'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "folder")], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "folder").exists()
    with atomic_directory(tmp_path / "folder") as unfinished:
        (unfinished / "file").write_text("text")
    assert (tmp_path / "folder" / "file").exists()


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    for taken in ("file", "full", "link"):
        path = tmp_path / taken
        if taken == "file":
            path.write_text("mine")
        elif taken == "full":
            path.mkdir()
            (path / "file").write_text("mine")
        else:
            path.symlink_to(tmp_path / "nowhere")
        with pytest.raises(FileExistsError, match="must not exist"), atomic_directory(path):
            pytest.fail("nothing is to be written")
    with pytest.raises(FileExistsError), atomic_directory(tmp_path / "late"):
        (tmp_path / "late").write_text("came meanwhile")
    assert (tmp_path / "late").read_text() == "came meanwhile"
