"""Searchers and schedulers of a user's own: what a sweep of theirs is known by, and which sweep a study stands on.

The objects themselves are never stored: what reads a study runs none of a user's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from muscale.errors import StageError
from muscale.settings.strict import short_repr
from muscale.store.ledger import Ledger, now
from muscale.store.tables import ResultKind
from proxy_models.hashing import content_key
from search_spaces import Space

VERBS = {"searcher": "propose", "scheduler": "next"}
_BELOW = ("muscale", "builtins", "typing", "abc")  # packages whose classes count by their names alone


def identity_of(role: str, method: object) -> dict[str, Any]:
    """Plain values by which the ledger knows an object: the name and the source of its class, and its fields.

    A searcher or scheduler is a function of the record, so equal values make an equal sweep. Of a class of muscale's own the name
    alone counts, so that a new version continues the sweep.

    Args:
        role: "searcher" or "scheduler".

    Raises:
        StageError: If it lacks the role's method, is no frozen dataclass, or a field is not made of plain values, spaces, functions
            and classes of modules, and frozen dataclasses.
    """
    if not callable(getattr(method, VERBS[role], None)):
        raise StageError(f"sweep: {role}: must have a method {VERBS[role]}, got {short_repr(method)}")
    return _of_instance(role, method)


def _of_instance(where: str, value: Any) -> dict[str, Any]:
    kind = type(value)
    if not (is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise StageError(
            f"sweep: {where}: must be a frozen dataclass, as its fields are what the ledger knows the sweep by and what it keeps "
            f"between calls would be lost when the sweep is resumed; got a {kind.__module__}.{kind.__qualname__}"
        )
    values = {field.name: _plain(f"{where}.{field.name}", getattr(value, field.name)) for field in fields(kind)}
    return {**_of_definition(where, kind), "fields": values}


def _of_definition(where: str, defined: Any) -> dict[str, Any]:
    """Name and hash of the source of a class, with the classes that it is made from, or of a function."""
    if "<" in defined.__qualname__:
        raise StageError(
            f"sweep: {where}: must be defined in a module and have a name, by which the sweep is found again; "
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
    """The source of a class or function; of a class in a notebook, which has no file, of its methods. "" if there is none."""
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
    """Note that a study stands on a sweep by methods of its user's own, and how much of it has been searched to the end.

    Args:
        of: Key of the sweep that the study file alone describes.
        methods: Identities of its searcher, its scheduler or both.
        finished: Key of how much was searched; None while it is at work.
    """
    payload = {"of": of, "sweep": sweep, "methods": dict(methods), "finished": finished}
    notes = [row["payload"] for row in ledger.results(ResultKind.OWN_METHODS) if row["payload"]["of"] == of]
    if finished is None and notes and notes[-1]["sweep"] == sweep:
        return
    if not notes or notes[-1] != payload:
        ledger.record_result(ResultKind.OWN_METHODS, f"{sweep} {now()}", payload)


def noted_methods(ledger: Ledger, of: str) -> dict[str, Any]:
    """Identities of the methods by which the study's latest sweep was searched; empty where they are the study file's."""
    found = [row["payload"] for row in ledger.results(ResultKind.OWN_METHODS) if row["payload"]["of"] == of]
    return dict(found[-1]["methods"]) if found else {}


def is_noted_as_finished(ledger: Ledger, sweep: str, finished: str) -> bool:
    """Whether so much of a sweep was searched to the end."""
    notes = (row["payload"] for row in ledger.results(ResultKind.OWN_METHODS))
    return any(note["sweep"] == sweep and note["finished"] == finished for note in notes)
