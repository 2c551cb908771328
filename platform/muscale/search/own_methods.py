"""Custom searchers and schedulers: their identity in a sweep's key, and the record of the sweep that a study uses.

The objects themselves are never stored, so reading a study runs no user code.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from muscale.errors import StageError
from muscale.settings.strict import short_repr
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from proxy_models.hashing import content_key
from search_spaces import Space

VERBS = {"searcher": "propose", "scheduler": "next"}
_BELOW = ("muscale", "builtins", "typing", "abc")  # packages whose classes count by name only


def identity_of(role: str, method: object) -> dict[str, Any]:
    """Return plain values that identify an object in the ledger: the name and the source of its class, and its fields.

    A searcher or scheduler is a function of the record, so equal values make an equal sweep. A class of muscale counts by its name
    only, so that a new version continues the sweep.

    Args:
        role: "searcher" or "scheduler".

    Raises:
        StageError: If the object lacks the role's method or is no frozen dataclass, or a field holds anything but plain values,
            spaces, functions and classes of modules, and frozen dataclasses.
    """
    if not callable(getattr(method, VERBS[role], None)):
        raise StageError(f"sweep: {role}: must have a method {VERBS[role]}, got {short_repr(method)}")
    return _of_instance(role, method)


def _of_instance(where: str, value: Any) -> dict[str, Any]:
    kind = type(value)
    if not (is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise StageError(
            f"sweep: {where}: must be a frozen dataclass, because its fields identify the sweep in the ledger and any other state "
            f"would be lost when the sweep is resumed; got a {kind.__module__}.{kind.__qualname__}"
        )
    values = {field.name: _plain(f"{where}.{field.name}", getattr(value, field.name)) for field in fields(kind)}
    return {**_of_definition(where, kind), "fields": values}


def _of_definition(where: str, defined: Any) -> dict[str, Any]:
    """Return name and source hash of a function, or of a class with its base classes."""
    if "<" in defined.__qualname__:
        raise StageError(
            f"sweep: {where}: must be defined in a module and have a name, which identifies the sweep when it is resumed; "
            f"got {defined.__module__}.{defined.__qualname__}"
        )
    written = defined.__mro__ if isinstance(defined, type) else (defined,)
    source = [_source_of(each) for each in written if each.__module__.partition(".")[0] not in _BELOW]
    if not all(source):
        raise StageError(
            f"sweep: {where}: its source is part of the sweep's key and can't be read; got {defined.__module__}.{defined.__qualname__}"
        )
    return {"name": f"{defined.__module__}:{defined.__qualname__}", "source": content_key(source)}


def _source_of(defined: Any) -> str:
    """Return the source of a class or function, "" if there is none; for a class in a notebook, which has no file, its methods'."""
    try:
        return inspect.getsource(defined)
    except (OSError, TypeError):
        methods = (
            [each for each in vars(defined).values() if inspect.isfunction(each)] if isinstance(defined, type) else []
        )
        return "".join(map(_source_of, methods))


def _plain(where: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Space):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{place}]", each) for place, each in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain(f"{where}.{name}", each) for name, each in value.items()}
    if inspect.isfunction(value) or isinstance(value, type):
        return _of_definition(where, value)
    return _of_instance(where, value)


def note_methods(ledger: Ledger, of: str, sweep: str, methods: Mapping[str, Any], finished: str | None = None) -> None:
    """Record that a study uses a sweep by custom methods, and how much of the sweep is finished.

    Args:
        of: Key of the sweep that the study file alone describes.
        methods: Identities of the custom searcher, scheduler or both.
        finished: Key of the finished search's extent (`Sweep.how_much`); None while the sweep runs.
    """
    payload = {"of": of, "sweep": sweep, "methods": dict(methods), "finished": finished}
    notes = [row["payload"] for row in ledger.results(ResultKind.OWN_METHODS) if row["payload"]["of"] == of]
    if finished is None and notes and notes[-1]["sweep"] == sweep:
        return
    if not notes or notes[-1] != payload:
        ledger.record_result(ResultKind.OWN_METHODS, f"{sweep} {now()}", payload)


def noted_methods(ledger: Ledger, of: str) -> dict[str, Any]:
    """Return the identities of the custom methods of the study's latest sweep; empty if it used those of the study file."""
    found = [row["payload"] for row in ledger.results(ResultKind.OWN_METHODS) if row["payload"]["of"] == of]
    return dict(found[-1]["methods"]) if found else {}


def is_noted_as_finished(ledger: Ledger, sweep: str, finished: str) -> bool:
    """Whether a sweep of this extent (`Sweep.how_much`) has finished."""
    notes = (row["payload"] for row in ledger.results(ResultKind.OWN_METHODS))
    return any(note["sweep"] == sweep and note["finished"] == finished for note in notes)
