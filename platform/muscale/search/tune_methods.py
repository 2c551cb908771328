"""Ray Tune's own methods by name: `scheduler = "tune:ASHAScheduler"`, `searcher = "tune:OptunaSearch"`.

`[sweep.tune]` has keyword arguments for their classes. Each argument goes to the named classes that accept it.
"""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from muscale.actors.work import LOSS, WORST_LOSS
from muscale.errors import StageError
from muscale.settings.strict import short_repr
from muscale.settings.sweep import TUNE, SweepSettings, changeable
from proxy_models.architecture.member import NATS
from search_spaces import Choice, Distribution, Fixed, Integer, LogUniform, Ordinal, Space, Uniform

TIME = "relative_length"
"""Key of a report: the tokens of its rung by those of the first rung, reduction_factor to the power of the rung. In these exact
numbers the milestones of Tune's halving schedulers are the rungs; tokens are rounded to whole batches."""
_GIVEN = ("metric", "mode", "space")  # arguments that the sweep sets, or that no study file can express
_UNUSABLE = ("PopulationBasedTrainingReplay", "ResourceChangingScheduler")  # need a log of Tune's or another scheduler
_SEEDS = ("seed", "random_state_seed", "random_state", "random_seed")


_HIGHEST = {NATS: 10.0}
"""Highest loss of a run that trains, where it is known: a uniform guess among 20,000 tokens. A divergence counts as ten times this or
the highest loss so far, since Tune's methods take no infinity."""


class Reports:
    """Reports of rungs as Tune's methods read them, in the order in which the rungs ended."""

    def __init__(self, settings: SweepSettings, loss_unit: str) -> None:
        self._factor, self._highest = settings.reduction_factor, _HIGHEST.get(loss_unit, 0.0)

    def of(self, rung: int, loss: float | None) -> dict[str, Any]:
        """Return the report of a rung; the loss is None after a divergence."""
        self._highest = max(self._highest, loss or 0.0)
        length, worst = self._factor**rung, 10 * self._highest or WORST_LOSS
        return {
            LOSS: worst if loss is None else loss,
            "training_iteration": rung + 1,
            TIME: length,
            "hyperband_info": {"budget": length},
        }


def tune_scheduler(settings: SweepSettings, space: Space) -> Any:
    """Make the scheduler that `[sweep]` names; raise StageError if Tune has no such scheduler, or it refuses an argument."""
    bounds = {name: space[name] for name in changeable(space)}
    defaults = {
        "time_attr": "training_iteration" if settings.is_population else TIME,
        "max_t": settings.reduction_factor ** (settings.rungs - 1),
        "grace_period": 1,
        "reduction_factor": settings.reduction_factor,
        "perturbation_interval": 1,
        "quantile_fraction": settings.share,
        "resample_probability": settings.resample,
        "hyperparam_mutations": {name: _mutation(distribution) for name, distribution in bounds.items()},
        "hyperparam_bounds": {
            name: [d.low, d.high] for name, d in bounds.items() if isinstance(d, Uniform | LogUniform | Integer)
        },
        "synch": True,
        "log_config": False,
    }
    if settings.is_population and settings.tune.get("synch", True) is not True:
        raise StageError("sweep.tune.synch: must be true, because a member copies another at the same rung; got false")
    if (time := settings.tune.get("time_attr", TIME)) not in (counted := (TIME, "training_iteration")):
        raise StageError(
            f"sweep.tune.time_attr: must be {' or '.join(counted)}, which count rungs; got {short_repr(time)}"
        )
    scheduler = _made("scheduler", settings.scheduler, settings, defaults)
    scheduler.set_search_properties(LOSS, "min")
    return scheduler


def tune_searcher(settings: SweepSettings, name: str, space: Space) -> Any:
    """Make a searcher by name with its space; raise StageError if it or its package is missing, or refuses argument or space."""
    searcher = _made("searcher", name, settings, dict.fromkeys(_SEEDS, settings.seed))
    config = {key: domain(f"sweep.space.{key}", space[key]) for key in space.searched}
    with _as_stage_error(f"sweep.searcher: {name}"):
        if not searcher.set_search_properties(LOSS, "min", config):
            raise ValueError("takes no space of Tune's")
    return searcher


