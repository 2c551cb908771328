"""Figures of runs held against each other, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from scaling.drawing import COLOURS, GREY, LOSS, Figure, add, blank


def finalists_data(trials: pd.DataFrame, winner: Any, near_tie: Sequence[Any]) -> pd.DataFrame:
    """One row per trial, best first: trial, loss, low, high (NaN if not known), p_best; series winner, near-tie, other."""
    table = trials.reset_index()[["trial", "loss", "low", "high", "p_best"]]
    series = np.select([table["trial"] == winner, table["trial"].isin(near_tie)], ["winner", "near-tie"], "other")
    return table.replace([-np.inf, np.inf], np.nan).assign(series=series)


def draw_finalists(data: pd.DataFrame) -> Figure:
    """Each trial's loss with its interval; the text is the probability that it is the best."""
    figure = blank()
    for name, colour in (("winner", COLOURS[0]), ("near-tie", COLOURS[3]), ("other", GREY)):
        part = data[data["series"] == name]
        if not len(part):
            continue
        text = ["" if np.isnan(p) else f"best: {p:.2f}" for p in part["p_best"]]
        looks = {"mode": "markers+text", "textposition": "middle right", "marker": {"color": colour, "size": 10}}
        add(figure, part.astype({"trial": str}), "trial", "loss", "y", name=name, text=text, **looks)
    order = data["trial"].astype(str).tolist()
    ends = [-0.4, len(order) - 0.25]  # else the last one's text is cut off
    figure.update_xaxes(title="trial", type="category", categoryorder="array", categoryarray=order, range=ends)
    figure.update_yaxes(title=LOSS)
    return figure
