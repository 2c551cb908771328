"""Tracked runs of a study, read from its ledger and files: trials, evaluated runs of the ladder, the full run, and the study.

The metrics, the same in every tracker (docs/tracking.md lists them): tokens, train_loss, val_loss, learning_rate, grad_norm,
tokens_per_second, forecast/loss, forecast/low, forecast/high, band/expected, band/low, band/high, score/TASK/METRIC. Losses in
nats per token.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from muscale import json_lines
from muscale.bundles.bundle_files import MANIFEST
from muscale.full_runs.checkpoints.evaluated_checkpoints import checkpoints_in_ledger
from muscale.full_runs.promote.promotion import Promotion, recorded_promotion
from muscale.full_runs.records.run_records import MetricsTail, RunRecords
from muscale.layout import BUNDLES, EVALUATIONS, FAILURE, FULL_RUNS, METRICS, REPORT, TRACKING
from muscale.plans.band import Band, registered_band
from muscale.plans.plan import Plan
from muscale.plans.plan_file import path_of
from muscale.search.record import Record
from muscale.search.sweep import Sweep
from muscale.settings.config import StudyConfig
from muscale.store.ledger import NESTED, Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from muscale.tracking.tracked import Row, TrackedRun
from proxy_models.evaluation.measure import Score
from proxy_models.evaluation.smooth_scores import TASKS

_STEPS = ("tokens", "train_loss", "grad_norm", "rate_factor", "seconds")
_CARD = "README.md"  # of a bundle; the module that defines the name needs torch
_SIDES = ("loss", "low", "high")


def study_key(directory: Path) -> str:
    """Key that tells this study's runs from those of studies with the same name; made at first use, and kept in its directory."""
    file = directory / TRACKING / "study"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:8])
    return file.read_text().strip()


def trials(sweep: Sweep) -> Iterator[TrackedRun]:
    """The trials of a sweep as they are now, with `val_loss` at each rung, which ranked them; skips trials before their first rung."""
    record, name = sweep.record(), sweep.config.name
    key, plan = study_key(sweep.ledger.directory), sweep.plan
    given = plan.defaults.to_dict()
    annealed = sweep.annealed_figures(record)
    for trial, values in record.configs.items():
        if record.last_rung(trial) < 0:
            continue
        status = record.status(trial, plan.top)
        model = plan.numerics.model
        yield TrackedRun(
            key=input_key(key, "trial", sweep.key, trial),
            name=f"{name} trial {trial}",
            kind="trial",
            group=f"{name} {key}",
            config={
                **given,
                **values,
                "trial": trial,
                "searched": sorted(values),
                "n_params": model.n_params,
                "model": model.to_dict(),
                "sweep": sweep.key,
            },
            rows={"rungs": list(_rung_rows(sweep, record, trial))},
            summary=_trial_summary(record, trial, status) | annealed.get(trial, {}),
            ended="failed"
            if status in ("diverged", "failed")
            else "finished"
            if status == "completed" and trial in annealed
            else None,
        )


def _rung_rows(sweep: Sweep, record: Record, trial: int) -> Iterator[Row]:
    for rung in range(record.last_rung(trial) + 1):
        if (trial, rung) in record.results and math.isfinite(loss := record.loss(trial, rung)):
            tokens = sweep.plan.rung_tokens[rung]
            values = {"tokens": tokens, "val_loss": loss}
            if sweep.config.sweep.is_population:  # its hyperparameters change from rung to rung
                held = record.config_at(trial, rung).items()
                values |= {f"hyperparameters/{name}": v for name, v in held if isinstance(v, int | float)}
            yield Row(at=tokens, values=values)


def _trial_summary(record: Record, trial: int, status: str) -> dict[str, Any]:
    tokens, seconds = record.cost(trial)
    summary: dict[str, Any] = {"status": status, "rung": record.last_rung(trial)}
    summary |= {"trained_tokens": tokens, "trained_seconds": seconds}
    if math.isfinite(loss := record.loss(trial, record.last_rung(trial))):
        summary["val_loss"] = loss
    return summary


