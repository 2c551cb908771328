"""Figures of the split of compute into size and tokens, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.drawing import (
    COLOURS,
    COMPUTE,
    EDGE,
    STAR,
    Figure,
    add,
    add_band,
    blank,
    log_axis,
    loss_title,
    params_title,
    stacked,
)
from scaling.fits.ensemble import Ensemble
from scaling.fits.forecast import Forecast
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN, NATS, Form, Law, compute_flops
from scaling.forms.problem import Values
from scaling.forms.spending import Spending
from scaling.quantiles import tails

TOKENS = "training tokens D"
RATIO = "tokens per parameter D/N"
BEYOND = 10.0
"""Factor by which figures extend beyond the largest run's compute."""
_MARGIN = 1.3  # margin factor of the box of N and D
_N_LEVELS, _N_RAYS = 10, 160
_INSET = 3  # points (of 64) from a line's end to its label, which would be cut off at the end
_HALVINGS = 60  # bisections: a bracket of some tens in log units narrows to rounding


def contours_data(runs: pd.DataFrame, law: Law, target: Forecast | None = None, **columns: float) -> pd.DataFrame:
    """Series run, contour, frontier, isoflop, target: n_params, n_tokens, compute_flops, loss.

    The points of a contour share their `loss`, those of an isoflop their `compute_flops`. Contours have rounded losses, about evenly
    spaced along the frontier.

    Args:
        runs: the fitted runs, with these columns.
        target: another run to show; the figure extends to this run, and to 10 times the largest run's compute.
    """
    runs = runs[["n_params", "n_tokens", "compute_flops", "loss"]].assign(series="run")
    low, high = runs["compute_flops"].min(), runs["compute_flops"].max()
    top = max(BEYOND * high, target.compute_flops if target else 0)
    frontier = law.frontier(np.geomspace(low, top, 48), **columns).assign(series="frontier")
    parts = [runs, frontier]
    if target is not None:
        names = ("n_params", "n_tokens", "compute_flops", "loss")
        parts.append(pd.DataFrame([{name: getattr(target, name) for name in names} | {"series": "target"}]))
    shown = pd.concat(parts)
    box = {name: (shown[name].min() / _MARGIN, shown[name].max() * _MARGIN) for name in ("n_params", "n_tokens")}
    for decade in range(math.ceil(math.log10(low)), math.floor(math.log10(top)) + 1):
        n_params = np.geomspace(*box["n_params"], 64)
        parts.append(_points(law, n_params, 10**decade / FLOPS_PER_PARAM_TOKEN / n_params, columns, "isoflop"))
        parts[-1]["compute_flops"] = 10.0**decade  # exact, as isoflops are grouped by this column
    for level in _levels(frontier["loss"].to_numpy()):
        n_params, n_tokens = _contour(law, level, box["n_params"], box["n_tokens"], columns)
        parts.append(_points(law, n_params, n_tokens, columns, "contour").assign(loss=level))
    data = pd.concat(parts, ignore_index=True)
    inside = np.all([data[name].between(*ends) for name, ends in box.items()], axis=0)
    return data[inside].reset_index(drop=True)


def draw_contours(data: pd.DataFrame, n_params_convention: str, loss_unit: str = NATS) -> Figure:
    """Draw lines of equal loss over N and D, the runs, the efficient frontier, and lines of equal compute."""
    from plotly.colors import sample_colorscale

    figure = blank()
    levels = np.sort(data.loc[data["series"] == "contour", "loss"].unique())
    places = max((len(f"{level:g}".partition(".")[2]) for level in levels), default=0)
    shades = sample_colorscale(list(COLOURS[3:]), np.linspace(0, 1, max(2, len(levels))))
    for i, flops in enumerate(data.loc[data["series"] == "isoflop", "compute_flops"].unique()):
        part = data[(data["series"] == "isoflop") & (data["compute_flops"] == flops)]
        line = {"color": "rgba(128, 132, 136, 0.6)", "width": 1, "dash": "dot"}
        _line(figure, part, line, "equal compute (FLOPs)", first=i == 0)
        if len(part) > _INSET:
            _label(figure, part.iloc[_INSET], f"10<sup>{math.log10(flops):.0f}</sup>", "top right")
    for i, level in enumerate(levels):
        part = data[(data["series"] == "contour") & (data["loss"] == level)]
        _line(figure, part, {"color": shades[i], "width": 1.5}, "equal " + loss_title(loss_unit), first=i == 0)
        _label(figure, part.iloc[-1], f"{level:.{places}f}", "top left")
    runs, frontier, target = (data[data["series"] == name] for name in ("run", "frontier", "target"))
    _line(figure, frontier, {"color": COLOURS[2], "width": 4}, "best N and D")
    _markers(figure, runs, "runs", {"color": "grey", "size": 5})
    if len(target):
        _markers(figure, target, "target", STAR)
    titles = (("n_params", "xaxis", params_title(n_params_convention)), ("n_tokens", "yaxis", TOKENS))
    for name, axis, title in titles:
        ends = np.log10([data[name].min(), data[name].max()])
        figure.update_layout({axis: {"title": title, "range": list(ends), **log_axis(data[name])}})
    return figure


