"""A sweep of Weights & Biases from its YAML file: parameters, method, early termination."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muscale.errors import one_line, refusing
from muscale.formatting import format_read_error
from muscale.importers.imported_space import ImportedSpace, discrete, multiples_within, normal, space_from, stepped
from muscale.settings.strict import short_repr
from search_spaces import Choice, Distribution, Fixed, Integer, LogUniform, Ordinal, Uniform

SEARCHERS = {"grid": "grid", "random": "random", "bayes": "gp"}
_KNOWN = ("method", "parameters", "early_terminate", "run_cap", "metric")
_MOST_ETA, _MOST_BRACKETS = 1000.0, 100  # a study file's bounds of reduction_factor and rungs
_RUNGS = 4  # if the file states none: the study file's default
_SCIENTIFIC = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_IF_VALUES = "if they are values, the name is log_uniform_values, inv_log_uniform_values or q_log_uniform_values"


def read_sweep(path: Path, names: Mapping[str, str]) -> ImportedSpace:
    """Return the search in a sweep file; nothing in the file is run.

    Args:
        names: Our names of the parameters that have other names here.

    Raises:
        StageError: If the file can't be used; the message names the file, the key, the rule and the value.
    """
    with refusing(f"import-space: {path}"):
        return _search_of(path, _load(path), names)


def _search_of(path: Path, tree: dict[str, Any], names: Mapping[str, str]) -> ImportedSpace:
    parameters, method = tree.get("parameters"), tree.get("method")
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError(f"parameters: a table of parameters is required, got {short_repr(parameters)}")
    notes: list[str] = []
    space = space_from(str(path), dict(_flat(parameters, "", notes)), names)
    if not isinstance(method, str) or method not in SEARCHERS:
        raise ValueError(f"method: must be one of {', '.join(SEARCHERS)}, got {short_repr(method)}")
    settings: dict[str, Any] = {"searcher": SEARCHERS[method]}
    if method == "bayes":
        notes.append("method bayes becomes searcher gp, also a Gaussian process; auto also learns from other scales")
    if type(cap := tree.get("run_cap")) is int and cap > 0:
        settings["trials"] = cap
    else:
        notes.append("no run_cap: set sweep.trials")
    settings |= _scheduler(tree.get("early_terminate"), notes)
    notes.append("set sweep.n_tokens: the number of tokens per trial, which the file does not contain")
    metric = tree.get("metric")
    if isinstance(metric, dict) and metric.get("goal", "minimize") != "minimize":
        notes.append(f"metric.goal {short_repr(metric.get('goal'))}: the held-out loss is minimised here")
    if others := [name for name in tree if name not in _KNOWN]:
        notes.append(f"no counterpart: {', '.join(map(str, others))}")
    return ImportedSpace(source=str(path), space=space, settings=settings, notes=tuple(notes))


def _load(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Loader of YAML 1.2, in which 1e-3 is a number; PyYAML follows 1.1, which requires 1.0e-3."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506  a SafeLoader
    except OSError as error:
        raise ValueError(format_read_error(error)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"can't be read as YAML: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"must be a table with method and parameters, got {short_repr(tree)}")
    return tree


def _flat(parameters: dict[str, Any], before: str, notes: list[str]) -> list[tuple[str, Distribution]]:
    """Return each parameter by name; parameters of nested tables have dotted names."""
    found = []
    for name, table in parameters.items():
        key = f"{before}{name}"
        if not isinstance(table, dict):
            raise ValueError(f"parameters.{key}: must be a table, got {short_repr(table)}")
        if isinstance(nested := table.get("parameters"), dict):
            found += _flat(nested, f"{key}.", notes)
            continue
        try:
            distribution, note = _distribution(table)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # SpaceError is a ValueError
            why = f"missing {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"parameters.{key}: {why}, got {short_repr(table)}") from error
        if note:
            notes.append(f"{key}: {note}")
        found.append((key, distribution))
    return found


def _distribution(table: dict[str, Any]) -> tuple[Distribution, str]:
    """Return a parameter's distribution, and a note about it."""
    kind = table.get("distribution") or _default_kind(table)
    if kind not in _KINDS:
        raise ValueError(f"distribution must be one of {', '.join(_KINDS)}")
    return _KINDS[kind](table)


def _default_kind(table: dict[str, Any]) -> str:
    """Return the distribution that W&B assumes if the parameter names none."""
    if "value" in table:
        return "constant"
    if "values" in table:
        return "categorical_w_probabilities" if "probabilities" in table else "categorical"
    if "min" in table and "max" in table:
        whole = all(isinstance(table[end], int) for end in ("min", "max"))
        return "int_uniform" if whole else "uniform"
    return "normal" if "mu" in table else "without value, values, min and max"


def _categorical(table: dict[str, Any]) -> tuple[Distribution, str]:
    values = table["values"]
    if not isinstance(values, list) or not values:
        raise ValueError("values must be a list")
    found = discrete(values)
    note = "ascending numbers are an ordinal, whose neighbours are close" if isinstance(found, Ordinal) else ""
    if table.get("probabilities") and isinstance(found, Choice | Ordinal):
        note = "; ".join(filter(None, [note, "its probabilities have no counterpart but a prior"]))
    return found, note


