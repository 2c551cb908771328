"""A study in Optuna's SQLite storage as a space and as known results; the file is only read, and holds JSON, no pickles."""

from __future__ import annotations

import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from muscale.errors import StageError, first_line, one_line
from muscale.importers.imported_space import ImportedSpace, discrete, place_of, space_from, stepped
from muscale.settings.strict import short_repr
from muscale.store.read_only import connect, fault_of
from search_spaces import Distribution, Fixed, Integer, LogUniform, SpaceError, Uniform

FINISHED = (TrialState.COMPLETE, TrialState.FAIL)
MAXIMIZE = optuna.study.StudyDirection.MAXIMIZE
_OF_OPTUNA = (
    *(optuna.exceptions.OptunaError, RuntimeError, ValueError, LookupError, TypeError),
    *(AttributeError, ArithmeticError, AssertionError),
)
"""Errors that Optuna's readers raise for rows that Optuna did not write."""


@dataclass(frozen=True, kw_only=True)
class OptunaStudy:
    """One study of a storage.

    Attributes:
        maximises: Whether the study's larger values are better.
    """

    name: str
    trials: tuple[FrozenTrial, ...]
    maximises: bool


def is_optuna(path: Path) -> bool:
    """Whether an SQLite file is Optuna's; the ledger of a study shares other table names with Optuna, but not this one."""
    if not path.is_file():
        return False
    try:
        with closing(connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1")) as connection:
            query = "SELECT count(*) FROM sqlite_master WHERE name = 'study_directions'"
            return bool(connection.execute(query).fetchone()[0])
    except (sqlite3.Error, UnicodeDecodeError):  # UnicodeDecodeError: a message about names that are not text
        return False


def open_study(source: str) -> OptunaStudy:
    """Return a study in an SQLite file.

    Args:
        source: Path; "#name" after it selects one of several studies.

    Raises:
        StageError: If there is no such file or study, or the file is not Optuna's.
    """
    text, name = place_of(source)
    path = Path(text).absolute()
    if not path.is_file():
        raise StageError(f"optuna: {text}: no such file")
    if not is_optuna(path):
        raise StageError(f"optuna: {text}: is not an Optuna storage")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # otherwise it warns about each retry
    uri = f"{path.as_uri()}?mode=ro"
    with _readable(text):
        with closing(connect(uri)) as connection:
            if fault := fault_of(connection):
                raise StageError(f"optuna: {text}: can't be read: {fault}")
        only_read = {"creator": lambda: connect(uri)}
        storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=only_read, skip_table_creation=True)
        names = [str(summary.study_name) for summary in optuna.get_all_study_summaries(storage)]
        if not name and len(names) != 1:
            raise StageError(f"optuna: {text}: holds {len(names)} studies, add #name: {', '.join(names)}")
        if name and name not in names:
            raise StageError(f"optuna: {text}: no study {name!r}; there are {', '.join(names)}")
        study = optuna.load_study(study_name=name or names[0], storage=storage)
        if len(study.directions) > 1:
            raise StageError(f"optuna: {source}: a study of {len(study.directions)} objectives; one is minimised here")
        trials = study.get_trials(deepcopy=False)
        _require_plain(trials)
        return OptunaStudy(name=str(study.study_name), trials=tuple(trials), maximises=study.direction == MAXIMIZE)


@contextmanager
def _readable(text: str) -> Iterator[None]:
    """Turn Optuna's errors about a file into one error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about distributions that it corrects while reading
            yield
    except StageError:
        raise
    except (sqlite3.Error, sa.exc.SQLAlchemyError, *_OF_OPTUNA) as error:
        known = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = one_line(first_line(known)) if isinstance(known, Exception) else ""
        raise StageError(f"optuna: {text}: can't be read: {reason or type(error).__name__}") from error


def _require_plain(trials: Sequence[FrozenTrial]) -> None:
    """Refuse names and values of other types, which Optuna does not check."""
    for trial in trials:
        for name, value in trial.params.items():
            if not isinstance(name, str):
                raise ValueError(f"trial {trial.number}: a parameter's name must be text, got {short_repr(name)}")
            if not isinstance(value, str | int | float | None):
                raise ValueError(
                    f"trial {trial.number}, {name}: must be text, a number, true or false, got {short_repr(value)}"
                )
        if trial.value is not None and not isinstance(trial.value, int | float):
            raise ValueError(f"trial {trial.number}: a value must be a number, got {short_repr(trial.value)}")


def space_of(study: OptunaStudy, source: str, names: Mapping[str, str]) -> ImportedSpace:
    """Return every parameter of the trials with its latest distribution; raise StageError if there is none or no counterpart."""
    found: dict[str, BaseDistribution] = {}
    changed: set[str] = set()
    trials = study.trials
    for trial in trials:
        for name, distribution in trial.distributions.items():
            if found.get(name, distribution) != distribution:
                changed.add(name)
            found[name] = distribution
    if not found:
        raise StageError(f"import-space: {source}: study {study.name!r} has no parameters yet")
    notes = [f"{name}: its distribution changed during the study; the last one is used" for name in sorted(changed)]
    distributions: dict[str, Distribution] = {}
    for name, distribution in found.items():
        try:
            distributions[name], note = _distribution(distribution)
        except (ValueError, ArithmeticError) as error:  # SpaceError is a ValueError
            raise StageError(f"import-space: {source}: {name}: {error}") from error
        if note:
            notes.append(f"{name}: {note}")
    if sometimes := [name for name in found if any(name not in t.params for t in trials if t.params)]:
        notes.append(f"not in every trial: {', '.join(sometimes)}; write its condition as `when`")
    if study.maximises:
        notes.append("the study maximises; the held-out loss is minimised here")
    notes.append("set sweep.n_tokens: the number of tokens per trial, which the study does not contain")
    notes.append(f"its results inform the searcher with learn_from = [{source!r}], if they are losses of this corpus")
    space = space_from(source, distributions, names)
    return ImportedSpace(source=source, space=space, settings={"trials": len(trials)}, notes=tuple(notes))


def _distribution(distribution: BaseDistribution) -> tuple[Distribution, str]:
    match distribution:
        case CategoricalDistribution(choices=choices):
            if bad := [choice for choice in choices if not isinstance(choice, bool | int | float | str)]:
                raise SpaceError(f"a choice must be text, a number, true or false, got {bad[0]!r}")
            return discrete(choices), ""
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


def results_of(study: OptunaStudy) -> pd.DataFrame:
    """Return a row for each finished trial: its parameters and its loss, NaN if the trial failed."""
    rows: list[dict[str, Any]] = []
    for trial in study.trials:
        if trial.state not in FINISHED:
            continue
        loss = trial.value if trial.state == TrialState.COMPLETE and trial.value is not None else math.nan
        rows.append({**trial.params, "loss": loss})
    return pd.DataFrame(rows)
