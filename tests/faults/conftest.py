"""What the faults need: a micro-study, a small disk of one's own, the tests' Ray and PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muscale import Study
from muscale.layout import LEDGER
from tests.faults.drivers import SETTINGS, Driver, Undisturbed, finished_again, recorded, trained_tokens
from tests.faults.lean import begin, finish
from tests.muscale.conftest import MICRO, postgres_server, write_text

__all__ = ["postgres_server"]
TWO_AT_ONCE = MICRO.replace("workers = 1 ", "workers = 2 ")


class SmallDisk:
    """A file system in memory that can be filled, made larger and made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resize(self, size: str) -> None:
        """Give it another size, such as "2m"."""
        self._mount(f"remount,size={size}")

    def read_only(self, on: bool) -> None:
        """Let nothing be written, or again everything; needs that nobody has a file open for writing."""
        self._mount(f"remount,{'ro' if on else 'rw'}")

    def fill(self, leave: int = 0) -> None:
        """Take all room but so many bytes."""
        free = os.statvfs(self.folder)
        (self.folder / "ballast").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - leave)))

    def empty(self) -> None:
        """Give the room back that `fill` took."""
        (self.folder / "ballast").unlink()

    def _mount(self, options: str) -> None:
        subprocess.run(["mount", "-o", options, str(self.folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Eight megabytes; skipped where this process may not mount any."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs a small disk to fill, and only root may mount one")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a small disk to fill, and it can't be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the micro-study with two workers into a folder of its own and returns its study file."""

    def make(name: str = "study") -> Path:
        write_text(tmp_path / name / "text")
        (path := tmp_path / name / "study.toml").write_text(TWO_AT_ONCE)
        return path

    return make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The sweep of `drivers`, to whose end nothing came in between."""
    directory = tmp_path_factory.mktemp("undisturbed")
    write_text(directory / "text")
    (directory / "study.toml").write_text(TWO_AT_ONCE)
    driver = Driver(directory / "study.toml")
    assert driver.ends() == 0, driver.log.read_text()
    tokens = trained_tokens(directory / "study.toml")
    assert tokens == recorded(directory / LEDGER), "what is counted is what was trained"
    assert finished_again(directory / "study.toml") == 0
    trials = Study.open(directory / "study.toml", SETTINGS, quiet=True).sweep().trials
    return Undisturbed(trials, tokens)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's directory with every segment of `lean` trained, undisturbed."""
    directory = begin(tmp_path_factory.mktemp("trained") / "study")
    finish(directory)
    return directory


@pytest.fixture
def study(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "study"))
