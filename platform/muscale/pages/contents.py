"""Values of a report, read from the ledger: nothing is trained, and no stage is run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import sqlalchemy as sa

from muscale import json_lines
from muscale.commands import StudyCommands
from muscale.errors import StageError
from muscale.findings import Findings, StudyContents
from muscale.full_runs.amend.amended_runs import AmendedRun, amended_runs
from muscale.full_runs.checkpoints.evaluated_checkpoints import EvaluatedCheckpoint, evaluated_checkpoints
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.full_runs.records.events import run_events
from muscale.full_runs.records.run_records import RunRecords
from muscale.layout import BUNDLES, EVALUATIONS, FULL_RUNS, GALLERY, METRICS
from muscale.monitoring.calibration import Calibration, calibrate
from muscale.pages.reproduction import reproduction
from muscale.pages.study_cost import spending
from muscale.plans.band import Band, registered_band
from muscale.plans.next_stems import NextStems
from muscale.plans.plan import Plan
from muscale.plans.score_forecasts import ScoreForecasts, registered_scores
from muscale.plans.use_case_card import UseCaseCard, card_of
from muscale.proxies.comparison import Comparison, latest_comparison
from muscale.proxies.ladder_scores import known_ladder_scores
from muscale.proxies.leak_check import LeakCheck, known_leaks
from muscale.search.search_so_far import SearchSoFar, search_so_far
from muscale.search.sweep_result import SweepResult
from muscale.store.ledger import NESTED, now
from muscale.store.ledger_tables import ResultKind, segments
from muscale.store.ledger_tables import runs as run_table
from proxy_models.architecture.member import NATS
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.data.corpus import Corpus
from scaling import ScalingFit, Verdict


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """Values of a report; None for a value that is not known yet."""

    name: str
    created_at: str
    runs: pd.DataFrame
    corpus: Corpus | None = None
    leaks: LeakCheck | None = None
    has_check: bool = True
    check: CoordinateCheck | None = None
    so_far: SearchSoFar | None = None
    sweep: SweepResult | None = None
    transfer: Verdict | None = None
    fit: ScalingFit | None = None
    next_runs: NextStems | None = None
    comparison: Comparison | None = None
    plan: dict[str, Any] | None = None
    forecast: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    use_case: UseCaseCard | None = None
    promotion: dict[str, Any] | None = None
    curve: pd.DataFrame | None = None
    expert_loads: list[list[float]] | None = None
    evaluations: pd.DataFrame | None = None
    evaluated: CheckpointEvaluation | None = None
    checkpoints: list[EvaluatedCheckpoint] = field(default_factory=list)
    score_forecasts: ScoreForecasts | None = None
    gallery: str | None = None
    band: Band | None = None
    calibration: Calibration | None = None
    amended: tuple[AmendedRun, ...] = ()
    run_events: pd.DataFrame | None = None
    epochs: pd.DataFrame | None = None
    bundle: str | None = None
    spending: pd.DataFrame = field(default_factory=pd.DataFrame)
    reproduction: dict[str, Any] | None = None
    commands: StudyCommands | None = None
    loss_unit: str = NATS

    @property
    def trained_tokens(self) -> int:
        """Tokens that the plan's full run has trained; 0 before it began."""
        return 0 if self.curve is None or self.curve.empty else int(self.curve["tokens"].iloc[-1])


def _card(study: StudyContents, found: Findings) -> UseCaseCard | None:
    """The use-case card; None while a law or a score that it needs is not known."""
    if not (found.fit and found.plan):
        return None
    try:
        return card_of(study.config, found.fit, found.plan, known_ladder_scores(study.ledger))
    except StageError:  # a target's score is not measured yet
        return None


