"""The configurations of a trial: its own, and in a population those that it went on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from search_spaces import Config

ConfigHistory: TypeAlias = "tuple[tuple[int, Config], ...]"
"""(first rung, configuration) pairs: from the state at the rung before, training continues with that configuration."""


def history_of(config: Mapping[str, Any]) -> ConfigHistory:
    """The history of a trial that keeps its configuration."""
    return ((0, dict(config)),)


def history_to_json(history: ConfigHistory) -> list[list[Any]]:
    """Plain values."""
    return [[rung, config] for rung, config in history]


def history_from_json(values: list[list[Any]]) -> ConfigHistory:
    """The inverse of `history_to_json`."""
    return tuple((int(rung), dict(config)) for rung, config in values)
