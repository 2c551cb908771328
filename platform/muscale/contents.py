"""Gathers what a study knows for its report, straight from the ledger: nothing is trained, and no stage is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from muscale import json_lines
from muscale.band import registered_band
from muscale.befallen import befallen
from muscale.calibration import calibrate
from muscale.checkpoint_evaluation import CheckpointEvaluation
from muscale.errors import StageError
from muscale.layout import CORPUS, EVALUATIONS, FULL_RUNS, METRICS
from muscale.ledger import now
from muscale.report import ReportContents
from muscale.run_records import RunRecords
from muscale.sweep import Sweep, collect
from proxy_models.coordinate_check import CoordinateCheck
from proxy_models.corpus import MANIFEST, Corpus

if TYPE_CHECKING:
    from muscale.planning import Plan
    from muscale.study import Study


def gather(study: Study) -> ReportContents:
    """All that the report shows; what is not known yet is None."""
    known: dict[str, Any] = {}
    corpus = study.directory / CORPUS
    check = study.ledger.latest_result("check")
    runs = study.runs()
    if not runs[runs["purpose"] == "sweep"].empty:
        known |= _search(study)
    known |= _full_run(study, known.pop("planned", None))
    return ReportContents(
        name=study.config.name,
        config=study.config.to_dict(),
        created_at=now(),
        corpus=Corpus.open(corpus) if (corpus / MANIFEST).exists() else None,
        check=CoordinateCheck.from_dict(check["payload"]) if check else None,
        runs=runs,
        calibration=calibrate(study.ledger),
        **known,
    )


def _search(study: Study) -> dict[str, Any]:
    """Sweep, transfer, law and what it tells of the plan, as far as their runs are complete."""
    known: dict[str, Any] = {}
    try:
        sweep = collect(Sweep(config=study.config, ledger=study.ledger, numerics=study.numerics))
        known.update(sweep=sweep)
        if study.is_complete("transfer"):
            known.update(transfer=study.transfer())
        if study.is_complete("ladder"):
            known.update(fit=study.fit())
            planned = study.planned()
            known.update(planned=planned, next_runs=study.next_runs(planned))
    except StageError:
        return known  # the sections without data say which command gives them
    return known


def _full_run(study: Study, planned: Plan | None) -> dict[str, Any]:
    """The plan of the study file as it was registered, or else the one registered last, and what came of it."""
    forecast = (study.ledger.forecast(planned.key) if planned else None) or study.ledger.latest_forecast()
    if forecast is None:
        return {}
    promotion = study.ledger.result("promotion", forecast["plan"])
    plan = forecast["payload"]
    if planned and planned.key == forecast["plan"]:
        plan = {**plan, "decision": planned.decision}
    known: dict[str, Any] = {
        "plan": plan,
        "forecast": {
            **{name: forecast[name] for name in ("loss", "low", "high", "level", "registered_at")},
            "supported": not plan["forecast"]["reasons"],
            "reasons": plan["forecast"]["reasons"],
        },
    }
    if promotion:
        known["promotion"] = promotion
    known["band"] = registered_band(forecast["plan"], study.ledger)
    known["befallen"] = pd.DataFrame([event.to_dict() for event in befallen(study.ledger, forecast["plan"])])
    directory = study.directory / FULL_RUNS / forecast["plan"]
    if (directory / METRICS).exists():
        known["curve"] = pd.read_json(directory / METRICS, lines=True)
        known["evaluations"] = RunRecords(directory).evaluations()
    if beside := json_lines.read(directory / EVALUATIONS):
        known["evaluated"] = CheckpointEvaluation.from_dict(beside[-1])
    return known