def require_known_arguments(settings: SweepSettings, searcher: str) -> None:
    """Raise a StageError that names the first key of `[sweep.tune]` that neither the scheduler nor the searcher takes."""
    named = {"scheduler": settings.scheduler, "searcher": searcher}
    kinds = [_kind(role, name) for role, name in named.items() if name.startswith(TUNE)]
    known = sorted(set().union(*map(_arguments, kinds)))
    for key in settings.tune.keys() - {*known}:
        raise StageError(
            f"sweep.tune.{key}: must be one of {', '.join(known)}; got {short_repr(settings.tune[key])}"
            if known
            else f'sweep.tune.{key}: is for Ray Tune\'s methods, such as scheduler = "tune:ASHAScheduler"; the sweep uses none'
        )


def _made(role: str, name: str, settings: SweepSettings, defaults: Mapping[str, Any]) -> Any:
    takes = _arguments(kind := _kind(role, name))
    with _as_stage_error(f"sweep.{role}: {name}"), seeded(settings.seed):
        return kind(**{key: value for key, value in {**defaults, **settings.tune}.items() if key in takes})


def _kind(role: str, name: str) -> type:
    """Return the class of a name."""
    from ray.tune import schedulers, search

    is_scheduler = role == "scheduler"
    base = schedulers.TrialScheduler if is_scheduler else search.Searcher
    registry: dict[str, Any] = schedulers.SCHEDULER_IMPORT if is_scheduler else search.SEARCH_ALG_IMPORT
    imported = [entry if isinstance(entry, type) else entry() for entry in registry.values()]  # functions import late
    kinds = {kind.__name__: kind for kind in imported if issubclass(kind, base) and kind.__name__ not in _UNUSABLE}
    if is_scheduler:
        kinds["ASHAScheduler"] = schedulers.ASHAScheduler  # a second name of AsyncHyperBandScheduler
    if kind := kinds.get(name.removeprefix(TUNE)):
        return kind
    raise StageError(f"sweep.{role}: must be one of {', '.join(TUNE + each for each in sorted(kinds))}; got {name}")


def _arguments(kind: type) -> set[str]:
    """Names of the arguments that a study file may give to a class."""
    named = inspect.signature(kind).parameters.values()
    return {each.name for each in named if each.kind is not inspect.Parameter.VAR_KEYWORD} - {*_GIVEN}


def domain(where: str, distribution: Distribution) -> Any:
    """Return a distribution as Tune's spaces express it; raise StageError if Tune's spaces can't express it."""
    from ray import tune

    match distribution:
        case Uniform(low=low, high=high):
            return tune.uniform(low, high)
        case LogUniform(low=low, high=high):
            return tune.loguniform(low, high)
        case Integer(low=low, high=high, log=log):
            return (tune.lograndint if log else tune.randint)(low, high + 1)
        case Ordinal(values=values) | Choice(values=values):
            return tune.choice(list(values))
        case Fixed(value=value):
            return value
    raise StageError(
        f"{where}: Tune's spaces can't express a {distribution.kind}; use a method of muscale's or one of Tune's own spaces"
    )


def _mutation(distribution: Distribution) -> Any:
    """Return a distribution as Tune's PBT takes it: a list moves to a neighbour."""
    match distribution:
        case Ordinal(values=values) | Choice(values=values):
            return list(values)
    return domain("sweep.space", distribution)


@contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Set the global generators, which Tune's methods draw from, within the block only; its warnings and news are not shown."""
    before, log = (random.getstate(), np.random.get_state()), logging.getLogger("ray.tune")  # noqa: NPY002
    number, level = int(np.random.SeedSequence([abs(part) for part in seed]).generate_state(1)[0]), log.level
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a Gaussian process that did not converge
            yield
    finally:
        log.setLevel(level)
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


@contextmanager
def _as_stage_error(where: str) -> Iterator[None]:
    """Name the place of an error that a class raises for its arguments, its space or a missing package."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        raise StageError(f"{where}: {type(error).__name__}: {error}") from error