def allocation_data(
    law: Law,
    fits: Ensemble | Array,
    compute_range: tuple[float, float],
    level: float = 0.9,
    *,
    widening: float = 1.0,
    **columns: float,
) -> pd.DataFrame:
    """One row for each quantity and budget: quantity (n_params, n_tokens, tokens_per_param), compute_flops, value, low, high.

    The series is `fitted` up to the largest run's compute, and `extrapolated` from there to 10 times as much.

    Args:
        fits: source of the interval: several fits and their draws (`Ensemble.moves`), or refits of the law's parameters.
        widening: factor by which the logarithms of the refits' sizes are moved away from the best size.
        compute_range: least and largest compute of the runs, FLOPs.

    Raises:
        ValueError: the level is not between 0 and 1.
    """
    probabilities, (low, high) = tails(level), compute_range
    flops = np.concatenate([np.geomspace(low, high, 33), np.geomspace(high, BEYOND * high, 9)])
    best = law.frontier(flops, **columns)
    if isinstance(fits, Ensemble):
        moves = fits.moves(lambda values, _: np.log(best_sizes(fits.form, values, flops, columns)))
        drawn = best["n_params"].to_numpy() * np.exp(moves)
    else:
        size = best["n_params"].to_numpy()
        drawn = size * (best_sizes(law.form, law.form.stacked(fits), flops, columns) / size) ** widening
    product = flops / FLOPS_PER_PARAM_TOKEN
    of_draws = {"n_params": drawn, "n_tokens": product / drawn, "tokens_per_param": product / drawn**2}
    best["tokens_per_param"] = best["n_tokens"] / best["n_params"]
    series = np.where(np.arange(len(flops)) < 33, "fitted", "extrapolated")
    parts = []
    for quantity, values in of_draws.items():
        ends = np.quantile(values, probabilities, axis=0)
        column = {"compute_flops": flops, "value": best[quantity], "low": ends[0], "high": ends[1], "series": series}
        parts.append(pd.DataFrame(column).assign(quantity=quantity, level=level))
    return pd.concat(parts, ignore_index=True)


def draw_allocation(data: pd.DataFrame, n_params_convention: str) -> Figure:
    """Draw a panel for each quantity: the best value against compute with its interval, dashed beyond the runs."""
    titles = {"n_params": params_title(n_params_convention, 24), "n_tokens": TOKENS, "tokens_per_param": RATIO}
    quantities = data["quantity"].unique()
    figure = stacked(len(quantities), shared_xaxes=True)
    for row, quantity in enumerate(quantities, start=1):
        part, place = data[data["quantity"] == quantity], {"row": row, "col": 1, "showlegend": row == 1}
        name = f"{100 * part['level'].iloc[0]:g} % interval"
        add_band(figure, part["compute_flops"], part["low"], part["high"], name=name, **place)
        for series, dash in (("fitted", "solid"), ("extrapolated", "dash")):
            own = part[part["series"] == series]
            hover = [f"{low:.3g} to {high:.3g}" for low, high in zip(own["low"], own["high"], strict=True)]
            name, line = (
                f"best, {'within the runs' if series == 'fitted' else 'beyond them'}",
                {"color": COLOURS[2], "dash": dash},
            )
            add(figure, own, "compute_flops", "value", mode="lines", name=name, line=line, text=hover, **place)
        figure.update_yaxes(title=titles[quantity], **log_axis(part["value"]), row=row, col=1)
    figure.update_xaxes(**log_axis(data["compute_flops"]))
    figure.update_xaxes(title=COMPUTE, row=len(quantities), col=1)
    return figure


