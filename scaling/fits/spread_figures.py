"""Figures of how sure a fit is, each as two functions: `…_data` computes a DataFrame, `draw_…` draws it with plotly."""

from itertools import combinations
from textwrap import wrap

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.drawing import BAND, COLOURS, STAR, Figure, add, blank, loss_title, parameter_title, stacked
from scaling.fits.ensemble import Ensemble
from scaling.fits.forecast import Forecast
from scaling.forms.law import NATS, Law

COEFFICIENTS = ("A", "B")
"""Parameters left out of the pairs, since their exponents almost determine them."""
LEVEL = 0.9
"""Share of the draws within the ellipse."""
_MOST_NAMES = 4  # most parameters shown in pairs: six panels
_LOG_SPREAD = 2.0  # ratio of largest to smallest draw above which an axis is logarithmic


def parameters_data(law: Law, drawn: Array) -> pd.DataFrame:
    """Series draw, estimate, ellipse of each pair: pair (its number), x_name, y_name, x, y, x_log, y_log, level.

    The pairs are of the first four parameters, without A and B if others remain. The ellipse has the centre and covariance of the
    draws, in logarithms where `x_log` or `y_log` is true, and a size that holds 90 % of the draws, the `level`.

    Args:
        drawn: parameters of the law's refits, [n_draws, n_parameters], in the form's order.
    """
    names = list(law.parameters)
    chosen = [name for name in names if name not in COEFFICIENTS]
    parts = []
    for number, pair in enumerate(combinations((chosen if len(chosen) > 1 else names)[:_MOST_NAMES], 2)):
        draws = drawn[:, [names.index(name) for name in pair]]
        logs = (draws.min(axis=0) > 0) & (draws.max(axis=0) > _LOG_SPREAD * draws.min(axis=0))
        ellipse = _ellipse(np.where(logs, np.log(np.where(logs, draws, 1.0)), draws), LEVEL)
        ellipse = np.where(logs, np.exp(np.where(logs, ellipse, 0.0)), ellipse)
        estimate = np.array([[law[name] for name in pair]])
        for series, points in (("draw", draws), ("estimate", estimate), ("ellipse", ellipse)):
            parts.append(pd.DataFrame({"pair": number, "x": points[:, 0], "y": points[:, 1], "series": series}))
            parts[-1][["x_name", "y_name", "x_log", "y_log", "level"]] = *pair, *logs.tolist(), LEVEL
    return pd.concat(parts, ignore_index=True)


