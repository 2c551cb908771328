"""Ray Tune's `param_space` as a space: each of Tune's objects has its distribution, or none and an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from muscale.errors import StageError
from muscale.importers.imported_space import ImportedSpace, discrete, multiples_within, normal, space_from, stepped
from muscale.settings.strict import short_repr
from search_spaces import Distribution, Fixed, Integer, LogUniform, SpaceError, Uniform


def space_of(param_space: Mapping[str, Any], names: Mapping[str, str] | None = None) -> ImportedSpace:
    """A study's space from the objects of a Tune script, whose `str` is TOML to paste.

    Args:
        param_space: As `tune.Tuner` takes it.
        names: Our name of each parameter that is called otherwise here: `{"lr": "learning_rate"}`.

    Raises:
        StageError: Naming the key and what has no counterpart.
    """
    notes: list[str] = []
    found: dict[str, Distribution] = {}
    are_grids: set[bool] = set()
    for key, value in _flat(param_space):
        is_fixed = isinstance(value, bool | int | float | str)
        try:
            distribution, note = (Fixed(value=value), "") if is_fixed else _distribution(value)
        except (ValueError, TypeError, ArithmeticError) as error:  # a SpaceError is a ValueError
            raise StageError(f"import-space: param_space: {key}: {error}") from error
        if distribution:
            found[key] = distribution
        if distribution and not is_fixed:
            are_grids.add(isinstance(value, Mapping))
        if note:
            notes.append(f"{key}: {note}")
    if not found:
        raise StageError("import-space: param_space: must name at least one parameter, got none")
    settings = {}
    if are_grids == {True}:
        settings["searcher"] = "grid"
    elif True in are_grids:
        notes.append(
            'grid_search: its values are searched like all others; searcher = "grid" would try all combinations'
        )
    notes.append(
        "set sweep.trials (num_samples) and sweep.n_tokens (a trial's tokens), which param_space does not contain"
    )
    space = space_from("param_space", found, names or {})
    return ImportedSpace(source="param_space", space=space, settings=settings, notes=tuple(notes))


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Each parameter by its name, those of nested tables by dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and set(value) != {"grid_search"}:  # what tune.grid_search returns
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _plain(value)


def _plain(value: Any) -> Any:
    """NumPy's arrays and scalars as Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _distribution(value: Any) -> tuple[Distribution | None, str]:
    """Return the distribution for a Tune object and a note about it; return None for any other object."""
    from ray.tune.search import sample

    if isinstance(value, Mapping):
        return _listed("grid_search", _plain(value["grid_search"])), ""
    if isinstance(value, sample.Categorical):
        return _listed("choice", value.categories), ""
    if isinstance(value, sample.Function):
        raise SpaceError(
            "sample_from draws with a function, which has no counterpart; a condition is written as `when`"
        )
    if isinstance(value, sample.Float | sample.Integer):
        return _range(value)
    if isinstance(value, sample.Domain):
        raise SpaceError(f"no counterpart of {type(value).__name__}")
    return None, f"left out, because it is not a number, text, true or false: {short_repr(value)}"


def _listed(function: str, values: Any) -> Distribution:
    if not isinstance(values, list | tuple) or not values:
        raise SpaceError(f"{function} needs a list of values, got {short_repr(values)}")
    plain = [_plain(value) for value in values]
    if bad := [value for value in plain if not isinstance(value, bool | int | float | str)]:
        raise SpaceError(f"a value of {function} must be a number, text, true or false, got {short_repr(bad[0])}")
    return discrete(plain)


def _range(domain: Any) -> tuple[Distribution, str]:
    from ray.tune.search import sample

    sampler: Any = domain.get_sampler()
    steps = {}
    if isinstance(sampler, sample.Quantized):
        steps, sampler = {"q": sampler.q}, sampler.sampler
    if isinstance(sampler, sample.Normal):
        values = {"mean": sampler.mean, "sd": sampler.sd, **steps}
    elif isinstance(sampler, sample.Uniform | sample.LogUniform):
        values = {"lower": domain.lower, "upper": domain.upper, **steps}
    else:
        raise SpaceError(f"no counterpart of {type(sampler).__name__}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SpaceError(f"{name} must be a finite number, got {short_repr(value)}")
    if isinstance(sampler, sample.Normal):
        found, note = normal(values["mean"], values["sd"])
        return found, note + (f"; its steps of {values['q']:g} are left out" if steps else "")
    log, low, high, step = isinstance(sampler, sample.LogUniform), values["lower"], values["upper"], values.get("q", 1)
    if isinstance(domain, sample.Integer):
        if any(not float(value).is_integer() for value in values.values()):
            raise SpaceError(f"{', '.join(values)} of whole numbers must be whole, got {values}")
        last = int(high) - (step == 1)  # Tune leaves the upper end out, but with steps
        whole = Fixed(value=int(low)) if low == last else Integer(low=int(low), high=last, log=log)
        return (whole, "") if step == 1 else stepped(*multiples_within(int(low), last, int(step)), int(step), whole)
    continuous = (LogUniform if log else Uniform)(low=float(low), high=float(high))
    return stepped(*multiples_within(low, high, step), step, continuous) if steps else (continuous, "")
