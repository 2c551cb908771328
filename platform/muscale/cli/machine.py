"""Commands of the machine: init, wheel."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from muscale.cli.application import MACHINE, command
from muscale.cli.options import AsJson, Flag
from muscale.cli.running import result_alone, show
from muscale.layout import STUDY_FILE


@command(MACHINE, example="muscale init my-study --source ~/texts")
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


@command(MACHINE, example="muscale doctor study.toml")
def doctor(study: Path | None = None, *, json: AsJson = False) -> int:
    """Look whether this machine can run a study, and say what to do where it can't; exit code 1 then.

    Versions, devices, two workers that meet, Ray's cluster and token, storage, the key of W&B.

    Args:
        study: The study file whose directory, storage and resources are looked at; else this directory.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.doctor import diagnose

    with result_alone(json):
        found = diagnose(study)
    show(found, as_json=json)
    return 0 if found.passed else 1


@command(MACHINE, example="muscale wheel dist")
def wheel(folder: Path = Path("dist")) -> int:
    """Write this muscale as a wheel that `ray job submit` can ship to a cluster.

    Args:
        folder: Created if it is not there.
    """
    from muscale.wheel import write_wheel

    print(write_wheel(folder))
    return 0
