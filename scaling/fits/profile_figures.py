"""Figure of a profile likelihood, as two functions: `profile_data` computes a DataFrame, `draw_profile` draws it with plotly."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from scaling.drawing import BAND, COLOURS, EDGE, STAR, Figure, add, add_note, blank, parameter_title
from scaling.forms.law import NATS
from scaling.presentation import span

_BETWEEN = 8  # points drawn from one fit of the profile to the next


def profile_data(
    table: pd.DataFrame,
    *,
    name: str,
    estimate: float,
    interval: tuple[float, float],
    threshold: float,
    level: float,
    at: Mapping[str, float],
) -> pd.DataFrame:
    """Series fit, curve, estimate, end, threshold: value, rise, and in all rows name, level, at, low, high.

    `rise` is 2·(Q(value) − Q(estimate)) over the scale, to be compared with Student's t². The curve interpolates the fits
    as the search for the interval's bounds does: its signed root is straight between fits over the logarithm of the value.
    An open bound has no row.
    """
    table = table.sort_values("value")
    fits = np.log(table["value"].to_numpy())
    ends = [end for end in interval if end > 0 and math.isfinite(end)]
    steps = np.arange(_BETWEEN * (len(fits) - 1) + 1) / _BETWEEN
    log_value = np.unique([*np.interp(steps, np.arange(len(fits)), fits), *np.log(ends)])
    curve = np.interp(log_value, fits, table["root"]) ** 2
    shown = [table["value"].min(), table["value"].max()]
    parts = {
        "fit": (table["value"].to_numpy(), table["root"].to_numpy() ** 2),
        "curve": (np.exp(log_value), curve),
        "estimate": (np.array([estimate]), np.zeros(1)),
        "end": (np.array(ends), np.full(len(ends), threshold)),
        "threshold": (np.array(shown), np.full(2, threshold)),
    }
    tables = [pd.DataFrame({"value": x, "rise": y}).assign(series=series) for series, (x, y) in parts.items()]
    where = ", ".join(f"{column} {value:.4g}" for column, value in at.items())
    about = {"name": name, "level": level, "at": where, "low": interval[0], "high": interval[1]}
    return pd.concat(tables, ignore_index=True).assign(**about)


def draw_profile(data: pd.DataFrame, loss_unit: str = NATS) -> Figure:
    """Draw the rise of the objective over the quantity and the threshold, with the interval in a note above."""
    about = data.iloc[0]
    fits, curve, estimate, ends, threshold = (
        data[data["series"] == name] for name in ("fit", "curve", "estimate", "end", "threshold")
    )
    figure = blank()
    left, right = threshold["value"]
    inside = max(left, about["low"]), min(right, about["high"])
    figure.add_vrect(x0=inside[0], x1=inside[1], fillcolor=BAND, line_width=0, layer="below")
    level = f"threshold of {100 * about['level']:g} %"
    dashed = {"color": EDGE, "dash": "dash"}
    add(figure, threshold, "value", "rise", mode="lines", line=dashed, name=level)
    add(figure, curve, "value", "rise", mode="lines", line={"color": COLOURS[2]}, name="profile")
    hover = [
        "<br>".join([f"{about['name']} {value:.5g}", f"rise {rise:.3g}"])
        for value, rise in zip(fits["value"], fits["rise"], strict=True)
    ]
    dots = {"color": COLOURS[2], "size": 6}
    add(figure, fits, "value", "rise", mode="markers", marker=dots, name="fits", text=hover, hoverinfo="text")
    add(figure, estimate, "value", "rise", mode="markers", marker=STAR, name="estimate")
    if len(ends):
        marker = {"symbol": "line-ns-open", "size": 14, "color": COLOURS[2], "line": {"width": 3}}
        add(figure, ends, "value", "rise", mode="markers", marker=marker, name="ends of the interval")
    figure.update_xaxes(title=parameter_title(about["name"], loss_unit))
    top = data["rise"].max()
    figure.update_yaxes(title="rise of the objective, 2·ΔQ / scale", range=[-0.06 * top, 1.05 * top])
    add_note(figure, _interval_note(about, estimate["value"].item()))
    return figure


def _interval_note(about: "pd.Series[float]", estimate: float) -> str:
    """Describe the interval, and name an open bound."""
    low, high = about["low"], about["high"]
    here = f"{about['name']}{' at ' if about['at'] else ''}{about['at']}: {estimate:.4g}, {100 * about['level']:g} %"
    if low > 0 and math.isfinite(high):
        return f"{here} {span(low, high, 4)}"
    if low > 0:
        return f"{here} above {low:.4g}; open above: the runs do not bound it there"
    if math.isfinite(high):
        return f"{here} below {high:.4g}; open below: the runs do not bound it there"
    return f"{here}; open on both sides: the runs do not bound it"
