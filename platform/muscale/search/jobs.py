"""The jobs of a sweep: a segment of a trial, or an annealed run that ends from a rung; one Tune trial runs one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from muscale.search.config_history import ConfigHistory, history_from_json, history_to_json


@dataclass(frozen=True, kw_only=True)
class TrialSegment:
    """A trial of the sweep, from the rung where it is to another."""

    trial: int
    path: ConfigHistory
    first: int
    until: int


@dataclass(frozen=True, kw_only=True)
class AnnealJob:
    """An annealed run that ends from a rung, under the sweep's seed or another."""

    trial: int
    path: ConfigHistory = field(compare=False)
    rung: int
    seed: int | None


def job_to_json(job: TrialSegment | AnnealJob) -> str:
    """JSON of a job, for the config of a Tune trial."""
    return json.dumps({**vars(job), "path": history_to_json(job.path)})


def job_from_json(text: str) -> TrialSegment | AnnealJob:
    """The inverse of `job_to_json`."""
    values = json.loads(text)
    values["path"] = history_from_json(values["path"])
    return TrialSegment(**values) if "until" in values else AnnealJob(**values)
