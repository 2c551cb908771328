"""A full run where there is no Ray: `muscale promote --prepare` writes it down, torchrun's ranks train it, or one process.

    torchrun --nproc-per-node 8 -m muscale train full_runs/KEY/prepared.json

Once it has ended, `muscale promote` finds its result and holds it against the forecast. Until then the same command goes on
where the run was.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muscale.errors import StageError
from muscale.formatting import format_read_error
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.promotion import full_run_of
from muscale.layout import CORPUS
from muscale.plans.planning import Plan
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.settings.strict import short_repr
from proxy_models.files import atomic_write
from proxy_models.training.numerics import Numerics

PREPARED = "prepared.json"
_MOST_BYTES = 16 << 20  # it takes some kilobytes, more with many stages; assumed
_LONGEST = 300  # characters of a library's reason


@dataclass(frozen=True, kw_only=True)
class Prepared(Recorded):
    """A run that waits for its ranks.

    Attributes:
        path: What `muscale train` takes.
        workers: As many ranks as the study file has for it; any other number does, too.
    """

    path: str
    workers: int

    def __str__(self) -> str:
        return (
            f"wrote {self.path}\n"
            f"train it:  torchrun --nproc-per-node {self.workers} -m muscale train {self.path}\n"
            f"alone:     muscale train {self.path}\n"
            "then run `muscale promote` again, which records how it ended"
        )


def prepare(plan: Plan, config: StudyConfig, numerics: Numerics, directory: Path) -> Prepared:
    """Write what the run is made from into its directory, `full_runs/KEY` of a study's."""
    told = {"plan": plan.to_dict(), "config": config.to_dict(), "numerics": numerics.to_dict()}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PREPARED
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps({**told, "run": _run_of(plan, config, numerics)}, indent=1) + "\n")
    return Prepared(path=str(path), workers=config.promote.workers)


def read(path: Path) -> FullRun:
    """The prepared run; the corpus is the study's, wherever its folder was moved to.

    Raises:
        StageError: If the file is not what `prepare` wrote, or was changed in what determines the run.
    """
    try:
        told = _told(path)
        plan, numerics = Plan.from_dict(told["plan"]), Numerics.from_dict(told["numerics"])
        config = StudyConfig.from_dict(told["config"], where=f"{path}: config")
        found = _run_of(plan, config, numerics)
    except OSError as error:
        raise StageError(f"{path}: {format_read_error(error)}; `muscale promote --prepare` writes one") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = " ".join(str(error).split())[:_LONGEST]
        raise StageError(
            f"{path}: can't be read as what `muscale promote --prepare` writes: {type(error).__name__}: {reason}"
        ) from error
    if told.get("run") != found:
        raise StageError(
            f"{path}: run: must be {found}, the hash of what the file trains, got {short_repr(told.get('run'))}: it was changed since "
            "`muscale promote --prepare` wrote it, which writes it anew"
        )
    directory = path.resolve().parent
    try:
        return full_run_of(plan, config, numerics, directory, directory.parent.parent / CORPUS)
    except ValueError as error:
        raise StageError(f"{path}: config: {error}") from error


def _told(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"must have at most {_MOST_BYTES:,} bytes, and has more")
    told = json.loads(content)
    if not isinstance(told, dict):
        raise TypeError(f"must be a table, got {short_repr(told)}")
    return told


def _run_of(plan: Plan, config: StudyConfig, numerics: Numerics) -> str:
    """Hash of what is trained, which tells a file that was damaged or edited; where and how is not in it."""
    return plan.chain(replace(numerics, guard=config.promote.guard)).key


def train_here(path: Path) -> dict[str, Any]:
    """Train a prepared run in this process, together with the ranks that torchrun started beside it.

    Returns:
        As `muscale.full_runs.train.module.train`.

    Raises:
        StageError: If the file can't be read, or the run diverges.
        PreemptedError: If its machine is taken away; its state is saved.
    """
    run = read(path)  # before what is slow to import
    from muscale.full_runs.train.module import train
    from muscale.full_runs.train.sharding import ShardedStrategy

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return train(run)
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    return train(run, strategy=ShardedStrategy(world_size=world_size), plugins=[TorchElasticEnvironment()])
