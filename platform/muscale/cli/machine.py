"""Commands of the machine: init, wheel."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from muscale.cli.application import app
from muscale.cli.options import Flag
from muscale.layout import STUDY_FILE


@app.command
def init(directory: Path, *, keep: Flag = False) -> int:
    """Write a copy of the quickstart's study file into a directory, to be edited.

    Args:
        directory: Created if it is not there.
        keep: Leave a study file that is there already as it is, instead of refusing.
    """
    from muscale.errors import StudyDirectoryError

    path = directory / STUDY_FILE
    if path.exists():
        if not keep:
            raise StudyDirectoryError(f"{path}: is there already; edit it, or pass --keep to leave it as it is")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text((resources.files("muscale") / "quickstart.toml").read_text())
    print(f"wrote {path}; next: muscale run {path}")
    return 0


@app.command
def wheel(folder: Path = Path("dist")) -> int:
    """Write this muscale as a wheel that `ray job submit` can ship to a cluster: muscale wheel dist.

    Args:
        folder: Created if it is not there.
    """
    from muscale.wheel import write_wheel

    print(write_wheel(folder))
    return 0
