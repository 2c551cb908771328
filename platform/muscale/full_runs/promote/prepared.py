"""A full run without Ray: `muscale promote --prepare` writes a file; ranks of torchrun or srun, or one process, train the run.

    torchrun --nproc-per-node 8 -m muscale train full_runs/KEY/prepared.json
    srun --ntasks-per-node 8 muscale train full_runs/KEY/prepared.json

When the run has ended, `muscale promote` compares its result with the forecast. Until then the same command resumes the run.
"""

from __future__ import annotations

import json
import logging
import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from muscale.commands import StudyCommands
from muscale.errors import LedgerUnavailableError, MuscaleError, StageError, StudyDirectoryError, one_line, refusing
from muscale.formatting import format_read_error
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.promotion import full_run_of
from muscale.layout import COLLECTIVES, CORPUS, FAILURE, LEDGER, LEDGER_PLACE
from muscale.plans.plan import Plan
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.settings.own_model import announce_family, read_record
from muscale.settings.strict import short_repr
from muscale.store.lease import full_run_lease, lease
from muscale.store.open_ledger import open_ledger
from proxy_models.architecture.member import Member
from proxy_models.files import read_at_most, write_text
from proxy_models.training.numerics import Numerics

PREPARED = "prepared.json"
STUDY = "study"  # the key of the study's file and settings
_MOST_BYTES = 16 << 20  # a file has some kilobytes, more with many schedule stages; assumed
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared(Recorded):
    """A prepared run.

    Attributes:
        path: File for `muscale train`.
        workers: Ranks according to the study file; any other number works, too.
    """

    path: str
    workers: int

    def __str__(self) -> str:
        path = shlex.quote(self.path)
        return (
            f"wrote {self.path}\n"
            f"train it:  torchrun --nproc-per-node {self.workers} -m muscale train {path}\n"
            f"in Slurm:  srun --ntasks {self.workers} muscale train {path}\n"
            f"alone:     muscale train {path}\n"
            "then run `muscale promote` again to record the result"
        )


def prepare(
    plan: Plan, config: StudyConfig, numerics: Numerics, directory: Path, commands: StudyCommands | None = None
) -> Prepared:
    """Write the specification of the run to its directory, `full_runs/KEY` of the study, whose file `commands` name."""
    specification = {"plan": plan.to_dict(), "config": config.to_dict(), "numerics": numerics.to_dict()}
    if commands:
        specification[STUDY] = {"file": commands.study.name, "set": list(commands.settings)}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PREPARED
    write_text(path, json.dumps({**specification, "run": _run_of(plan, config, numerics)}, indent=1) + "\n")
    return Prepared(path=str(path), workers=config.promote.workers)


def read(path: Path) -> FullRun:
    """Read the prepared run, whose corpus may have been moved; raise StageError if a value that determines the run was changed."""
    return _read(path)[1]


def commands_of(path: Path) -> StudyCommands | None:
    """Commands on the study that prepared a run; None if its file does not name the study, as older ones."""
    match _read_values(path).get(STUDY):
        case {"file": str(name), "set": [*settings]}:
            return StudyCommands(path.resolve().parents[2] / name, tuple(map(str, settings)))
    return None


def _read(path: Path) -> tuple[StudyConfig, FullRun]:
    try:
        values = _read_values(path)
        plan, numerics = Plan.from_dict(values["plan"]), Numerics.from_dict(values["numerics"])
        config = _config(values["config"], numerics.model, path)
        found = _run_of(plan, config, numerics)
    except OSError as error:
        raise StageError(f"{path}: {format_read_error(error)}; `muscale promote --prepare` writes one") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise StageError(f"{path}: not a file of `muscale promote --prepare`: {reason}") from error
    if values.get("run") != found:
        raise StageError(
            f"{path}: run: must be {found}, the hash of the run in the file, got {short_repr(values.get('run'))}: it was edited; "
            "write it again with `muscale promote --prepare`"
        )
    directory = path.resolve().parent
    with refusing(f"{path}: config"):
        return config, full_run_of(plan, config, numerics, directory, directory.parent.parent / CORPUS)


def _config(values: dict[str, Any], model: Member, path: Path) -> StudyConfig:
    """The settings; with a custom family the model comes from the numerics, and other members from the study's record."""
    where = f"{path}: config"
    if model.is_custom:
        read_record(path.resolve().parents[2], None, where)
        values = values | {"model": Member.from_dict(values["model"])}
    return StudyConfig.from_dict(values, where=where)


def _read_values(path: Path) -> dict[str, Any]:
    values = json.loads(read_at_most(path, _MOST_BYTES))
    if not isinstance(values, dict):
        raise TypeError(f"must be a table, got {short_repr(values)}")
    return values


def _run_of(plan: Plan, config: StudyConfig, numerics: Numerics) -> str:
    """Hash of all that determines the run, which detects a damaged or edited file; resources are left out."""
    return plan.chain(replace(numerics, guard=config.promote.guard)).key


def train_here(path: Path) -> dict[str, Any]:
    """Train a prepared run in this process, as one of torchrun's or srun's ranks if there are several.

    Returns:
        The result of `muscale.full_runs.train.attempt.train`.

    Raises:
        StageError: If the file can't be read, or the run diverges.
        LeaseHeldError: If another process trains this run.
        PreemptedError: If the run was preempted; its state is saved.
    """
    config, run = _read(path)  # before the slow imports
    announce_family(run.numerics.model)
    from muscale.full_runs.distributed import adopt_slurm, broadcast_from_rank0, process_group, rank, rank_device
    from muscale.full_runs.records.attempts import keep_failure
    from muscale.full_runs.train.attempt import train

    adopt_slurm()
    device = rank_device()
    timeout = timedelta(minutes=run.start_timeout_minutes)
    with ExitStack() as held, process_group(device, timeout=timeout, records=run.directory / COLLECTIVES):

        def refusal() -> MuscaleError | None:
            try:
                _hold_lease(held, config, run.directory)
            except MuscaleError as error:
                return error
            return None

        if error := broadcast_from_rank0(refusal):  # raised on every rank, so that none waits for rank 0
            raise error
        if rank() == 0:
            (run.directory / FAILURE).unlink(missing_ok=True)
        try:
            return train(run, device=device)
        except StageError as failure:
            if rank() == 0:
                keep_failure(run.directory, failure)
            raise


def _hold_lease(held: ExitStack, config: StudyConfig, directory: Path) -> None:
    """Take the run's lease in its study's ledger; a folder that was copied without the ledger has no other writer."""
    study = directory.parents[1]
    if not any((study / name).exists() for name in (LEDGER, LEDGER_PLACE)):
        return
    try:
        ledger = open_ledger(config.storage, study, config.name)
        held.enter_context(lease(ledger, full_run_lease(directory.name), wait=False))
    except (LedgerUnavailableError, StudyDirectoryError) as error:
        _log.warning(
            "train: the ledger can't be reached from here, so nothing stops another process from training this run: %s",
            error,
        )
