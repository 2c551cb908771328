"""Figure of the cost of other sizes than the best: loss over size at fixed budgets, with the band of sizes that are nearly as good.

As for every figure there are two functions: `sizes_data` computes a DataFrame, `draw_sizes` draws it with plotly.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from scaling.drawing import ALONE, COLOURS, STAR, Figure, add, blank, log_axis, loss_title, params_title
from scaling.forms.law import NATS, Law
from scaling.forms.spending import Spending

_SHOWN = 4.0  # loss above the best at the curve's ends, over that at the band's ends
_N_POINTS = 97
_LABEL = 24  # pixels of height for a budget in the legend


def sizes_data(law: Law, compute_flops: Sequence[float], within: float = 0.005, **columns: float) -> pd.DataFrame:
    """Series size, band, best at each budget: compute_flops, n_params, n_tokens, loss, above (its share above the best's).

    `size` is the curve, up to a loss 4 times as far above the best as at the ends of the band. `band` is the part of the curve with a
    loss at most `within` above the best, with the same ends as in `decide`.

    Args:
        compute_flops: budgets C = 6·N·D.
        within: share of the loss, e.g. .005 for half a percent.

    Raises:
        ValueError: there is no budget, a budget is not finite and positive, or `within` is not above 0.
    """
    if not len(compute_flops):
        raise ValueError("compute_flops must name at least one budget, got none")
    if not (math.isfinite(within) and within > 0):
        raise ValueError(f"within must be finite and above 0, got {within!r}")
    spending = Spending.of(law.form, columns)
    budgets = np.array(compute_flops, np.float64)
    parts = []
    for flops, size in zip(budgets.tolist(), spending.best(law.parameters, budgets).tolist(), strict=True):
        best = float(spending.at(law.parameters, np.array([size]), flops)[0])
        for series, share in (("size", _SHOWN * within), ("band", within), ("best", None)):
            low, high = size, size
            if share is not None:
                low, high = spending.band(law.parameters, size, flops, best * (1 + share))
            n_params = np.geomspace(low, high, 1 if share is None else _N_POINTS)
            n_tokens = spending.tokens(n_params, flops)
            loss = spending.loss(law.parameters, n_params, n_tokens)
            point = {"compute_flops": flops, "n_params": n_params, "n_tokens": n_tokens, "loss": loss}
            parts.append(pd.DataFrame(point | {"above": loss / best - 1, "within": within, "series": series}))
    return pd.concat(parts, ignore_index=True)


def draw_sizes(data: pd.DataFrame, n_params_convention: str, loss_unit: str = NATS) -> Figure:
    """Draw a curve for each budget, with its flat part thick and its best size as a star."""
    figure = blank()
    for i, (flops, part) in enumerate(data.groupby("compute_flops")):
        colour = COLOURS[(i + 2) % len(COLOURS)]
        size, band, best = (part[part["series"] == name] for name in ("size", "band", "best"))
        low, high = band["n_params"].iloc[[0, -1]]
        share = 100 * best["within"].item()
        label = f"{flops:.3g} FLOPs: N {low:.3g} to {high:.3g}<br>within {share:g} % of the best loss"
        thick = {"color": colour, "width": 9, "simplify": False}
        common = {"legendgroup": label, "hoverinfo": "text"}
        for own, line in ((band, thick), (size, {"color": colour, "simplify": False})):
            looks = {"mode": "lines", "line": line, "opacity": 0.4 if own is band else 1, "showlegend": own is size}
            add(figure, own, "n_params", "loss", name=label, text=_hover(own), **looks, **common)
        looks = {"mode": "markers", "marker": STAR | {"color": colour}, "showlegend": False}
        add(figure, best, "n_params", "loss", text=_hover(best), **looks, **common)
    title = f"{params_title(n_params_convention)}<br>tokens D are what the compute leaves"
    figure.update_xaxes(title=title, **log_axis(data["n_params"]))
    figure.update_yaxes(title=loss_title(loss_unit))
    figure.update_layout(height=ALONE + _LABEL * data["compute_flops"].nunique())
    return figure


def _hover(part: pd.DataFrame) -> list[str]:
    columns = (part[name] for name in ("n_params", "n_tokens", "loss", "above"))
    return [
        f"N {n:.3g}, D {d:.3g} ({d / n:.3g} per parameter)<br>loss {loss:.4f}, {100 * above:.2f} % above the best"
        for n, d, loss, above in zip(*columns, strict=True)
    ]
