"""Ray Tune's `param_space` as a space: each of Tune's functions has its distribution, or none and an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from muscale.errors import StageError
from muscale.importers.imported_space import ImportedSpace, discrete, multiples_within, normal, space_from, stepped
from muscale.settings.strict import short_repr
from search_spaces import Distribution, Fixed, Integer, LogUniform, SpaceError, Uniform

ARGUMENTS = {
    "uniform": ("lower", "upper"),
    "quniform": ("lower", "upper", "q"),
    "loguniform": ("lower", "upper", "base"),
    "qloguniform": ("lower", "upper", "q", "base"),
    "randint": ("lower", "upper"),
    "qrandint": ("lower", "upper", "q"),
    "lograndint": ("lower", "upper", "base"),
    "qlograndint": ("lower", "upper", "q", "base"),
    "randn": ("mean", "sd"),
    "qrandn": ("mean", "sd", "q"),
    "choice": ("categories",),
    "grid_search": ("values",),
    "sample_from": ("func",),
}
"""Arguments of the functions of `ray.tune` that describe a parameter, as Ray 2.60 has them."""


@dataclass(frozen=True)
class Parameter:
    """A call of one of Tune's functions."""

    function: str
    values: Mapping[str, Any]


def space_of(param_space: Mapping[str, Any], names: Mapping[str, str] | None = None) -> ImportedSpace:
    """A study's space from the objects of a Tune script, whose `str` is TOML to paste.

    Args:
        param_space: As `tune.Tuner` takes it.
        names: Our name of each parameter that is called otherwise here: `{"lr": "learning_rate"}`.

    Raises:
        StageError: Naming the key and what has no counterpart.
    """
    try:
        return imported("param_space", _from_objects(param_space), names or {})
    except ValueError as error:
        raise StageError(f"import-space: param_space: {error}") from error


def imported(source: str, tree: Mapping[str, Any], names: Mapping[str, str]) -> ImportedSpace:
    """The space of parameters, fixed values and nested tables of them.

    Raises:
        ValueError: Naming the key, the rule and the value.
        StageError: If `names` names no parameter, or two come to be the same.
    """
    notes: list[str] = []
    found: dict[str, Distribution] = {}
    kinds = set()
    for key, leaf in _flat(tree):
        if isinstance(leaf, Parameter):
            kinds.add(leaf.function)
            try:
                found[key], note = _distribution(leaf)
            except (ValueError, TypeError, ArithmeticError) as error:  # a SpaceError is a ValueError
                raise ValueError(f"{key}: {error}") from error
        elif isinstance(leaf, bool | int | float | str):
            found[key], note = Fixed(value=leaf), ""
        else:
            note = f"left out, as it is no number, text, true or false: {short_repr(leaf)}"
        if note:
            notes.append(f"{key}: {note}")
    if not found:
        raise ValueError("param_space: must name at least one parameter, got none")
    settings = {}
    if "grid_search" in kinds:
        if kinds == {"grid_search"}:
            settings["searcher"] = "grid"
        else:
            notes.append(
                'grid_search: its values are searched like the rest; searcher = "grid" would try all combinations'
            )
    notes.append(
        "set sweep.trials (num_samples) and sweep.n_tokens (a trial's tokens), which param_space does not state"
    )
    return ImportedSpace(source=source, space=space_from(source, found, names), settings=settings, notes=tuple(notes))


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Each parameter by its name, those of nested tables by dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and set(value) == {"grid_search"}:  # what tune.grid_search returns
            yield f"{before}{name}", Parameter("grid_search", {"values": value["grid_search"]})
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _distribution(parameter: Parameter) -> tuple[Distribution, str]:
    """A parameter as a distribution, and a note about it."""
    kind, values = parameter.function, parameter.values
    if kind == "sample_from":
        raise SpaceError(
            "sample_from draws with a function, which has no counterpart; a condition is written as `when`"
        )
    if kind in ("choice", "grid_search"):
        listed = values[ARGUMENTS[kind][0]]
        if not isinstance(listed, list | tuple) or not listed:
            raise SpaceError(f"{kind} needs a list of values, got {short_repr(listed)}")
        if bad := [value for value in listed if not isinstance(value, bool | int | float | str)]:
            raise SpaceError(f"a value of {kind} must be a number, text, true or false, got {short_repr(bad[0])}")
        return discrete(list(listed)), ""
    if bad := [name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, int | float)]:
        raise SpaceError(f"{bad[0]} of {kind} must be a number, got {short_repr(values[bad[0]])}")
    if not all(math.isfinite(value) for value in values.values()):
        raise SpaceError(f"the arguments of {kind} must be finite, got {dict(values)}")
    if kind.endswith("randn"):
        found, note = normal(values["mean"], values["sd"])
        return found, note + (f"; its steps of {values['q']:g} are left out" if "q" in values else "")
    low, high, step = values["lower"], values["upper"], values.get("q", 1)
    if kind.endswith("randint"):
        if any(not float(value).is_integer() for value in (low, high, step)):
            raise SpaceError(f"the arguments of {kind} must be whole numbers, got {dict(values)}")
        last = int(high) - (step == 1)  # Tune leaves the upper end out, but with steps
        whole = Fixed(value=int(low)) if low == last else Integer(low=int(low), high=last, log="log" in kind)
        return (whole, "") if step == 1 else stepped(*multiples_within(int(low), last, int(step)), int(step), whole)
    found = (LogUniform if "log" in kind else Uniform)(low=float(low), high=float(high))
    return stepped(*multiples_within(low, high, step), step, found) if "q" in values else (found, "")


def _from_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tune's objects as calls."""
    from ray.tune.search import sample

    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found[name] = _from_objects(value)
        elif not isinstance(value, sample.Domain):
            found[name] = _plain(value)
        elif isinstance(value, sample.Function):
            found[name] = Parameter("sample_from", {})
        elif isinstance(value, sample.Categorical):
            found[name] = Parameter("choice", {"categories": [_plain(each) for each in value.categories]})
        elif isinstance(value, sample.Float | sample.Integer):
            found[name] = _range_of(name, value)
        else:
            raise SpaceError(f"{name}: no counterpart of {type(value).__name__}")
    return found


def _plain(value: Any) -> Any:
    """NumPy's arrays and scalars as Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _range_of(name: str, domain: Any) -> Parameter:
    from ray.tune.search import sample

    sampler: Any = domain.get_sampler()
    steps = {"q": sampler.q} if isinstance(sampler, sample.Quantized) else {}
    if steps:
        sampler = sampler.sampler
    if isinstance(sampler, sample.Normal):
        return Parameter("qrandn" if steps else "randn", {"mean": sampler.mean, "sd": sampler.sd, **steps})
    if not isinstance(sampler, sample.Uniform | sample.LogUniform):
        raise SpaceError(f"{name}: no counterpart of {type(sampler).__name__}")
    kind = "randint" if isinstance(domain, sample.Integer) else "uniform"
    log = "log" if isinstance(sampler, sample.LogUniform) else ""
    return Parameter(f"{'q' if steps else ''}{log}{kind}", {"lower": domain.lower, "upper": domain.upper, **steps})