class FullRunSource:
    """A full run: its training curve in intervals, its evaluations, and the forecast as lines next to both.

    Args:
        points: Number of intervals of the training curve.
    """

    def __init__(self, ledger: Ledger, plan: str, config: Mapping[str, Any], points: int) -> None:
        self._ledger, self._plan, self._config, self._points = ledger, plan, config, points
        self._directory = ledger.directory / FULL_RUNS / plan
        self._steps = MetricsTail(self._directory / METRICS, _STEPS)
        self._records = RunRecords(self._directory)
        self._known: tuple[Plan, Band | None, dict[str, float]] | None = None

    def __call__(self) -> Iterator[TrackedRun]:
        """Yield the run as it is now; nothing before its forecast is registered."""
        if self._known is None:
            row = self._ledger.forecast(self._plan)
            if row is None:
                return
            lines = {f"forecast/{side}": float(row[side]) for side in _SIDES}
            self._known = Plan.of_row(row), registered_band(self._plan, self._ledger), lines
        plan, band, lines = self._known
        promotion = recorded_promotion(self._ledger, self._plan)
        name, key = self._config["name"], study_key(self._ledger.directory)
        evaluated = self._records.evaluations()
        failed = (self._directory / FAILURE).exists()
        yield TrackedRun(
            key=input_key(key, "full", self._plan),
            name=f"{name} full run",
            kind="full",
            group=f"{name} {key}",
            config={**self._config, "plan_of_run": plan.to_dict()},
            rows={
                "training": list(_stretches(self._steps.table(), plan, lines, self._points)),
                "evaluations": list(_evaluations(evaluated, band, lines)),
                **_score_rows(self._scores(ended=promotion is not None)),
            },
            summary=lines | _full_run_summary(promotion, evaluated),
            ended="finished" if promotion else "failed" if failed else None,
        )

    def _scores(self, *, ended: bool) -> Iterator[tuple[int, Iterable[Score]]]:
        """Yield the tokens and scores of the run's evaluated checkpoints; those of its end are in the ledger."""
        for row in json_lines.read(self._directory / EVALUATIONS):
            yield row["tokens"], [Score(**score) for score in row.get("scores", ())]
        for one in checkpoints_in_ledger(self._ledger) if ended else ():
            if one.run == self._plan:
                yield one.tokens, one.scores


def _stretches(steps: pd.DataFrame, plan: Plan, lines: Mapping[str, float], points: int) -> Iterator[Row]:
    """Means over complete intervals of the run's tokens: the number of rows is fixed, and rereading gives the same rows."""
    steps = steps.dropna(subset=["train_loss"])
    if steps.empty:
        return
    tokens = steps["tokens"].to_numpy(dtype=float)
    number = np.ceil(tokens * points / plan.n_tokens).astype(int)
    whole = number < number[-1] if tokens[-1] < plan.n_tokens else np.ones(len(number), dtype=bool)
    before_tokens = before_seconds = 0.0
    for _, stretch in steps[whole].groupby(number[whole]):
        end = int(stretch["tokens"].iloc[-1])
        values = {"tokens": end, "train_loss": float(stretch["train_loss"].mean()), **lines}
        recipe = next((s.recipe for s in plan.segments if end <= s.end), plan.segments[-1].recipe)
        values["learning_rate"] = recipe.learning_rate * float(stretch["rate_factor"].iloc[-1])
        values["grad_norm"] = float(stretch["grad_norm"].mean())
        seconds = float(stretch["seconds"].iloc[-1])
        values["tokens_per_second"] = (end - before_tokens) / max(seconds - before_seconds, 1e-9)
        before_tokens, before_seconds = end, seconds
        yield Row(at=end, values={name: value for name, value in values.items() if math.isfinite(value)})


def _evaluations(evaluated: pd.DataFrame, band: Band | None, lines: Mapping[str, float]) -> Iterator[Row]:
    sides = band.at(evaluated["tokens"].to_numpy(dtype=float)).to_dict("records") if band else [{}] * len(evaluated)
    for row, side in zip(evaluated.to_dict("records"), sides, strict=True):
        values = {"tokens": int(row["tokens"]), "val_loss": float(row["val_loss"]), **lines}
        values |= {f"band/{name}": value for name, value in side.items()}
        yield Row(at=int(row["tokens"]), values={name: value for name, value in values.items() if math.isfinite(value)})


def _full_run_summary(promotion: Promotion | None, evaluated: pd.DataFrame) -> dict[str, Any]:
    if promotion is None:
        return {"val_loss": float(evaluated["val_loss"].iloc[-1])} if len(evaluated) else {}
    summary: dict[str, Any] = {"val_loss": promotion.loss, "residual": promotion.residual, "inside": promotion.inside}
    summary |= {"relative_error": promotion.relative_error, "forced": promotion.forced, "verdict": promotion.verdict}
    return summary | ({"goodput": promotion.goodput.share} if promotion.goodput else {})


