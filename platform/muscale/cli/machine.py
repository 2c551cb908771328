"""Commands of the machine: init, doctor, wheel."""

from __future__ import annotations

from pathlib import Path

from muscale.cli.application import MACHINE, command
from muscale.cli.ending import Ending, line, tell
from muscale.cli.options import AsJson, Flag
from muscale.cli.running import result_alone, show
from muscale.layout import STUDY_FILE


@command(MACHINE, example="muscale init my-study --source ~/texts")
def init(
    directory: Path, *, source: Path | None = None, name: str | None = None, keep: Flag = False, json: AsJson = False
) -> int:
    """Write a study file into a directory, to be edited: the quickstart's, or the same for your own text.

    Args:
        directory: Created if it is not there.
        source: A text file, a folder of them, or of .jsonl or .parquet files; says also how much text it is, and whether that
            is enough for the budgets.
        name: Of the study, by default the directory's.
        keep: Leave a study file that is there already as it is, instead of refusing.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.new_study import NewStudy, write_study

    path = directory / STUDY_FILE
    kept = keep and path.exists()
    with result_alone(json):
        written = NewStudy(path=str(path)) if kept else write_study(directory, source, name)
    if json:
        show(written, as_json=True)
    elif not kept:
        show(written, as_json=False)
        tell(Ending(next=(line("doctor", path), line("run", path, "--dry-run"), line("run", path))))
    return 0


@command(MACHINE, example="muscale doctor study.toml")
def doctor(study: Path | None = None, *, json: AsJson = False) -> int:
    """Look whether this machine can run a study, and say what to do where it can't; exit code 1 then.

    Versions, devices, two workers that meet, Ray's cluster and token, storage, the key of W&B.

    Args:
        study: The study file whose directory, storage and resources are looked at; else this directory.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.machine.doctor import diagnose

    with result_alone(json):
        found = diagnose(study)
    show(found, as_json=json)
    return 0 if found.passed else 1


@command(MACHINE, example="muscale wheel dist")
def wheel(folder: Path = Path("dist"), *, json: AsJson = False) -> int:
    """Write this muscale as a wheel that `ray job submit` can ship to a cluster.

    Args:
        folder: Created if it is not there.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.fingerprint import write_wheel

    with result_alone(json):
        written = write_wheel(folder)
    show({"wheel": str(written)} if json else written, as_json=json)
    return 0
