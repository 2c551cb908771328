"""Scores of the ladder's runs at their checkpoints, as tables for the laws of scores."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from muscale.actors.jobs import Job
from muscale.store.evaluations import POINT, SCORE, evaluation_key, score_table
from muscale.store.ledger import Ledger
from muscale.store.statements import find

COLUMNS = (*POINT, "n_tokens", *SCORE)
"""Columns of `ladder_scores`: those of `score_table`, and for each point the tokens of its run."""


def ladder_scores(jobs: Sequence[Job], ledger: Ledger) -> pd.DataFrame:
    """Return the scores of the ladder's runs that the current settings of [scores] give, one row per point and score.

    Args:
        jobs: The runs with their points, as `ladder.evaluated` returns them.
    """
    wanted = {
        evaluation_key(point.chain.key, measure)
        for job in jobs
        for point in job.evaluated
        for measure in point.measures
    }
    return _with_run_tokens(score_table(ledger, wanted))


def known_ladder_scores(ledger: Ledger) -> pd.DataFrame:
    """Return the same for every run of a ladder in the ledger, with the latest setting of each measure; reads no task."""
    stems = {run["stem"] for run in ledger.read(find, "runs", {"purpose": "ladder"})}
    scores = score_table(ledger)
    latest = scores.groupby("measure")["measure_key"].transform("last") == scores["measure_key"]
    return _with_run_tokens(scores[latest & scores["run"].isin(stems)])


def _with_run_tokens(scores: pd.DataFrame) -> pd.DataFrame:
    """Add the tokens of each point's run; a point that the branches of a stem share belongs to the longest."""
    longest = scores[scores["anneals"].astype(bool)].groupby("run")["tokens"].max()
    n_tokens = scores["tokens"].where(scores["anneals"].astype(bool), scores["run"].map(longest))
    return scores.assign(n_tokens=n_tokens).dropna(subset="n_tokens")[list(COLUMNS)]
