"""The report as a live page, which shows changes in the ledger as they happen.

A thread polls the ledger and renders the page's parts again after a change; the server (`muscale.pages.live_server`) only serves
the latest rendering. The page only reads the study, except for cancel requests (`muscale.store.cancels`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from muscale.background import in_background
from muscale.errors import MuscaleError, StageError
from muscale.findings import Findings, StudyContents, findings
from muscale.layout import EVALUATIONS, FULL_RUNS, METRICS
from muscale.pages.contents import ReportContents, gather
from muscale.pages.report import sections_of
from muscale.pages.sections import Section
from muscale.search.search_so_far import search_so_far
from muscale.store.cancels import cancel_study, cancel_trial
from muscale.store.lease import host_of, is_dead, process_of, taken_leases
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind, metadata

LOOK_SECONDS = 1.0
_COUNTED = ("segments", "runs", "results", "forecasts", "rounds")
# largest number of each sweep, in an indexed column
_NUMBERED = {"trials": "number", "rungs": "sequence", "decisions": "sequence"}
_SETTLES = ("segments", "runs", "trials", "rungs", "decisions", "rounds", "forecasts")
_REST = 4.0  # times the duration of a look, so that looking takes at most a fifth of a core from the training
_RECENT_SECONDS = 120.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The latest rendering of the page.

    Attributes:
        contents: Values on the page.
        sections: Parts of the page.
        tag: Hash of the whole page.
    """

    contents: ReportContents
    sections: tuple[Section, ...]
    tag: str

    @property
    def known(self) -> list[tuple[str, str]]:
        """Every part with the hash of its markup."""
        return [(section.ident, section.hash) for section in self.sections]


