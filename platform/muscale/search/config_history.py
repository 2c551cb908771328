"""The path of a trial: its configuration, and in a population those that it went on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces import Config

Path = tuple[tuple[int, Config], ...]
"""(first rung, configuration) pairs: from the state at the rung before, training goes on with that configuration."""


def path_of(config: Mapping[str, Any]) -> Path:
    """The path of a trial that keeps its configuration."""
    return ((0, dict(config)),)


def path_to_json(path: Path) -> list[list[Any]]:
    """Plain values."""
    return [[rung, config] for rung, config in path]


def path_from_json(values: list[list[Any]]) -> Path:
    """The inverse of `path_to_json`."""
    return tuple((int(rung), dict(config)) for rung, config in values)