def best_sizes(form: Form, draws: Values, flops: Array, columns: Mapping[str, float]) -> NDArray[np.float64]:
    """N of least loss for J parameter vectors at M budgets, [J, M].

    Args:
        draws: parameters of the form, [J, 1] each.
        flops: budgets, [M].
    """
    if powers := form.powers(draws):
        a, p, b, q = powers
        product = flops / FLOPS_PER_PARAM_TOKEN
        return np.asarray(np.exp((np.log(p / q) + np.log(a) - np.log(b) + q * np.log(product)) / (p + q)))
    spending, n_draws = Spending.of(form, columns), max(map(len, draws.values()))
    return np.stack([spending.best(draws, np.full(n_draws, budget)) for budget in flops], axis=1)


def _points(law: Law, n_params: Array, n_tokens: Array, columns: dict[str, float], series: str) -> pd.DataFrame:
    at = {"n_params": n_params, "n_tokens": n_tokens, "compute_flops": compute_flops(n_params, n_tokens)}
    return pd.DataFrame(at | {"loss": law.loss(n_params, n_tokens, **columns), "series": series})


def _levels(losses: Array) -> Array:
    """Select losses along the frontier, rounded to a tenth of their distance or finer."""
    span = losses.max() - losses.min()
    places = max(0, math.ceil(-math.log10(max(span, 1e-9) / _N_LEVELS)))
    at = np.linspace(0, len(losses) - 1, _N_LEVELS + 2)[1:-1].round().astype(np.int64)
    return np.unique(losses[at].round(places))


def _contour(
    law: Law, level: float, n_params: Sequence[float], n_tokens: Sequence[float], columns: dict[str, float]
) -> tuple[Array, Array]:
    """N and D of one loss, by rising N, within the box or a little outside.

    On a line of equal D/N the loss falls with compute, so the line meets the level at most once.
    """
    ends = math.log(n_tokens[1] / n_params[0]) / 2, math.log(n_tokens[0] / n_params[1]) / 2
    half_ratio = np.linspace(*ends, _N_RAYS)
    low = np.full(_N_RAYS, math.log(n_params[0] * n_tokens[0]) / 2)
    high = np.full(_N_RAYS, math.log(n_params[1] * n_tokens[1]) / 2)

    def loss(middle: Array) -> Array:
        return np.asarray(law.loss(np.exp(middle - half_ratio), np.exp(middle + half_ratio), **columns))

    met = (loss(low) >= level) & (loss(high) <= level)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = loss(middle) > level
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.exp(low - half_ratio)[met], np.exp(low + half_ratio)[met]


def _hover(part: pd.DataFrame) -> list[str]:
    columns = (part[name] for name in ("n_params", "n_tokens", "compute_flops", "loss"))
    return [
        f"N {n:.3g}, D {d:.3g} ({d / n:.3g} per parameter)<br>{c:.3g} FLOPs, loss {loss:.4f}"
        for n, d, c, loss in zip(*columns, strict=True)
    ]


def _line(figure: Figure, part: pd.DataFrame, line: dict[str, Any], name: str, *, first: bool = True) -> None:
    common = {"mode": "lines", "line": line, "name": name, "legendgroup": name, "showlegend": first}
    add(figure, part, "n_params", "n_tokens", text=_hover(part), hoverinfo="text", **common)


def _markers(figure: Figure, part: pd.DataFrame, name: str, marker: dict[str, Any]) -> None:
    common = {"mode": "markers", "marker": marker, "name": name}
    add(figure, part, "n_params", "n_tokens", text=_hover(part), hoverinfo="text", **common)


def _label(figure: Figure, point: "pd.Series[Any]", text: str, place: str) -> None:
    common = {"mode": "text", "textposition": place, "showlegend": False, "hoverinfo": "skip"}
    font = {"size": 10, "color": EDGE}
    figure.add_scatter(x=[point["n_params"]], y=[point["n_tokens"]], text=[text], textfont=font, **common)