def _bounds(table: dict[str, Any]) -> tuple[float, float]:
    return float(table["min"]), float(table["max"])


def _q_uniform(table: dict[str, Any]) -> tuple[Distribution, str]:
    low, high = _bounds(table)
    if float(table.get("q", 1)) == 1 and low.is_integer() and high.is_integer():
        return Integer(low=int(low), high=int(high)), ""
    step = float(table.get("q", 1))
    return stepped(*multiples_within(low, high, step), step, Uniform(low=low, high=high))


def _log(low: float, high: float) -> tuple[Distribution, str]:
    return LogUniform(low=low, high=high), ""


def _by_exponents(
    table: dict[str, Any], make: Callable[[float, float], tuple[Distribution, str]], sign: int = 1
) -> tuple[Distribution, str]:
    """Return the distribution between e to the power of each bound, and a note with this range in values."""
    try:
        low, high = sorted(math.exp(sign * end) for end in _bounds(table))
        found, note = make(low, high)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"min and max are exponents of e here ({error}); {_IF_VALUES}") from error
    return found, "; ".join(
        filter(None, [f"its bounds are exponents: values {low:.4g} to {high:.4g}; {_IF_VALUES}", note])
    )


def _q_log(table: dict[str, Any], low: float, high: float) -> tuple[Distribution, str]:
    if float(table.get("q", 1)) == 1 and math.ceil(low) < math.floor(high):
        return Integer(low=max(1, math.ceil(low)), high=math.floor(high), log=True), ""
    return LogUniform(low=low, high=high), f"its steps of {table.get('q', 1)} are left out"


def _normal(table: dict[str, Any], log: bool) -> tuple[Distribution, str]:
    mean, sd = float(table.get("mu", 0)), float(table.get("sigma", 1))
    try:
        found, note = normal(mean, sd, log=log)
        if log:
            note = f"mu and sigma are of the logarithm: its median is {math.exp(mean):.4g}; {note}"
    except OverflowError as error:
        raise ValueError(f"mu and sigma are of the logarithm ({error})") from error
    return found, note + (f"; its steps of {table['q']} are left out" if "q" in table else "")


def _beta(table: dict[str, Any]) -> tuple[Distribution, str]:
    return Uniform(low=0.0, high=1.0), "a beta distribution has no counterpart: uniform between 0 and 1"


_KINDS: dict[str, Callable[[dict[str, Any]], tuple[Distribution, str]]] = {
    "constant": lambda t: (Fixed(value=t["value"]), ""),
    "categorical": _categorical,
    "categorical_w_probabilities": _categorical,
    "int_uniform": lambda t: (Integer(low=t["min"], high=t["max"]), ""),
    "uniform": lambda t: (Uniform(low=float(t["min"]), high=float(t["max"])), ""),
    "q_uniform": _q_uniform,
    "log_uniform": lambda t: _by_exponents(t, _log),
    "log_uniform_values": lambda t: _log(*_bounds(t)),
    "inv_log_uniform": lambda t: _by_exponents(t, _log, -1),
    "inv_log_uniform_values": lambda t: _log(*_bounds(t)),
    "q_log_uniform": lambda t: _by_exponents(t, lambda low, high: _q_log(t, low, high)),
    "q_log_uniform_values": lambda t: _q_log(t, *_bounds(t)),
    "normal": lambda t: _normal(t, log=False),
    "q_normal": lambda t: _normal(t, log=False),
    "log_normal": lambda t: _normal(t, log=True),
    "q_log_normal": lambda t: _normal(t, log=True),
    "beta": _beta,
    "q_beta": _beta,
}
"""Distributions as defined by W&B's documentation of sweep configurations."""


def _scheduler(table: Any, notes: list[str]) -> dict[str, Any]:
    """Translate W&B's hyperband: like asynchronous halving, it stops a run that is not in the best 1/eta at a bracket."""
    if table is None:
        return {"scheduler": "none"}
    if not isinstance(table, dict) or table.get("type") != "hyperband":
        raise ValueError(f"early_terminate: type must be hyperband, got {short_repr(table)}")
    eta, brackets = table.get("eta", 3), table.get("s")
    if isinstance(eta, bool) or not isinstance(eta, int | float) or not 1 < eta <= _MOST_ETA:
        raise ValueError(f"early_terminate.eta: must be above 1, and at most {_MOST_ETA:g}, got {short_repr(eta)}")
    settings = {"scheduler": "asha", "reduction_factor": float(eta)}
    settings["rungs"] = brackets + 1 if type(brackets) is int and 0 < brackets < _MOST_BRACKETS else _RUNGS
    counted = [name for name in ("min_iter", "max_iter") if name in table]
    notes.append("early_terminate hyperband: scheduler asha, which stops at its own rungs")
    if counted:
        notes.append(f"{' and '.join(counted)} count what was logged: rungs lie at sweep.n_tokens / eta^k here")
    return settings