def ladder_runs(config: StudyConfig, ledger: Ledger) -> Iterator[TrackedRun]:
    """The ladder's evaluated runs, each with the scores of its checkpoints up to its end."""
    found, key = [one for one in checkpoints_in_ledger(ledger) if not one.is_full], study_key(ledger.directory)
    for end in (one for one in found if one.anneals):
        before = [one for one in found if one.run == end.run and one.tokens < end.tokens and not one.anneals]
        yield TrackedRun(
            key=input_key(key, "ladder", end.run, end.tokens),
            name=f"{config.name} ladder N={end.n_params} D={end.tokens}",
            kind="ladder",
            group=f"{config.name} {key}",
            config={"n_params": end.n_params, "n_tokens": end.tokens, "seed": end.seed},
            rows=_score_rows((one.tokens, one.scores) for one in (*before, end)),
            summary={} if end.val_loss is None else {"val_loss": end.val_loss},
            ended="finished",
        )


def _score_rows(checkpoints: Iterable[tuple[int, Iterable[Score]]]) -> dict[str, list[Row]]:
    """Rows of scores, a stream for each measure, because each measure is recorded as soon as it is taken."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    for tokens, scores in checkpoints:
        for score in scores:
            if math.isfinite(score.value):
                row = values.setdefault(f"scores/{score.measure}", {}).setdefault(tokens, {"tokens": tokens})
                row[_metric(score)] = score.value
    return {stream: [Row(at=at, values=rows[at]) for at in sorted(rows)] for stream, rows in values.items()}


def _metric(score: Score) -> str:
    """Name of a score in trackers, of characters that all of them allow; a task needs no measure before it."""
    parts = dict.fromkeys(("score", "" if score.measure == TASKS else score.measure, score.name, score.metric))
    return "/".join(re.sub(r"[^\w.-]+", "_", part, flags=re.ASCII) for part in parts if part)


def whole_study(config: StudyConfig, ledger: Ledger) -> Iterator[TrackedRun]:
    """The study as one run: a row per run in its ledger, a summary, and the files to keep; nothing before its first run."""
    directory, runs = ledger.directory, ledger.runs(without=NESTED)
    forecast = ledger.latest_forecast()
    promotion = forecast and ledger.result(ResultKind.PROMOTION, forecast["plan"])
    if runs.empty and forecast is None:
        return
    name, key = config.name, study_key(directory)
    summary: dict[str, Any] = {f"n_runs/{p}": int(n) for p, n in runs["purpose"].value_counts().items()}
    files = {REPORT: directory / REPORT}
    if verdict := ledger.latest_result(ResultKind.TRANSFER):
        summary["verdict"] = verdict["payload"]["verdict"]
    if forecast:
        plan = forecast["payload"]
        summary |= {f"forecast/{side}": forecast[side] for side in _SIDES}
        summary |= {f"plan/{name}": plan[name] for name in ("n_params", "n_tokens", "compute_flops")}
        files["plan.toml"] = path_of(directory, forecast["plan"])
        bundle = directory / BUNDLES / forecast["plan"]
        files |= {kept: bundle / kept for kept in (MANIFEST, _CARD)}
    if promotion:
        summary["val_loss"] = promotion["loss"]
    yield TrackedRun(
        key=input_key(key, "study"),
        name=name,
        kind="study",
        group=f"{name} {key}",
        config=config.to_dict(),
        rows={"runs": list(_run_rows(runs, directory / TRACKING / "numbers.jsonl"))},
        summary=summary,
        files={kept: path for kept, path in files.items() if path.is_file()},
    )


def _run_rows(runs: pd.DataFrame, numbered: Path) -> Iterator[Row]:
    """Rows of runs by number; the numbers are recorded, so that they never change."""
    names = [f"{purpose} {key}" for purpose, key in zip(runs["purpose"], runs["key"], strict=True)]
    known = _numbers(numbered)
    if new := [{"run": name} for name in names if name not in known]:
        numbered.parent.mkdir(parents=True, exist_ok=True)
        json_lines.append(numbered, *new)
        known = _numbers(numbered)  # another process may have added numbers, too
    columns = ("n_params", "n_tokens", "compute_flops", "learning_rate", "loss")
    for name, run in sorted(zip(names, runs.to_dict("records"), strict=True), key=lambda pair: known[pair[0]]):
        values = {f"runs/{column}": float(run[column]) for column in columns if math.isfinite(run[column])}
        yield Row(at=known[name], values={"number": known[name], **values})


def _numbers(numbered: Path) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for number, record in enumerate(json_lines.read(numbered)):
        numbers.setdefault(record["run"], number)
    return numbers
