"""The report's sections on scores: forecasts and measured scores, memorisation, rounded weights, and ablation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from muscale.full_runs.checkpoints.evaluated_checkpoints import EvaluatedCheckpoint, scores_of
from muscale.pages.score_figures import draw_over_size, draw_ranked
from muscale.pages.sections import Section, as_table, count, drawn
from muscale.plans.score_forecasts import ScoreForecasts
from proxy_models.evaluation.repeated_windows import MEMORISATION

_ROUNDED, _ABLATION = "quantised_loss", "ablation"
"""Names of the measures, whose modules import torch."""
_of_scores = partial(Section, command="evaluate", group="Scores")
_INSIDE = {True: "inside", False: "outside", None: None}


def score_sections(
    checkpoints: Sequence[EvaluatedCheckpoint], forecasts: ScoreForecasts | None, gallery: str | None
) -> list[Section]:
    """Return the sections that have something to show.

    Args:
        checkpoints: Of all runs.
        forecasts: As registered with the plan.
        gallery: Address of the gallery, if it was written.
    """
    ends = scores_of([one for one in checkpoints if one.anneals])
    sections = [
        _forecasts(forecasts, checkpoints, gallery),
        _memorisation(ends[ends["measure"] == MEMORISATION]),
        _rounded(ends[ends["measure"] == _ROUNDED]),
        _ablation(ends[ends["measure"] == _ABLATION]),
    ]
    return [section for section in sections if section.known or section.link]


def _forecasts(
    forecasts: ScoreForecasts | None, checkpoints: Sequence[EvaluatedCheckpoint], gallery: str | None
) -> Section:
    table = None
    about = "No forecast of a score is registered; `muscale plan` registers those of tasks and of memorised shares."
    if forecasts and forecasts.scores:
        about = f"Forecasts of the full run's scores, registered with the plan, with {forecasts.level:.0%} intervals."
        finished = [one for one in checkpoints if one.run == forecasts.plan and one.anneals]
        table = forecasts.with_measured(scores_of(finished)).table
        table["inside"] = table["inside"].map(_INSIDE)
        table["reasons"] = table["reasons"].map("; ".join)
        table = table.drop(columns="errors").rename(
            columns={"value": "forecast", "standard_error": "error of measured", "reasons": "doubts"}
        )
    return _of_scores(
        title="Scores",
        about=about,
        table=as_table(table),
        link=(gallery, "Samples and scores of every checkpoint") if gallery else None,
    )


def _memorisation(rows: pd.DataFrame) -> Section:
    shares = rows[rows["metric"] == "memorised"]
    table = shares.pivot_table(index=["n_params", "tokens"], columns="name", values="value", sort=False)
    return _of_scores(
        title="Memorisation",
        about="Share of windows of training text that each run continues verbatim, by the times that it has read them. Held-out text "
        "is the control.",
        drawings=drawn(
            draw_over_size(_longest(shares), title="share memorised") if len(shares) else None,
            "share of memorised windows over size, by repetitions",
        ),
        table=as_table(table.rename_axis(columns=None).reset_index()),
    )


def _rounded(rows: pd.DataFrame) -> Section:
    at = ["n_params", "tokens", "name"]
    table = rows.pivot_table(index=at, columns="metric", values="value", sort=False).rename_axis(columns=None)
    increases = rows[rows["metric"] == "loss_increase"]
    if len(table):
        table["memory_bytes"] = table["memory_bytes"].astype(int)
    table["error of increase"] = increases.groupby(at)["standard_error"].mean()  # as the other columns, over seeds
    return _of_scores(
        title="Loss after rounding the weights",
        about="Held-out loss with weights rounded to nearest in so many bits, next to the memory of the weights; without calibration.",
        drawings=drawn(
            draw_over_size(_longest(increases), title="increase of the loss") if len(increases) else None,
            "increase of the held-out loss over size, by bits",
        ),
        table=as_table(table.reset_index().rename(columns={"name": "weights"})),
    )


def _ablation(rows: pd.DataFrame) -> Section:
    increases = rows[rows["metric"] == "loss_increase"]
    if len(increases):
        *_, (run, n_params, tokens) = increases[["run", "n_params", "tokens"]].itertuples(index=False)
        increases = increases[(increases["run"] == run) & (increases["tokens"] == tokens)]
    ranked = increases.sort_values("value", ascending=False, kind="stable")
    of = f" of the run with N = {count(n_params)} and {count(tokens)} tokens" if len(ranked) else ""
    return _of_scores(
        title="Ablation",
        about=f"Increase of the held-out loss{of} without each part of the model. Parts that replace each other look unimportant.",
        drawings=drawn(
            draw_ranked(ranked, title="increase of the loss") if len(ranked) else None,
            "increase of the held-out loss without each part, ranked",
        ),
        table=as_table(ranked[["name", "value", "standard_error"]].rename(columns={"value": "increase of the loss"})),
    )


def _longest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the longest run of each size, by size."""
    longest = rows.sort_values("tokens", kind="stable").drop_duplicates(["n_params", "name"], keep="last")
    return longest.sort_values("n_params", kind="stable")
