"""Figures of optima and their laws, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly.

Every table has a column `series` for the kind of row, so that other tools can draw it too.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from scaling.drawing import BAND, COLOURS, LOSS, Figure, add, add_band, blank, stacked
from scaling.optima.optimum import Optimum
from scaling.optima.tokens_law import TokensLaw


def transfer_data(
    rows: pd.DataFrame, optima: Mapping[float, Optimum], along: str = "width", over: str = "rate"
) -> pd.DataFrame:
    """Series run (mean over seeds), parabola, optimum: columns of the size and of log2 of the value, by their names, and loss.

    `low` and `high` are the range of a run's loss over seeds, and an optimum's log2 ± its standard error.

    Args:
        rows: columns of the size and of the value, and loss (NaN: diverged).
        along: column of the size.
        over: column of the value.
    """
    x = f"log2_{over}"
    mean = rows.dropna(subset="loss").groupby([along, over])["loss"].agg(["mean", "min", "max"]).reset_index()
    runs = mean.rename(columns={"mean": "loss", "min": "low", "max": "high"}).assign(
        **{x: np.log2(mean[over]), "series": "run"}
    )
    parts = [runs.drop(columns=over)]
    for size, optimum in optima.items():
        octaves = np.linspace(*optimum.used, 33)
        parabola = optimum.loss * (1 + optimum.regret(2**octaves))
        parts.append(pd.DataFrame({along: size, x: octaves, "loss": parabola, "series": "parabola"}))
        ends = (optimum.log2_rate - optimum.stderr, optimum.log2_rate + optimum.stderr)
        point = {along: size, x: optimum.log2_rate, "loss": optimum.loss, "low": ends[0], "high": ends[1]}
        parts.append(pd.DataFrame([point | {"series": "optimum"}]))
    return pd.concat(parts, ignore_index=True)


def draw_transfer(data: pd.DataFrame, *, along: str = "width", over: str = "rate") -> Figure:
    """Draw loss against log2 of the value, one colour per size; stars mark the optima."""
    figure, x = blank(), f"log2_{over}"
    for i, (size, part) in enumerate(data.groupby(along)):
        colour, group = COLOURS[i % len(COLOURS)], f"{along} {size:g}"
        runs, parabola, optimum = (part[part["series"] == name] for name in ("run", "parabola", "optimum"))
        common = {"legendgroup": group, "marker": {"color": colour}}
        dotted, solid = {"color": colour, "dash": "dot"}, {"color": colour}
        add(figure, runs, x, "loss", "y", mode="markers+lines", name=group, line=dotted, **common)
        add(figure, parabola, x, "loss", mode="lines", showlegend=False, line=solid, **common)
        star = {"symbol": "star", "size": 13, "color": colour}
        add(figure, optimum, x, "loss", "x", mode="markers", showlegend=False, **common | {"marker": star})
    figure.update_xaxes(title=f"log2 of {'the learning rate' if over == 'rate' else over} at the base shape")
    figure.update_yaxes(title=LOSS, type="log")
    return figure


def draw_verdict(panels: Sequence[Figure]) -> Figure:
    """Stack the figures of `draw_transfer`; equal sizes share a colour and a legend entry."""
    figure = stacked(max(1, len(panels)))
    shown: set[str] = set()
    for row, panel in enumerate(panels, start=1):
        for trace in panel.data:
            trace.update(showlegend=trace.showlegend is not False and trace.legendgroup not in shown)
        shown |= {trace.legendgroup for trace in panel.data}
        figure.add_traces(panel.data, rows=row, cols=1)
        figure.update_xaxes(title=panel.layout.xaxis.title, row=row, col=1)
    figure.update_yaxes(type="log", title=LOSS)
    return figure


def draw_drifts(table: pd.DataFrame, bound: float) -> Figure:
    """Draw the drifts of `Verdict.table` with their intervals, and the band of ±`bound` octaves that a pass needs."""
    data = table.assign(label=table["over"] + " along " + table["along"])
    figure = blank()
    figure.add_vrect(x0=-bound, x1=bound, fillcolor=BAND, line_width=0)
    add(figure, data, "drift_octaves", "label", "x", mode="markers", text=data["verdict"], showlegend=False)
    figure.update_xaxes(title="drift of the optimum (octaves),<br>from the smallest size to the largest")
    return figure


def tokens_law_data(law: TokensLaw, name: str, level: float = 0.9) -> pd.DataFrame:
    """Series optimum (one per group and budget) and law: group, n_tokens, `name`, low, high (± stderr; the law's interval)."""
    used = law.optima[law.optima["used"]]
    best = used[f"log2_{law.NAME}"]
    ends = {end: 2 ** (best + sign * used["stderr"]) for end, sign in (("low", -1), ("high", 1))}
    optima = used[["group", "n_tokens"]].assign(series="optimum", **{name: 2**best, **ends})
    tokens = np.geomspace(law.n_tokens_range[0], law.supported_range[1], 64)
    low, high = np.array([law.interval(n, level) for n in tokens]).T
    line = pd.DataFrame({"n_tokens": tokens, name: law.best(tokens), "low": low, "high": high})
    return pd.concat([optima, line.assign(series="law")], ignore_index=True)


def draw_tokens_law(data: pd.DataFrame, name: str, title: str) -> Figure:
    """Draw the best value, in the column `name`, against training tokens, both logarithmic."""
    law, figure = data[data["series"] == "law"], blank()
    add_band(figure, law["n_tokens"], law["low"], law["high"])
    add(figure, law, "n_tokens", name, mode="lines", name="law", line={"color": COLOURS[2]})
    for i, (group, part) in enumerate(data[data["series"] == "optimum"].groupby("group")):
        marker = {"color": COLOURS[i % len(COLOURS)], "size": 9}
        add(figure, part, "n_tokens", name, "y", mode="markers", name=str(group), marker=marker)
    figure.update_xaxes(title="training tokens D", type="log")
    figure.update_yaxes(title=title, type="log")
    return figure
