"""The search: what a sweep suggests, which trials advance at a rung, and what Ray Tune runs of it.

A sweep is a record in the ledger: suggestions, results at rungs, decisions. A `Searcher` turns the record into the next
configuration, a `Scheduler` into the next move, and both are functions of the record (and of prior runs), so a
sweep that was interrupted continues from its rows. A suggestion is one Ray Tune trial, which pauses at a rung and
resumes when it advances.

`study.sweep(searcher=…, scheduler=…)` takes objects of a user's own that keep the two protocols.
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
__getattr__ = lazily(
    "muscale.search",
    {"Grid": "searchers", "OptunaSearcher": "searchers", "Record": "record", **dict.fromkeys(_PROTOCOLS, "protocols")},
)