@dataclass(kw_only=True, eq=False)
class LivePage:
    """Watcher of a study's ledger that keeps its page up to date.

    Attributes:
        study: Study to show.
        token: Access token of the actions; None: no actions.
    """

    study: StudyContents
    token: str | None = None
    _snapshot: Snapshot | None = field(default=None, init=False)
    _rendered_state: tuple[object, ...] = field(default=(None,), init=False)
    _found: Findings | None = field(default=None, init=False)
    _memo: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def snapshot(self) -> Snapshot:
        """Latest rendering; the first access renders the page."""
        if self._snapshot is None:
            self.look()
        assert self._snapshot is not None  # noqa: S101 - made the line before
        return self._snapshot

    def look(self) -> bool:
        """Render the page again if the ledger or the full run's records changed; return whether it was rendered."""
        state = self._read_state()
        if self._snapshot is not None and state == self._rendered_state:
            return False
        if self._found is None or state[0] != self._rendered_state[0]:
            self._found = findings(self.study)
        contents = gather(self.study, self._found)
        first, *others = sections_of(contents, self._memo)
        sections = (first, self._now(contents), *others)
        tag = hashlib.sha256("".join(section.hash for section in sections).encode()).hexdigest()[:16]
        self._snapshot, self._rendered_state = Snapshot(contents=contents, sections=sections, tag=tag), state
        return True

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Render changes of the ledger repeatedly while the block runs."""
        with in_background(self._look_on, "live page"):
            yield

    def _look_on(self, done: threading.Event) -> None:
        pause = LOOK_SECONDS
        while not done.wait(pause):
            begun = time.monotonic()
            try:
                self.look()
            except MuscaleError as error:  # the page stays as it was until the ledger answers again
                _log.warning("live page: %s", error)
            except Exception:  # a file being written may end in half a record; the next look reads the whole record
                _log.exception("live page: could not be rendered")
            pause = max(LOOK_SECONDS, _REST * (time.monotonic() - begun))

    def _read_state(self) -> tuple[object, ...]:
        """Return a value that changes with anything on the page, the part on training first; it is far cheaper than the page."""
        ledger = self.study.ledger
        directory = self.study.directory / FULL_RUNS
        files = sorted(path for name in (METRICS, EVALUATIONS) for path in directory.glob(f"*/{name}"))
        sizes = [(str(path), path.stat().st_size) for path in files]
        counts = ledger.read(_counts)
        trained = {name: counts[name] for name in _SETTLES}
        return trained, counts, self._at_work(), sizes

    def _now(self, contents: ReportContents) -> Section:
        """Return the running processes, the cancel requests so far, and the possible ones."""
        ledger, so_far = self.study.ledger, contents.so_far
        asked = [row for kind in (ResultKind.CANCEL_TRIAL, ResultKind.CANCEL_STUDY) for row in ledger.results(kind)]
        values = {
            "owners": self._at_work(),
            "asked": [_described(row) for row in asked],
            "ended": bool(ledger.results(ResultKind.PROMOTION)),
            "actions": self.token is not None,
            "running": () if so_far is None else so_far.running,
        }
        return Section(title="Running now", command="run", about="", template="now.html.jinja", values={"now": values})

    def _at_work(self) -> list[str]:
        """Describe the running processes of the study, as far as this process can see them."""
        begun = self.study.ledger.latest_result(ResultKind.PROMOTION_STARTED)
        found = _owners(self.study.ledger)
        if begun and not self.study.ledger.result(ResultKind.PROMOTION, begun["key"]):
            metrics = self.study.directory / FULL_RUNS / begun["key"] / METRICS
            if metrics.exists() and time.time() - metrics.stat().st_mtime < _RECENT_SECONDS:
                found.append(f"the full run of plan {begun['key']} is being trained")
        return found

    def cancel_trial(self, trial: int, reason: str) -> None:
        """Request that a running trial of the sweep ends; raise StageError if the trial is not running."""
        so_far = search_so_far(self.study.ledger, self.study.config.rung_tokens())
        if so_far is None or trial not in so_far.running:
            raise StageError(f"cancel: trial {trial} is not running")
        cancel_trial(self.study.ledger, so_far.sweep, trial, reason)

    def cancel_study(self, reason: str) -> None:
        """Request that every process that trains for the study ends."""
        cancel_study(self.study.ledger, reason)


def _counts(connection: sa.Connection) -> dict[str, tuple[object, ...]]:
    """Return a value for each table that changes with every new row, without scanning a large table."""
    found: dict[str, tuple[object, ...]] = {}
    for name in _COUNTED:
        table = metadata.tables[name]
        stamp = table.c["registered_at" if name == "forecasts" else "created_at"]
        # Two statements, since SQLite scans a whole index for a query of anything besides the maximum.
        count = connection.execute(sa.select(sa.func.count()).select_from(table)).scalar()
        found[name] = (count, connection.execute(sa.select(sa.func.max(stamp))).scalar())
    sweeps = sa.select(metadata.tables["rounds"].c.sweep).distinct().subquery()
    for name, number in _NUMBERED.items():
        columns = metadata.tables[name].c
        last = sa.select(sa.func.max(columns[number])).where(columns.sweep == sweeps.c.sweep).scalar_subquery()
        rows = connection.execute(sa.select(sweeps.c.sweep, last).order_by(sweeps.c.sweep))
        found[name] = tuple(tuple(row) for row in rows)
    return found


def _owners(ledger: Ledger) -> list[str]:
    """Describe the holders of leases, each process once."""
    held = [row for row in ledger.read(taken_leases) if not is_dead(row["owner"])]
    work: dict[tuple[str, int], str] = {}
    for row in sorted(held, key=lambda row: (not row["name"].startswith("sweep "), row["name"])):
        what = "leads the sweep" if row["name"].startswith("sweep ") else "trains"
        work.setdefault((host_of(row["owner"]), process_of(row["owner"])), what)
    return [f"process {process} on {host} {what}" for (host, process), what in work.items()]


def _described(row: dict[str, Any]) -> str:
    asked = row["payload"]
    what = f"trial {asked['trial']}" if row["kind"] == ResultKind.CANCEL_TRIAL else "the study"
    return f"{row['created_at'][:19].replace('T', ' ')} UTC: {what} was asked to end: {asked['reason']}"
