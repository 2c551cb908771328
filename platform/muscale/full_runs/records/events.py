"""Events of a full run in order of time, for all outputs that show them.

Workers, which have no ledger, write incidents to the run's directory, and the recorded promotion has the incidents too. Alarms
are recorded in the ledger by the process that monitors the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from muscale.full_runs.records.alarms import Alarm
from muscale.layout import FULL_RUNS
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import Incident, read_incidents


@dataclass(frozen=True, kw_only=True)
class Event(Recorded):
    """An alarm, or an incident of the workers.

    Attributes:
        at: Time in UTC, ISO 8601.
        kind: "alarm", or the action after an incident: "skip", "rollback", "restart".
    """

    at: str
    kind: str
    message: str

    def __str__(self) -> str:
        """One line, with the time to the second."""
        return f"{datetime.fromisoformat(self.at):%Y-%m-%d %H:%M:%S} {self.message}"


def run_events(ledger: Ledger, plan: str, *, asserted: bool = False, seen: Iterable[Alarm] = ()) -> tuple[Event, ...]:
    """Events of a plan's run so far, oldest first.

    Args:
        asserted: Whether the run was trained elsewhere; its incidents are unknown.
        seen: Current alarms, which may not be in the ledger yet.
    """
    of = {"plan": plan, "asserted": asserted}
    rows = [row for row in ledger.results(ResultKind.ALARM) if of.items() <= row["payload"].items()]
    known = {row["key"] for row in rows}
    events = [(row["created_at"], "alarm", str(Alarm.from_dict(row["payload"]))) for row in rows]
    events += [(now(), "alarm", str(alarm)) for alarm in seen if alarm.key not in known]
    if not asserted:
        events += [(one.at, one.action, str(one)) for one in _incidents(ledger, plan)]
    timeline = [Event(at=at, kind=kind, message=message) for at, kind, message in events]
    return tuple(sorted(timeline, key=lambda event: datetime.fromisoformat(event.at)))


def _incidents(ledger: Ledger, plan: str) -> list[Incident]:
    """Incidents from the run's directory; if that is gone, from the recorded promotion."""
    found = read_incidents(ledger.directory / FULL_RUNS / plan)
    recorded = ledger.result(ResultKind.PROMOTION, plan) or {}
    return found or [Incident.from_dict(values) for values in recorded.get("incidents", ())]
