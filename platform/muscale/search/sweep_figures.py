"""Figures of a sweep, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly.

As in the `figures` of `scaling`, a column `series` says what a row is. `scaling` draws finalists and importance.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from muscale.search.across_scales import N_TOKENS, RATE, box_of, config_at, coordinates
from muscale.search.rung_optima import RungOptima
from muscale.search.sweep_tables import config_of
from muscale.settings.sweep import changeable
from scaling.drawing import COLOURS, GREY, loss_title
from scaling.optima.optimum import MAX_EXCESS
from search_spaces import Ordinal, Space, is_log

SPENT = "compute of the search so far, 6·N·D (FLOPs)"
ACCENT = COLOURS[2]
WINNER = "#d1495b"
_CURVE = 49  # points of a fitted curve
_TICKS = 5


def survivors_data(rungs: pd.DataFrame, winner: int) -> pd.DataFrame:
    """A row per trial and rung that it reached alive: trial, n_tokens, loss; series winner, to the last rung, stopped."""
    table = rungs.dropna(subset="loss")
    top = set(table.loc[table["rung"] == rungs["rung"].max(), "trial"])
    series = np.select([table["trial"] == winner, table["trial"].isin(top)], ["winner", "to the last rung"], "stopped")
    return (
        table[["trial", "n_tokens", "loss"]].assign(series=series).sort_values(["trial", "n_tokens"], ignore_index=True)
    )


def draw_survivors(data: pd.DataFrame, loss_unit: str) -> go.Figure:
    """A line per trial; those that were stopped in grey."""
    figure = go.Figure()
    looks = {"stopped": (GREY, 1), "to the last rung": (ACCENT, 1.5), "winner": (WINNER, 3)}
    for name, (colour, width) in looks.items():
        part = _broken(data[data["series"] == name], "trial")
        if len(part):
            figure.add_scatter(
                x=part["n_tokens"],
                y=part["loss"],
                text=[f"trial {trial:g}" for trial in part["trial"]],
                mode="lines+markers",
                name=name,
                line={"color": colour, "width": width},
                marker={"size": 5},
            )
    rungs = sorted(data["n_tokens"].unique().tolist())
    texts = [f"{n:,}" for n in rungs]
    figure.update_xaxes(title="training tokens of the rung", type="log", tickvals=rungs, ticktext=texts)
    figure.update_yaxes(title=f"loss at the rung ({loss_unit})")
    return figure


def history_data(rungs: pd.DataFrame) -> pd.DataFrame:
    """A row per result at a rung, in order: n_tokens (of the rung), spent_flops, spent_seconds, loss, best (so far, there)."""
    table = rungs[["n_tokens", "trial", "spent_flops", "spent_seconds", "loss"]]
    return table.assign(best=table.groupby("n_tokens")["loss"].transform(lambda loss: loss.cummin().ffill()))


def draw_history(data: pd.DataFrame, loss_unit: str) -> go.Figure:
    """The best so far as steps, a colour for each rung; dots are the results."""
    figure = go.Figure()
    for i, (n_tokens, part) in enumerate(data.groupby("n_tokens")):
        colour, name = COLOURS[i % len(COLOURS)], f"{n_tokens:,} tokens"
        common = {"x": part["spent_flops"], "legendgroup": name}
        dots = {"color": colour, "size": 4, "opacity": 0.5}
        figure.add_scatter(y=part["loss"], mode="markers", marker=dots, showlegend=False, text=part["trial"], **common)
        steps = {"color": colour, "shape": "hv"}
        figure.add_scatter(y=part["best"], mode="lines", line=steps, name=f"best at {name}", **common)
    figure.update_xaxes(title=SPENT, exponentformat="power")
    figure.update_yaxes(title=f"loss at the rung ({loss_unit})")
    return figure


def parallel_data(rungs: pd.DataFrame, trials: pd.DataFrame, space: Space) -> pd.DataFrame:
    """A row per trial with a finite loss: trial, the place of each hyperparameter on its own scale, loss at the last rung.

    Places are log2 where it was searched so, the number of a choice, the rank of an ordinal, the first of a mixture's.
    """
    last = rungs.drop_duplicates("trial", keep="last")
    expected = trials.set_index("trial")["expected_loss"]
    rows = []
    for row in last.to_dict("records"):
        places = coordinates(space, config_of(row, space))
        for name, values in box_of(space).choices.items():
            places[name] = values.index(places[name])
        rows.append({"trial": row["trial"], **places, "loss": expected[row["trial"]]})
    return pd.DataFrame(rows).dropna(subset="loss").reset_index(drop=True)


def draw_parallel(data: pd.DataFrame, space: Space) -> go.Figure:
    """A line per trial, coloured by its loss, the last axis."""
    dimensions = [
        {"label": name, "values": data[name], **_axis(space, name)} for name in data if name not in ("trial", "loss")
    ]
    dimensions.append({"label": "loss", "values": data["loss"]})  # a longer label is cut off at the edge
    # A few losses far up the wall would leave one colour for all the others.
    low, high = data["loss"].min(), data["loss"].quantile(0.8)
    line = {"color": data["loss"], "colorscale": "Viridis", "cmin": low, "cmax": high}
    below_labels = {"y": [0, 0.86]}
    return go.Figure(go.Parcoords(dimensions=dimensions, line=line, domain=below_labels))


def response_data(annealed: pd.DataFrame, fitted: RungOptima, space: Space, name: str) -> pd.DataFrame:
    """Annealed loss against a numeric hyperparameter: n_tokens, value, loss.

    Series run; curve, the fitted surface along this hyperparameter with the others at their optimum; and optimum, with low
    and high, the ends of its interval.

    Raises:
        ValueError: If it is not a searched number.
    """
    if name not in fitted.box.bounds:
        raise ValueError(f"name must be a searched number, {', '.join(fitted.box.bounds)}, got {name!r}")
    runs = annealed.dropna(subset=["loss", name])
    parts = [pd.DataFrame({N_TOKENS: runs[N_TOKENS], "value": runs[name], "loss": runs["loss"], "series": "run"})]
    optima = fitted.table[fitted.table["hyperparameter"] == name].set_index(N_TOKENS)
    for n_tokens in optima.index:  # where it is active
        optimum = fitted.at(n_tokens)
        floor = runs.loc[runs[N_TOKENS] == n_tokens, "loss"].min()
        places = np.append(np.linspace(*fitted.box.bounds[name], _CURVE), optimum.point[name])
        points = [optimum.point | {name: place} for place in places]
        excess, _ = fitted.surface.predict(pd.DataFrame(points).assign(**{N_TOKENS: n_tokens}))
        values = [config_at(space, point)[name] for point in points]
        # The surface is of clipped excess; near the clip it tells no loss.
        losses = floor * np.exp(
            -MAX_EXCESS * np.log1p(-np.where(excess < 0.9 * MAX_EXCESS, excess, np.nan) / MAX_EXCESS)
        )
        row = optima.loc[n_tokens]
        point = {"value": values[-1], "loss": losses[-1], "low": row["low"], "high": row["high"], "series": "optimum"}
        curve = pd.DataFrame({"value": values[:-1], "loss": losses[:-1], "series": "curve"}).dropna()
        parts += [part.assign(**{N_TOKENS: n_tokens}) for part in (curve, pd.DataFrame([point]))]
    return pd.concat(parts, ignore_index=True)


def draw_response(data: pd.DataFrame, name: str, space: Space, loss_unit: str) -> go.Figure:
    """A colour for each length: dots are runs, lines the fitted surface, stars its optimum with the interval."""
    figure = go.Figure()
    for i, (n_tokens, part) in enumerate(data.groupby(N_TOKENS)):
        colour, group = COLOURS[i % len(COLOURS)], f"{n_tokens:,} tokens"
        runs, curve, best = (part[part["series"] == series] for series in ("run", "curve", "optimum"))
        common = {"legendgroup": group}
        marker = {"color": colour, "size": 6}
        figure.add_scatter(x=runs["value"], y=runs["loss"], mode="markers", name=group, marker=marker, **common)
        line = {"color": colour, "width": 1.5}
        figure.add_scatter(x=curve["value"], y=curve["loss"], mode="lines", line=line, showlegend=False, **common)
        if len(best):
            reach = {"array": best["high"] - best["value"], "arrayminus": best["value"] - best["low"]}
            figure.add_scatter(
                x=best["value"],
                y=best["loss"],
                error_x=reach,
                mode="markers",
                marker={"symbol": "star", "size": 13, "color": colour},
                showlegend=False,
                **common,
            )
    logarithmic = name in space and is_log(space[name])
    figure.update_xaxes(title=f"{name.replace('_', ' ')} at the base shape", type="log" if logarithmic else None)
    figure.update_yaxes(title=f"annealed {loss_title(loss_unit)}")
    return figure


def coloured_by(space: Space) -> str:
    """The hyperparameter that distinguishes members of a population: the rate, or else the first that changes on the way."""
    return RATE if RATE in space else changeable(space)[0]


def lineage_data(rungs: pd.DataFrame, winner: int, name: str) -> pd.DataFrame:
    """A population's generations: trial, n_tokens, loss, value (of `name`; log10 of a rate), from_trial, from_tokens, series.

    A row per member and generation that ended alive; from_… is the state that it went on from, missing at the first. Series
    copy where that was another member's, else own; on_path: whether the winner's last state descends from it. `name` is what
    `coloured_by` gives.
    """
    alive = rungs.dropna(subset="loss")
    tokens = dict(zip(alive["rung"], alive["n_tokens"], strict=True))
    began = alive["rung"] > 0
    parent = {(row["trial"], row["rung"]): row["parent"] for row in alive.to_dict("records")}
    path, at = set(), (winner, max((rung for trial, rung in parent if trial == winner), default=0))
    while at in parent:
        path.add(at)
        at = (parent[at], at[1] - 1)
    value = alive[name].astype(float)
    return pd.DataFrame(
        {
            "trial": alive["trial"],
            "n_tokens": alive["n_tokens"],
            "loss": alive["loss"],
            "value": np.log10(value) if name == RATE else value,
            "from_trial": alive["parent"].where(began),
            "from_tokens": [tokens.get(rung - 1, math.nan) for rung in alive["rung"]],
            "series": np.where(began & (alive["parent"] != alive["trial"]), "copy", "own"),
            "on_path": [key in path for key in zip(alive["trial"], alive["rung"], strict=True)],
        }
    ).reset_index(drop=True)


def draw_lineage(data: pd.DataFrame, name: str) -> go.Figure:
    """Members over generations; edges lead from the state that was gone on from, dotted where it was another's.

    `name` is what `coloured_by` gives.
    """
    title = "log10 of the rate" if name == RATE else name.replace("_", " ")
    figure = go.Figure()
    edges = data.dropna(subset="from_trial")
    looks = {
        "continues": (edges[(edges["series"] == "own") & ~edges["on_path"]], {"color": GREY, "width": 1}),
        "copies": (
            edges[(edges["series"] == "copy") & ~edges["on_path"]],
            {"color": "#808488", "width": 1, "dash": "dot"},
        ),
        "the winner's path": (edges[edges["on_path"]], {"color": WINNER, "width": 4}),
    }
    for name, (part, line) in looks.items():
        if len(part):
            x = _interleaved(part["from_tokens"], part["n_tokens"])
            y = _interleaved(part["from_trial"], part["trial"])
            figure.add_scatter(x=x, y=y, mode="lines", name=name, line=line, hoverinfo="skip")
    marker = {"color": data["value"], "colorscale": "Viridis", "size": 10, "colorbar": {"title": title}}
    hovers = [f"trial {row['trial']}, loss {row['loss']:.4f}" for row in data.to_dict("records")]
    figure.add_scatter(
        x=data["n_tokens"], y=data["trial"], mode="markers", marker=marker, text=hovers, showlegend=False
    )
    figure.update_xaxes(title="training tokens")
    figure.update_yaxes(title="member of the population", dtick=max(1, math.ceil(data["trial"].nunique() / 16)))
    return figure


def _broken(data: pd.DataFrame, by: str) -> pd.DataFrame:
    """The rows with an empty one after each group, so that one trace draws a line for each."""
    parts = [pd.concat([part, part.tail(1).assign(loss=np.nan)]) for _, part in data.groupby(by)]
    return pd.concat(parts, ignore_index=True) if parts else data


def _interleaved(starts: pd.Series[Any], ends: pd.Series[Any]) -> list[float | None]:
    """Starts and ends of separate edges as one line with gaps."""
    pairs = zip(starts, ends, strict=True)
    return [place for start, end in pairs for place in (float(start), float(end), None)]


def _axis(space: Space, name: str) -> dict[str, Any]:
    """Range and ticks of a parallel axis, in the hyperparameter's own values."""
    box = box_of(space)
    if name in box.choices:
        values = box.choices[name]
        return {"tickvals": list(range(len(values))), "ticktext": [str(value) for value in values]}
    low, high = box.bounds[name]
    if name not in space:
        return {"range": [low, high]}  # a place of a mixture
    distribution = space[name]
    if isinstance(distribution, Ordinal):
        texts = [str(value) for value in distribution.values]
        return {"range": [low, high], "tickvals": list(range(len(texts))), "ticktext": texts}
    places = np.linspace(low, high, _TICKS)
    shown = 2**places if is_log(distribution) else places
    return {"range": [low, high], "tickvals": places.tolist(), "ticktext": [f"{value:.3g}" for value in shown]}
