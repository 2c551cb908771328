"""Worth of a component: the loss without it, or with another in its place, run by run beside the loss with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd

from scaling.checks import losses, require_columns
from scaling.errors import ScalingError
from scaling.presentation import lines
from scaling.serialization import JsonResult, OrInfinite, TableLayout

if TYPE_CHECKING:
    import plotly.graph_objects as go

AS_IT_IS = ""
"""Component of the runs that all others are held against."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ablation(JsonResult):
    """Changes of the loss, each against the runs of the same seeds as they are.

    Attributes:
        table: by component and value: n_params, seeds, diverged, loss (mean, nats per token), change (mean log ratio of the losses:
            above 0 the component is worth its place), low, high.
        loss: mean of the runs as they are.
        noise: standard deviation of one pair's log ratio, pooled over all variants; infinite with one seed.
        dof: its degrees of freedom.
        level: of the intervals, one by one: of ten about one misses by chance.
    """

    loss: float
    noise: OrInfinite
    dof: int
    level: float
    table: Annotated[pd.DataFrame, TableLayout("records", nulls={"low": -math.inf, "high": math.inf})] = field(
        repr=False
    )

    def plot(self) -> go.Figure:
        """The changes with their intervals, the dearest component first."""
        from scaling.comparisons.figures import ablation_data, draw_ablation

        return draw_ablation(ablation_data(self.table), self.level)

    def __str__(self) -> str:
        """The table, and what the intervals rest on."""
        shown = self.table.assign(
            **{name: [_percent(value) for value in self.table[name]] for name in ("change", "low", "high")}
        )
        known = math.isfinite(self.noise)
        about = lines(
            {
                "as it is": f"{self.loss:.4f} nats per token",
                "intervals": f"{self.level:.0%}, by runs of equal seeds; a pair's noise is {self.noise:.2%} of the loss, "
                f"pooled over {self.dof} degrees of freedom"
                if known
                else "none: the noise is unknown from one seed",
            }
        )
        return f"{shown.to_string(index=False, formatters={'loss': '{:.4f}'.format})}\n{about}"


def compare_ablations(rows: pd.DataFrame, *, level: float = 0.9) -> Ablation:
    """Hold variants against the runs as they are, seed by seed.

    Pairs of one seed see the same data in the same order, so that much of the noise between seeds goes out of their ratio. What
    is left is taken to be alike for all variants and pooled, as two or three seeds alone do not determine it; the intervals are
    Student's.

    Args:
        rows: one per run: `component` ("" for the runs as they are), `value`, `n_params`, `seed`, `loss` (NaN where the run diverged).
        level: of the intervals.

    Raises:
        ValueError: a column is missing or breaks its rule, or a variant has two runs of one seed.
        ScalingError: there is no run as it is, or nothing beside it.
    """
    require_columns(rows, ("component", "value", "n_params", "seed", "loss"))
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    rows = rows.assign(loss=losses(rows), value=rows["value"].astype(str))
    plain = rows[(rows["component"] == AS_IT_IS) & rows["loss"].notna()].set_index("seed")["loss"]
    if plain.empty:
        raise ScalingError("need a finished run of the model as it is to compare with, got none")
    if plain.index.has_duplicates:
        raise ValueError(
            f"seed must be there once among the runs as they are, got {plain.index[plain.index.duplicated()][0]} twice"
        )
    records: list[dict[str, Any]] = []
    squares, dof = 0.0, 0
    ratios: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for (component, value), part in rows[rows["component"] != AS_IT_IS].groupby(["component", "value"], sort=False):
        if (twice := part["seed"].duplicated()).any():
            raise ValueError(
                f"seed must be there once among the runs of {component} {value}, got {part.loc[twice, 'seed'].iloc[0]} twice"
            )
        paired = part[part["loss"].notna() & part["seed"].isin(plain.index)]
        ratio = np.log(paired["loss"].to_numpy() / plain.loc[paired["seed"]].to_numpy())
        ratios.append(ratio)
        if len(ratio) > 1:
            squares, dof = squares + float(((ratio - ratio.mean()) ** 2).sum()), dof + len(ratio) - 1
        records.append(
            {
                "component": component,
                "value": value,
                "n_params": int(part["n_params"].iloc[0]),
                "seeds": len(ratio),
                "diverged": int(part["loss"].isna().sum()),
                "loss": float(paired["loss"].mean()) if len(ratio) else math.nan,
                "change": float(ratio.mean()) if len(ratio) else math.nan,
            }
        )
    if not records:
        raise ScalingError("need a variant beside the runs as they are, got none")
    noise = math.sqrt(squares / dof) if dof else math.inf
    reach = [_reach(noise, dof, level) / math.sqrt(len(ratio)) if len(ratio) else math.inf for ratio in ratios]
    table = pd.DataFrame(records)
    table["low"] = (table["change"] - reach).fillna(-math.inf)
    table["high"] = (table["change"] + reach).fillna(math.inf)
    table = table.sort_values("change", ascending=False, na_position="first", ignore_index=True)
    return Ablation(table=table, loss=float(plain.mean()), noise=noise, dof=dof, level=level)


def _reach(noise: float, dof: int, level: float) -> float:
    """Half of the interval of one pair."""
    if not dof:
        return math.inf
    from scipy.special import stdtrit

    return float(stdtrit(dof, (1 + level) / 2)) * noise


def _percent(value: float) -> str:
    return f"{np.expm1(value):+.2%}" if math.isfinite(value) else "–"
