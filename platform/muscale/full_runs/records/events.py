"""All that befell a full run, in order of time: the one place for whoever tells of a run.

Each kind is kept once, by who can write it: incidents by the workers, who know no ledger, in the run's directory, and with the
promotion once it is recorded; alarms by whoever watches, in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from muscale.full_runs.records.alarms import Alarm
from muscale.layout import FULL_RUNS
from muscale.store.ledger import Ledger, now
from muscale.store.spike_handling import Incident, read_incidents
from muscale.store.tables import ResultKind


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that befell a run.

    Attributes:
        at: UTC, ISO 8601.
        kind: "alarm", or what was done about an incident: "skip", "rollback", "restart".
        told: In words.
    """

    at: str
    kind: str
    told: str

    def to_dict(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """A line with the time to the second."""
        return f"{datetime.fromisoformat(self.at):%Y-%m-%d %H:%M:%S} {self.told}"


def run_events(ledger: Ledger, plan: str, *, asserted: bool = False, seen: Iterable[Alarm] = ()) -> tuple[Event, ...]:
    """The events of a plan's run so far, the oldest first.

    Args:
        ledger: The study's.
        plan: Its key.
        asserted: Whether the run that was elsewhere is meant, of which no incidents are known.
        seen: Alarms of this moment, of which the ledger may not know yet.
    """
    rows = [row for row in ledger.results(ResultKind.ALARM) if _is_of(row["payload"], plan, asserted)]
    known = {row["key"] for row in rows}
    events = [(row["created_at"], "alarm", str(Alarm.from_dict(row["payload"]))) for row in rows]
    events += [(now(), "alarm", str(alarm)) for alarm in seen if alarm.key not in known]
    if not asserted:
        events += [(one.at, one.action, str(one)) for one in _incidents(ledger, plan)]
    made = [Event(at=at, kind=kind, told=told) for at, kind, told in events]
    return tuple(sorted(made, key=lambda event: datetime.fromisoformat(event.at)))


def _is_of(alarm: dict[str, Any], plan: str, asserted: bool) -> bool:
    return bool(alarm["plan"] == plan and alarm["asserted"] == asserted)


def _incidents(ledger: Ledger, plan: str) -> list[Incident]:
    """Of the run's directory; where it is gone, those that its promotion was recorded with."""
    found = read_incidents(ledger.directory / FULL_RUNS / plan)
    recorded = ledger.result(ResultKind.PROMOTION, plan) or {}
    return found or [Incident.from_dict(values) for values in recorded.get("incidents", ())]
