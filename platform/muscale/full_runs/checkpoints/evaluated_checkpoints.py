"""The evaluated checkpoints of a study: of ladder and full runs from the ledger, and of full runs from their folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from muscale import json_lines
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.layout import EVALUATIONS, FULL_RUNS
from muscale.store.evaluations import SCORE
from muscale.store.ledger import NESTED, Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.evaluation.measure import Sample, Score

LOSS = ("loss", "", "loss")
"""Measure, name and metric of the held-out loss, as `HeldOutLoss` gives them; its module imports torch."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedCheckpoint:
    """Scores and samples of the weights at one point of a training.

    Attributes:
        run: Key of the plan or continuation of a full run; the stem of a ladder run.
        anneals: Whether the weights end a run.
        val_loss: Held-out loss; None if only other measures were taken.
        samples: One sample per prompt.
    """

    run: str
    is_full: bool
    n_params: int
    tokens: int
    seed: int
    anneals: bool
    val_loss: float | None
    scores: tuple[Score, ...]
    samples: tuple[Sample, ...]


def evaluated_checkpoints(ledger: Ledger) -> list[EvaluatedCheckpoint]:
    """Return all evaluated checkpoints: by run, the smallest model first and full runs last, then by tokens."""
    folders = sorted(path.parent for path in (ledger.directory / FULL_RUNS).glob(f"*/{EVALUATIONS}"))
    found = [*checkpoints_in_ledger(ledger), *(one for folder in folders for one in checkpoints_in_folder(folder))]
    return sorted(found, key=lambda one: (one.is_full, one.n_params, one.seed, one.run, one.tokens, one.anneals))


def checkpoints_in_ledger(ledger: Ledger) -> Iterator[EvaluatedCheckpoint]:
    """Generate the checkpoints of the ledger, with the scores that the latest settings of each measure give."""
    rows = [row["payload"] for row in ledger.results(ResultKind.EVALUATION)]
    latest = {row["measure"]: row["measure_key"] for row in rows}
    runs = ledger.runs(without=NESTED)
    full = runs[runs["purpose"] == "full"]
    plans = dict(zip(full["stem"], full["label"].str.split().str[-1], strict=True))
    points: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        points.setdefault(row["weights"], []).append(row)
    for taken in points.values():
        point = taken[-1]
        scores = tuple(
            Score(**score) for row in taken if row["measure_key"] == latest[row["measure"]] for score in row["scores"]
        )
        samples = {sample["prompt"]: Sample(**sample) for row in taken for sample in row["samples"]}
        yield EvaluatedCheckpoint(
            run=plans.get(point["run"], point["run"]),
            is_full=point["run"] in plans,
            **{name: point[name] for name in ("n_params", "tokens", "seed", "anneals")},
            val_loss=next((score.value for score in scores if (score.measure, score.name, score.metric) == LOSS), None),
            scores=scores,
            samples=tuple(samples.values()),
        )


def checkpoints_in_folder(folder: Path) -> Iterator[EvaluatedCheckpoint]:
    """Generate the checkpoints that were evaluated next to the training of a full run in this folder."""
    if not (rows := json_lines.read(folder / EVALUATIONS)):
        return
    from muscale.full_runs.checkpoints.run_description import RunDescription  # imports torch

    run = RunDescription.read(folder)
    for row in rows:
        found = CheckpointEvaluation.from_dict(row)
        yield EvaluatedCheckpoint(
            run=folder.name,
            is_full=True,
            n_params=run.numerics.model.n_params,
            tokens=found.tokens,
            seed=run.numerics.seed,
            anneals=found.tokens == run.n_tokens,
            val_loss=found.val_loss,
            scores=found.scores,
            samples=found.samples,
        )


def scores_of(checkpoints: Sequence[EvaluatedCheckpoint]) -> pd.DataFrame:
    """Return the scores as a table: run, is_full, n_params, tokens, anneals, and the columns of a score."""
    about = ("run", "is_full", "n_params", "tokens", "anneals")
    rows = [{name: getattr(one, name) for name in about} | asdict(score) for one in checkpoints for score in one.scores]
    return pd.DataFrame(rows, columns=[*about, *SCORE])