def draw_parameters(data: pd.DataFrame, loss_unit: str = NATS) -> Figure:
    """Draw a panel for each pair: the bootstrap's draws, their ellipse, the estimate."""
    pairs = [part for _, part in data.groupby("pair")]
    n_columns = min(2, len(pairs))
    n_rows = -(-len(pairs) // n_columns)
    filled = np.arange(n_rows * n_columns).reshape(n_rows, n_columns) < len(pairs)
    specs = [[{"type": "xy"} if there else None for there in row] for row in filled]
    figure = stacked(n_rows, cols=n_columns, specs=specs, horizontal_spacing=0.2)
    for i, part in enumerate(pairs):
        place = {"row": i // n_columns + 1, "col": i % n_columns + 1}
        draws, estimate, ellipse = (part[part["series"] == name] for name in ("draw", "estimate", "ellipse"))
        first = part.iloc[0]
        common = {"showlegend": i == 0, **place}
        hover = f"{first['x_name']} %{{x:.4g}}, {first['y_name']} %{{y:.4g}}<extra></extra>"
        dots = {"color": "grey", "size": 3, "opacity": 0.5}
        add(figure, draws, "x", "y", mode="markers", name="refits", marker=dots, hovertemplate=hover, **common)
        filled_by = {"line": {"color": COLOURS[3]}, "fill": "toself", "fillcolor": BAND, "hoverinfo": "skip"}
        name = f"ellipse with {100 * first['level']:g} % of them"
        add(figure, ellipse, "x", "y", mode="lines", name=name, **filled_by, **common)
        add(figure, estimate, "x", "y", mode="markers", name="estimate", marker=STAR, hovertemplate=hover, **common)
        for axis, update in (("x", figure.update_xaxes), ("y", figure.update_yaxes)):
            is_log = first[f"{axis}_log"]
            values = np.log10(part[axis]) if is_log else part[axis]
            # Keep the ellipse off the frame; for exact runs all refits are one point.
            margin = 0.05 * max(values.max() - values.min(), 1e-3 * values.abs().max(), 1e-9)
            ends = [values.min() - margin, values.max() + margin]
            scale = {"type": "log" if is_log else "linear", "range": ends}
            update(title=parameter_title(first[f"{axis}_name"], loss_unit), **scale, **place)
    return figure


def variants_data(fitted: Law, ensemble: Ensemble, target: Forecast) -> pd.DataFrame:
    """Loss of the forecast's run by every fit behind the forecast: name, loss, and for the forecast low, high, level.

    The series are variant (the forecast is their mean in log loss), draw (the first variant under resampled runs), law (the
    fitted law), forecast.
    """
    at = {"n_params": target.n_params, "n_tokens": target.n_tokens, **target.columns}
    rows = [(name, "variant", law.loss(**at)) for name, law in ensemble.variants.items()]
    base = next(iter(ensemble.variants))
    form = ensemble.form
    drawn = form.loss(dict(zip(form.parameters, ensemble.draws.T, strict=True)), form.columns_of(at))
    rows += [(f"{base}, resampled", "draw", loss) for loss in drawn]
    rows.append((f"the fitted law, {fitted.form.name}", "law", fitted.loss(**at)))
    data = pd.DataFrame(rows, columns=["name", "series", "loss"])
    own = {"name": "forecast", "series": "forecast"}
    own |= {name: getattr(target, name) for name in ("loss", "low", "high", "level")}
    return pd.concat([pd.DataFrame([own]), data], ignore_index=True)


def draw_variants(data: pd.DataFrame, loss_unit: str = NATS) -> Figure:
    """Draw a strip for each fit: its loss against the forecast and the forecast's interval."""
    figure, data = blank(), data.assign(lines=data["name"].map(_on_lines))
    target = data[data["series"] == "forecast"]
    low, high = target["low"].item(), target["high"].item()
    figure.add_vrect(x0=low, x1=high, fillcolor=BAND, line_width=0, layer="below")
    figure.add_vline(x=target["loss"].item(), line={"color": "grey", "dash": "dot"}, layer="below")
    looks = {
        "forecast": STAR,
        "variant": {"symbol": "circle", "size": 10, "color": COLOURS[2]},
        "draw": {"symbol": "line-ns-open", "size": 10, "color": COLOURS[3]},
        "law": {"symbol": "x", "size": 9, "color": COLOURS[4]},
    }
    names = {
        "forecast": f"forecast, {100 * target['level'].item():g} % interval",
        "variant": "variants, of which it is the mean",
        "draw": "refits to resampled runs",
        "law": "the fit's own law",
    }
    for series, marker in looks.items():
        part = data[data["series"] == series]
        off = 100 * (part["loss"] / target["loss"].item() - 1)
        text = [
            f"{name}<br>{loss:.4f} ({o:+.2f} %)" for name, loss, o in zip(part["name"], part["loss"], off, strict=True)
        ]
        common = {"mode": "markers", "name": names[series], "text": text, "hoverinfo": "text"}
        add(figure, part, "loss", "lines", "x" if series == "forecast" else "", marker=marker, **common)
    figure.update_xaxes(title=loss_title(loss_unit))
    names_in_order = [*data["lines"].unique()][::-1]
    figure.update_yaxes(automargin=True, categoryorder="array", categoryarray=names_in_order)
    return figure.update_layout(height=200 + 36 * len(names_in_order))  # pixels: two lines for each fit


def _on_lines(name: str) -> str:
    """Break a fit's name into lines, so that the figure has room for more than names on a narrow page."""
    return "<br>".join(wrap(name, 22))


def _ellipse(points: Array, level: float) -> Array:
    """Ellipse around points [n, 2], [97, 2]: shape by their covariance, size such that it holds the share `level` of them."""
    centre, covariance = points.mean(axis=0), np.cov(points.T)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    distance = np.linalg.norm((points - centre) @ np.linalg.pinv(root).T, axis=1)
    turn = np.linspace(0, 2 * np.pi, 97)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    return np.asarray(centre + np.quantile(distance, level) * circle @ root.T)
