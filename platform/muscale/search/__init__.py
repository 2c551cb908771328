"""The search: suggestions of a sweep, advances of trials at rungs, and the jobs that Ray Tune runs.

A sweep is a record in the ledger: suggestions, results at rungs, decisions. A `Searcher` turns the record into the next
configuration, a `Scheduler` into the next move, and both are functions of the record (and of prior runs), so a
sweep that was interrupted continues from its rows. Each suggestion is one Ray Tune trial, which pauses at a rung and
resumes when it advances.

`study.sweep(searcher=…, scheduler=…)` takes custom objects that follow the two protocols.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy_models.lazy import lazily

if TYPE_CHECKING:
    from muscale.search.protocols import Advance, Known, Observation, Scheduler, Searcher, Start
    from muscale.search.record import Record
    from muscale.search.searchers import Grid, OptunaSearcher

__all__ = ["Advance", "Grid", "Known", "Observation", "OptunaSearcher", "Record", "Scheduler", "Searcher", "Start"]

_PROTOCOLS = ("Advance", "Known", "Observation", "Scheduler", "Searcher", "Start")
__getattr__, __dir__ = lazily(
    "muscale.search",
    {"Grid": "searchers", "OptunaSearcher": "searchers", "Record": "record", **dict.fromkeys(_PROTOCOLS, "protocols")},
)
