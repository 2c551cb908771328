"""What another size than the best costs: loss over size at fixed budgets, with the band of sizes that are nearly as good.

Two functions, as for every figure: `sizes_data` computes a DataFrame, `draw_sizes` draws it with plotly.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scaling.figures import COLOURS, LOSS
from scaling.law import FLOPS_PER_PARAM_TOKEN, Allocation, Law

if TYPE_CHECKING:
    import plotly.graph_objects as go

_FARTHEST = math.log(1e6)
"""From the best log N, within which an end of the band is sought."""
_SHOWN = 4.0  # times as much worse as the band's ends are the ends of the curve
_N_POINTS = 97


def sizes_data(law: Law, compute_flops: Sequence[float], within: float = 0.005, **columns: float) -> pd.DataFrame:
    """Series size, band, best at each budget: compute_flops, n_params, n_tokens, loss, above (its share above the best's).

    `size` is the curve, to where the loss is 4 times as far above the best as in the band; `band` the part of it with a
    loss at most `within` above the best. Sizes more than a million times from the best are not looked at.

    Args:
        law: of the loss.
        compute_flops: budgets C = 6·N·D.
        within: of the loss, e.g. .005 for half a percent.
        columns: values of the law's further columns.

    Raises:
        ValueError: there is no budget, one is not finite and positive, or `within` is not above 0.
    """
    if not len(compute_flops):
        raise ValueError("compute_flops must name at least one budget, got none")
    if not (math.isfinite(within) and within > 0):
        raise ValueError(f"within must be finite and above 0, got {within!r}")
    parts = []
    for flops in compute_flops:
        best = law.allocate(float(flops), **columns)
        for series, share in (("size", _SHOWN * within), ("band", within), ("best", None)):
            low, high = (0.0, 0.0) if share is None else _ends(law, best, share, columns)
            n_params = best.n_params * np.exp(np.linspace(low, high, 1 if share is None else _N_POINTS))
            n_tokens = flops / FLOPS_PER_PARAM_TOKEN / n_params
            loss = law.loss(n_params, n_tokens, **columns)
            point = {"compute_flops": float(flops), "n_params": n_params, "n_tokens": n_tokens, "loss": loss}
            parts.append(pd.DataFrame(point | {"above": loss / best.loss - 1, "within": within, "series": series}))
    return pd.concat(parts, ignore_index=True)


def draw_sizes(data: pd.DataFrame) -> "go.Figure":
    """A curve for each budget, its flat part thick, its best size a star."""
    import plotly.graph_objects as go

    figure = go.Figure()
    shades = (*COLOURS[2:], *COLOURS[:2])  # the darkest last: on a dark page they are hardly seen
    for i, (flops, part) in enumerate(data.groupby("compute_flops")):
        colour = shades[i % len(shades)]
        star = {"symbol": "star", "size": 13, "color": colour, "line": {"color": "#808488", "width": 1}}
        size, band, best = (part[part["series"] == name] for name in ("size", "band", "best"))
        low, high = band["n_params"].iloc[[0, -1]]
        share = 100 * best["within"].item()
        label = f"{flops:.3g} FLOPs: N {low:.3g} to {high:.3g}<br>within {share:g} % of the best loss"
        thick = {"color": colour, "width": 9, "simplify": False}
        common = {"legendgroup": label, "hoverinfo": "text"}
        for own, line in ((band, thick), (size, {"color": colour, "simplify": False})):
            figure.add_scatter(
                x=own["n_params"],
                y=own["loss"],
                mode="lines",
                line=line,
                opacity=0.4 if own is band else 1,
                name=label,
                showlegend=own is size,
                text=_hover(own),
                **common,
            )
        figure.add_scatter(
            x=best["n_params"],
            y=best["loss"],
            mode="markers",
            marker=star,
            showlegend=False,
            text=_hover(best),
            **common,
        )
    figure.update_xaxes(title="parameters N (tokens D are what the compute leaves)", type="log", exponentformat="power")
    figure.update_yaxes(title=LOSS)
    return figure


def _ends(law: Law, best: Allocation, share: float, columns: dict[str, float]) -> tuple[float, float]:
    """How far below and above the best log N the loss is a share above the least; no farther than is looked."""
    from scipy.optimize import brentq

    product = best.n_params * best.n_tokens
    limit = math.log1p(share) + math.log(best.loss)

    def above(log_factor: float) -> float:
        n_params = best.n_params * math.exp(log_factor)
        return math.log(float(law.loss(n_params, product / n_params, **columns))) - limit

    low, high = (brentq(above, 0.0, end, xtol=1e-12) if above(end) > 0 else end for end in (-_FARTHEST, _FARTHEST))
    return low, high


def _hover(part: pd.DataFrame) -> list[str]:
    columns = (part[name] for name in ("n_params", "n_tokens", "loss", "above"))
    return [
        f"N {n:.3g}, D {d:.3g} ({d / n:.3g} per parameter)<br>loss {loss:.4f}, {100 * above:.2f} % above the best"
        for n, d, loss, above in zip(*columns, strict=True)
    ]
