"""Figures of scores: over the tokens of each run, over size, and ranked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from muscale.pages.sections import count
from muscale.plans.score_forecasts import PlannedScore

FULL_COLOR = "#c8991b"
"""Color of a full run and of its forecast."""
_SIZES = ["#9fc1d6", "#2a6f97"]
_CHANCE = {"dash": "dot", "width": 1, "color": "rgba(128,132,136,0.8)"}
_HEIGHT = 250  # pixels, of a small figure
_TICKS = 5  # most labels on the axis of a small figure
_BAR = 26  # pixels of height for a ranked part


def colors_of(runs: Mapping[str, bool]) -> dict[str, str]:
    """Return a color for each run; the ladder's runs are darker with size.

    Args:
        runs: Whether each run is a full run, the smallest model first.
    """
    ladder = [run for run, is_full in runs.items() if not is_full]
    shades = sample_colorscale(_SIZES, [number / max(1, len(ladder) - 1) for number in range(len(ladder))])
    return dict.fromkeys(runs, FULL_COLOR) | dict(zip(ladder, shades, strict=True))


def draw_over_tokens(
    scores: pd.DataFrame,
    colors: Mapping[str, str],
    *,
    title: str,
    chance: float | None = None,
    forecast: PlannedScore | None = None,
    end: int | None = None,
) -> go.Figure:
    """Draw one score over the training tokens, a line for each run, with standard errors.

    A line connects the checkpoints on the way to the run's last one; diamonds are the ends of runs after cooldown.

    Args:
        scores: Columns run, tokens, anneals, value, standard_error; run as in `colors`.
        chance: Score of a guess.
        forecast: Forecast of the full run's score, drawn at `end` tokens.
    """
    figure = go.Figure()
    for run, rows in scores.sort_values(["tokens", "anneals"]).groupby("run", sort=False):
        on_the_way = rows[~rows["anneals"] | (rows["tokens"] == rows["tokens"].max())]
        for part, mode, symbol in (
            (on_the_way, "lines+markers", "circle"),
            (rows[rows["anneals"]], "markers", "diamond"),
        ):
            figure.add_scatter(
                x=part["tokens"],
                y=part["value"],
                error_y={"array": part["standard_error"], "width": 0, "thickness": 1},
                mode=mode,
                line={"color": colors[str(run)], "width": 1.5},
                marker={"color": colors[str(run)], "size": 5 if mode != "markers" else 8, "symbol": symbol},
                name=str(run),
            )
    if chance is not None:
        figure.add_hline(y=chance, line=_CHANCE)
    if forecast is not None and forecast.value is not None and end is not None:
        sides = {"array": [forecast.high - forecast.value], "arrayminus": [forecast.value - forecast.low]}  # type: ignore[operator]
        marker = {"color": FULL_COLOR, "symbol": "diamond-open", "size": 11}
        figure.add_scatter(x=[end], y=[forecast.value], error_y=sides, mode="markers", marker=marker, name="forecast")
    ticks = _ticks([*scores["tokens"], *([] if end is None else [end])])
    title_of_x = {"text": "training tokens", "standoff": 6}
    figure.update_xaxes(
        title=title_of_x, type="log", tickvals=ticks, ticktext=[count(value) for value in ticks], tickangle=0
    )
    figure.update_yaxes(title=title)
    return figure.update_layout(height=_HEIGHT, showlegend=False, margin={"t": 12, "b": 44})


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round values for a small logarithmic axis: 1, 2, 5 of each decade, or powers of ten if these are too many."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5) if low <= digit * 10.0**decade <= high]
    found = fine if len(fine) <= _TICKS else [value for value in fine if math.log10(value).is_integer()]
    return found[:: math.ceil(len(found) / _TICKS)] if len(found) > 1 else sorted({low, high})


def draw_over_size(scores: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw the scores of the runs' ends over N, a line for each name, with standard errors.

    Args:
        scores: Columns name, n_params, value, standard_error.
    """
    figure = go.Figure()
    for name, rows in scores.groupby("name", sort=False):
        error: dict[str, Any] = {"array": rows["standard_error"], "width": 0, "thickness": 1}
        figure.add_scatter(x=rows["n_params"], y=rows["value"], error_y=error, mode="lines+markers", name=str(name))
    figure.update_xaxes(title="N", type="log", exponentformat="SI")
    figure.update_yaxes(title=title)
    return figure.update_layout(height=340)


def draw_ranked(scores: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw scores as bars with standard errors, the largest at the top.

    Args:
        scores: Columns name, value, standard_error, the largest value first.
    """
    rows = scores.iloc[::-1]
    figure = go.Figure()
    error = {"array": rows["standard_error"], "width": 0, "thickness": 2, "color": FULL_COLOR}
    figure.add_bar(x=rows["value"], y=rows["name"], error_x=error, orientation="h", marker={"color": _SIZES[-1]})
    figure.update_xaxes(title=title)
    return figure.update_layout(height=90 + _BAR * len(rows))
