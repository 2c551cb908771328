"""A study in Optuna's SQLite storage, as a space and as known results; the file is only read, and holds JSON, no pickles."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from muscale.errors import StageError
from muscale.outside.imported_space import ImportedSpace, listed, space_from, stepped
from search_spaces import Distribution, Fixed, Integer, LogUniform, SpaceError, Uniform

FINISHED = (TrialState.COMPLETE, TrialState.FAIL)
SEARCHERS = {"TPESampler": "tpe", "GPSampler": "gp", "CmaEsSampler": "cma_es", "RandomSampler": "random"}


def is_optuna(path: Path) -> bool:
    """Whether an SQLite file is Optuna's; a study's own ledger has tables of the same names, but not this one."""
    if not path.is_file():
        return False
    try:
        with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True) as connection:
            query = "SELECT count(*) FROM sqlite_master WHERE name = 'study_directions'"
            return bool(connection.execute(query).fetchone()[0])
    except sqlite3.DatabaseError:
        return False


def open_study(source: str) -> optuna.Study:
    """A study in an SQLite file.

    Args:
        source: The path; of a file with several studies with "#name" behind it.

    Raises:
        StageError: If there is no such file or study, or the file is not Optuna's.
    """
    text, _, name = source.partition("#")
    path = Path(text).absolute()
    if not path.is_file():
        raise StageError(f"optuna: {text}: no such file")
    if not is_optuna(path):
        raise StageError(f"optuna: {text}: is no storage of Optuna's")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    only_read = {"creator": lambda: sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)}
    try:
        storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=only_read, skip_table_creation=True)
        names = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
        if not name and len(names) != 1:
            raise StageError(f"optuna: {text}: holds {len(names)} studies, add #name: {', '.join(names)}")
        if name and name not in names:
            raise StageError(f"optuna: {text}: no study {name!r}; there are {', '.join(names)}")
        study = optuna.load_study(study_name=name or names[0], storage=storage)
        if len(study.directions) > 1:
            raise StageError(f"optuna: {source}: a study of {len(study.directions)} objectives; one is minimised here")
    except (sa.exc.SQLAlchemyError, RuntimeError, ValueError, KeyError) as error:
        raise StageError(f"optuna: {text}: can't be read: {' '.join(str(error).split())[:300]}") from error
    return study


def space_of(study: optuna.Study, source: str, names: Mapping[str, str]) -> ImportedSpace:
    """Every parameter of its trials, with the distribution that it had last.

    Raises:
        StageError: If it has no trials, or a distribution has no counterpart.
    """
    found: dict[str, BaseDistribution] = {}
    changed: set[str] = set()
    trials = study.get_trials(deepcopy=False)
    for trial in trials:
        for name, distribution in trial.distributions.items():
            if found.get(name, distribution) != distribution:
                changed.add(name)
            found[name] = distribution
    if not found:
        raise StageError(f"import-space: {source}: study {study.study_name!r} has no parameters yet")
    notes = [f"{name}: its distribution changed on the way: the last one is taken" for name in sorted(changed)]
    distributions: dict[str, Distribution] = {}
    for name, distribution in found.items():
        try:
            distributions[name], note = _distribution(distribution)
        except SpaceError as error:
            raise StageError(f"import-space: {source}: {name}: {error}") from error
        if note:
            notes.append(f"{name}: {note}")
    if sometimes := [name for name in found if any(name not in t.params for t in trials if t.params)]:
        notes.append(f"not in every trial: {', '.join(sometimes)}; write its condition as `when`")
    if study.direction == optuna.study.StudyDirection.MAXIMIZE:
        notes.append("the study maximises; the held-out loss is minimised here")
    notes.append("set sweep.n_tokens: a trial's tokens here, which the study does not tell")
    notes.append(f"its results inform the searcher with learn_from = [{source!r}], if they are losses of this corpus")
    space = space_from(source, distributions, names)
    return ImportedSpace(source=source, space=space, settings={"trials": len(trials)}, notes=tuple(notes))


def _distribution(distribution: BaseDistribution) -> tuple[Distribution, str]:
    match distribution:
        case CategoricalDistribution(choices=choices):
            if bad := [choice for choice in choices if not isinstance(choice, bool | int | float | str)]:
                raise SpaceError(f"a choice must be text, a number, true or false, got {bad[0]!r}")
            return listed(choices), ""
        case FloatDistribution(low=low, high=high) | IntDistribution(low=low, high=high) if low == high:
            return Fixed(value=low), "one value"
        case FloatDistribution(low=low, high=high, log=True):
            return LogUniform(low=low, high=high), ""
        case FloatDistribution(low=low, high=high, step=None):
            return Uniform(low=low, high=high), ""
        case FloatDistribution(low=low, high=high, step=float(step)):
            return stepped(low, high, step, Uniform(low=low, high=high))
        case IntDistribution(low=low, high=high, log=log, step=1):
            return Integer(low=low, high=high, log=log), ""
        case IntDistribution(low=low, high=high, step=step):
            return stepped(low, high, step, Integer(low=low, high=high))
    raise SpaceError(f"no counterpart of {distribution!r}")


def results_of(study: optuna.Study) -> pd.DataFrame:
    """A row for each trial that came to its end: its parameters and its loss, NaN where it failed."""
    rows: list[dict[str, Any]] = []
    for trial in study.get_trials(deepcopy=False, states=FINISHED):
        loss = trial.value if trial.state == TrialState.COMPLETE and trial.value is not None else math.nan
        rows.append({**trial.params, "loss": loss})
    return pd.DataFrame(rows)
