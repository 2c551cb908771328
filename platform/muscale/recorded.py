"""What the ledger's results and forecasts are read as, by their stage: another ledger's are read so before any is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from muscale.full_runs.continue_run import lineage
from muscale.full_runs.continue_run import train as continuing
from muscale.full_runs.promote import smoke_test
from muscale.full_runs.promote.promotion import Promotion
from muscale.full_runs.records import alarms
from muscale.monitoring import band
from muscale.plans import gate, plan_file
from muscale.plans.planning import Plan
from muscale.store import cancels
from muscale.store.lineage import segment_from_dict
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.training.numerics import Numerics
from scaling import Ablation, Verdict

Payload = dict[str, Any]


def readers() -> Mapping[str, Callable[[Payload], object]]:
    """For each stage of the results, and for "forecasts", what makes its payload a value again, and tells it."""
    return {
        "check": lambda payload: (payload["passed"], str(CoordinateCheck.from_dict(payload))),
        "transfer": lambda payload: (payload["verdict"], str(Verdict.from_dict(payload))),
        "ablation": lambda payload: str(Ablation.from_dict(payload)),
        "forecasts": _read_plan,
        "promotion_started": _read_beginning,
        "promotion": lambda payload: str(Promotion.from_dict(payload)),
        "observation_started": lambda payload: datetime.fromisoformat(payload["at"]),
        "observation": lambda payload: str(Promotion.from_dict(payload)),
        alarms.STAGE: lambda payload: str(alarms.Alarm.from_dict(payload)),
        lineage.STARTED: _read_stage,
        band.STAGE: lambda payload: str(band.Band.from_dict(payload)),
        cancels.TRIAL: lambda payload: (payload["sweep"], int(payload["trial"]), payload["reason"]),
        continuing.RECORD: lambda payload: str(continuing.Continued.from_dict(payload)),
        gate.RECORD: lambda payload: str(gate.Gate.from_dict(payload)),
        plan_file.RECORD: lambda payload: (payload["plan"], plan_file.hash_of(payload["contents"])),
        smoke_test.RECORD: lambda payload: str(smoke_test.SmokeTest.from_dict(payload)),
    }


def _read_plan(payload: Payload) -> object:
    return str(Plan.from_dict(payload)), *(float(payload[name]) for name in ("n_params", "n_tokens", "compute_flops"))


def _read_beginning(payload: Payload) -> object:
    return datetime.fromisoformat(payload["at"]), str(payload["verdict"]), bool(payload["forced"])


def _read_stage(payload: Payload) -> object:
    segments = tuple(lineage.LineageSegment(**stretch) for stretch in payload["lineage"])
    chain = (Numerics.from_dict(payload["numerics"]), tuple(map(segment_from_dict, payload["segments"])))
    return lineage.plain(segments), chain, str(payload["name"]), int(payload["position"]), str(payload["folder"])
