"""Commands of the machine: init, doctor, wheel."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.cli.application import MACHINE, command
from muscale.cli.ending import Ending, line, print_ending
from muscale.cli.options import AsJson, Flag
from muscale.cli.running import result_alone, show
from muscale.errors import StageError
from muscale.layout import STUDY_FILE

if TYPE_CHECKING:
    from muscale.machine.diagnosis import Diagnosis
    from muscale.machine.gpu.gpu_report import GpuReport


@command(MACHINE, example="muscale init my-study --source ~/texts")
def init(
    directory: Path,
    *,
    source: Path | None = None,
    name: str | None = None,
    family: Flag = False,
    keep: Flag = False,
    json: AsJson = False,
) -> int:
    """Write a study file to edit: the quickstart's, or one for your own text.

    Args:
        directory: The study's directory; created if it does not exist.
        source: A file or folder of text, records or tokens. The command checks whether the text is enough for the budgets.
        name: Name of the study; by default the directory's.
        family: Also write my_family.py, a model family of about 40 lines to edit, and its test; the study file then uses it and is
            smaller.
        keep: Keep an existing study file instead of stopping with an error.
    """
    from muscale.new_study import NewStudy, write_study

    path = directory / STUDY_FILE
    kept = keep and path.exists()
    with result_alone(json):
        written = NewStudy(path=str(path)) if kept else write_study(directory, source, name, family=family)
    if json:
        show(written, as_json=True)
    elif not kept:
        show(written, as_json=False)
        if family:
            print(f"put the family on the path first: export PYTHONPATH={shlex.quote(str(directory.absolute()))}")
        first = line("check" if family else "doctor", path)
        # With too little text, a run would stop or repeat the text.
        run = () if written.too_little else (line("run", path),)
        print_ending(Ending(next=(first, line("run", path, "--dry-run"), *run)))
    return 0


@command(MACHINE, example="muscale doctor study.toml")
def doctor(
    study: Path | None = None,
    *,
    gpu: Flag = False,
    out: Path | None = None,
    trainer: str | None = None,
    job: Path | None = None,
    json: AsJson = False,
) -> int:
    """Check whether this machine can run a study, and suggest a remedy for each problem; exit code 1 if there is one.

    Check versions, devices, communication between two workers, the Ray cluster and its token, storage and the W&B key.
    With --gpu, train on one GPU and on all GPUs of this machine instead, and compare losses, memory, speed, collectives,
    attention kernels and host waits with the expected values. With --trainer, test your own training program.

    Args:
        study: The study file whose directory, storage and resources are checked; by default the current directory.
        gpu: Check full runs on this machine's GPUs; takes some minutes and needs neither a study nor Ray.
        out: The file that --gpu writes, to attach to an issue, by default muscale-gpu.json; it contains no host name and no secret.
        trainer: Check with about ten short runs that this program follows the protocol in docs/own_trainer.md. Quote it with its
            arguments, such as "python train.py --config {config} --state {state}"; it is started without a shell.
        job: JSON file with the run that --trainer tries; by default 16,384 tokens at width 64.
    """
    kind = "--gpu" if gpu else "--trainer" if trainer else None
    of_kinds = {"--trainer": (trainer, "--trainer"), "--out": (out, "--gpu"), "--job": (job, "--trainer")}
    for name, (given, of) in (of_kinds | {"a study file": (study, None)}).items():
        if given is not None and kind != of:
            why = f"cannot be combined with {kind}" if kind else f"is for {of}"
            raise StageError(f"doctor: {name} {why}; leave it out, got {given}")
    file = out or Path("muscale-gpu.json")
    with result_alone(json):
        if gpu:
            from muscale.machine.gpu.gpu_checks import check_gpus

            report = check_gpus()
            report.write(file)
            found: Diagnosis | GpuReport = report
        elif trainer:
            from muscale.machine.trainer_checks import SMALL, check_trainer
            from muscale.programs.protocol import TrainerJob

            print(f"running {trainer}", file=sys.stderr)
            found = check_trainer(tuple(shlex.split(trainer)), TrainerJob.read(job) if job else SMALL)
        else:
            from muscale.machine.doctor import diagnose

            found = diagnose(study)
    show(found, as_json=json)
    if gpu and not json:
        print_ending(Ending(wrote={"figures": file}))
    return 0 if found.passed else 1


@command(MACHINE, example="muscale wheel dist")
def wheel(folder: Path = Path("dist"), *, json: AsJson = False) -> int:
    """Build a wheel of this installation, for `ray job submit`.

    Args:
        folder: Where to write the wheel; created if it does not exist.
    """
    from muscale.fingerprint import write_wheel

    with result_alone(json):
        written = write_wheel(folder)
    show({"wheel": str(written)} if json else written, as_json=json)
    return 0