def gather(study: StudyContents, found: Findings) -> ReportContents:
    """Collect all values of the report; None for a value that is not known yet."""
    runs = study.ledger.runs(without=NESTED)
    corpus, known = study.corpus, _full_run(study, found.plan)
    scored = study.config.scores is not None
    return ReportContents(
        name=study.config.name,
        commands=study.commands,
        loss_unit=study.config.model.loss_unit,
        created_at=now(),
        corpus=corpus,
        leaks=known_leaks(study.config, study.ledger, corpus) if corpus else None,
        has_check=study.config.has_check,
        check=study.coordinate_check,
        runs=runs,
        so_far=search_so_far(study.ledger, study.config.rung_tokens()),
        sweep=found.sweep,
        transfer=found.transfer,
        fit=found.fit,
        next_runs=found.next_runs,
        use_case=_card(study, found),
        comparison=latest_comparison(study.config, study.ledger),
        checkpoints=evaluated_checkpoints(study.ledger) if scored else [],
        score_forecasts=registered_scores(known["plan"]["key"], study.ledger) if scored and known else None,
        gallery=GALLERY if scored and (study.directory / GALLERY).exists() else None,
        calibration=calibrate(study.ledger),
        amended=amended_runs(study.ledger.read),
        spending=spending(study.ledger),
        reproduction=reproduction(
            study.path,
            study.overrides,
            study.ledger.identity(),
            {
                "corpus": corpus.key if corpus else None,
                "plan": known["plan"]["key"] if known.get("plan") else None,
                "bundle": known.get("bundle"),
            },
            _environments(study),
        ),
        **known,
    )


def _full_run(study: StudyContents, planned: Plan | None) -> dict[str, Any]:
    """Return the registered plan of the study file, or else the latest registered plan, and its outcome."""
    forecast = (study.ledger.forecast(planned.key) if planned else None) or study.ledger.latest_forecast()
    if forecast is None:
        return {}
    promotion = study.ledger.result(ResultKind.PROMOTION, forecast["plan"])
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
    gates = [row["payload"] for row in study.ledger.results(ResultKind.GATE)]
    known["gate"] = next((gate for gate in reversed(gates) if gate["plan"] == forecast["plan"]), None)
    known["bundle"] = forecast["plan"] if (study.directory / BUNDLES / forecast["plan"]).exists() else None
    known["band"] = registered_band(forecast["plan"], study.ledger)
    known["run_events"] = pd.DataFrame([event.to_dict() for event in run_events(study.ledger, forecast["plan"])])
    directory = study.directory / FULL_RUNS / forecast["plan"]
    if (directory / METRICS).exists():
        records = RunRecords(directory)
        known |= {
            "curve": records.steps(),
            "evaluations": records.evaluations(),
            "expert_loads": records.expert_loads(),
        }
        if (corpus := study.corpus) and not corpus.is_own_data:
            from muscale.monitoring.seen_data import SeenData  # imports torch

            known["epochs"] = SeenData.of(study, forecast["plan"]).epoch_starts()
    if beside := json_lines.read(directory / EVALUATIONS):
        known["evaluated"] = CheckpointEvaluation.from_dict(beside[-1])
    return known


def _environments(study: StudyContents) -> tuple[str, ...]:
    """Return the environments of the ledger's runs, a line each with the number of runs."""
    counts: dict[str, int] = {}
    for environment, n in study.ledger.read(_trained_on):
        versions = ", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "muscale"))
        line = f"{environment['device']}: {versions}"
        counts[line] = counts.get(line, 0) + n
    return tuple(f"{n} runs on {line}" for line, n in counts.items())


def _trained_on(connection: sa.Connection) -> list[tuple[dict[str, Any], int]]:
    """Return every environment with the number of runs that ended in it."""
    text = sa.type_coerce(segments.c.environment, sa.Text)  # without this, each row's JSON is parsed
    query = sa.select(text, sa.func.count()).join(run_table, run_table.c.key == segments.c.key).group_by(text)
    first = sa.func.min(run_table.c.created_at)
    return [(json.loads(row), n) for row, n in connection.execute(query.order_by(first, text))]
