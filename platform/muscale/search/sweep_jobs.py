"""The jobs of a sweep: a segment of a trial, or an annealed run that ends from a rung.

A job describes its training by the history of the trial's configurations: its own, and in a population also later ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from search_spaces import Config

JOB = "job"  # in the config of a Tune trial
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


@dataclass(frozen=True, kw_only=True)
class TrialSegment:
    """A trial of the sweep, from its current rung to a higher one."""

    trial: int
    path: ConfigHistory
    first: int
    until: int

    @property
    def suggestion(self) -> int:
        """The trial, all segments of which are one Tune trial."""
        return self.trial

    def tune_config(self) -> dict[str, Any]:
        """Config of its Tune trial: the hyperparameters, and the job."""
        return _tune_config(self)


@dataclass(frozen=True, kw_only=True)
class AnnealJob:
    """An annealed run that ends from a rung, under the sweep's seed or another."""

    trial: int
    path: ConfigHistory = field(compare=False)
    rung: int
    seed: int | None
    suggestion: ClassVar[None] = None

    def tune_config(self) -> dict[str, Any]:
        """Config of its Tune trial: the hyperparameters, and the job."""
        return _tune_config(self)


def _tune_config(job: TrialSegment | AnnealJob) -> dict[str, Any]:
    return {**job.path[-1][1], JOB: json.dumps({**vars(job), "path": history_to_json(job.path)})}


def job_from_json(text: str) -> TrialSegment | AnnealJob:
    """Read a job from the config of its Tune trial."""
    values = json.loads(text)
    values["path"] = history_from_json(values["path"])
    return TrialSegment(**values) if "until" in values else AnnealJob(**values)
