"""Law of the best learning rate in the number of training tokens, at a fixed batch and schedule.

For optima of groups g (widths, say) at token budgets D:   log2 rate = offset_g − exponent · log2(D / D_ref).
The optimum falls with D and muP does not correct for it (arXiv 2409.19913), so a rate tuned on short runs is too high.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.checks import losses, names, numbers, require_columns, seeds
from scaling.drawing import Figure
from scaling.optima.optimum_figures import draw_tokens_law, tokens_law_data
from scaling.optima.tokens_law import TokensLaw, optima_table, optimum_or_none

PRIOR = (0.1, 0.2)
"""Prior mean and standard deviation of the exponent, at a fixed batch and a weight decay whose timescale is a fixed share
of the run. Measured here: .08 ± .19 over ten small studies from 256 steps on (WSD; with fewer steps the best rate falls by half an
octave or more for each doubling, as a short run has to move fast). With the decay fixed, so that its timescale shrinks
relative to the run, about .3 was found (arXiv 2409.19913). If the batch grows with D, the exponent differs, even in sign
(Step Law, 2503.04715): then pass `prior=None`."""
OPTIMUM_SCATTER = 0.15
"""Octaves by which a fitted optimum moves from seed to seed (measured: .1–.2), added to every optimum's error: runs
that share a seed share this part, so the residuals of one grid do not show it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HorizonLaw(TokensLaw):
    """Best rate ∝ D^(−exponent); `optima` holds `log2_rate`."""

    NAME: ClassVar[str] = "rate"
    SIGN: ClassVar[int] = -1
    SCATTER: ClassVar[float] = OPTIMUM_SCATTER

    def rate(self, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Best rate at a budget of `n_tokens`, of the same shape; constant outside `supported_range`."""
        return self.best(n_tokens)

    @property
    def measured_on(self) -> tuple[str, ...]:
        """Groups with used optima at two or more budgets; these groups determine the exponent."""
        budgets = self.optima[self.optima["used"]].groupby("group")["n_tokens"].nunique()
        return tuple(map(str, budgets.index[budgets >= 2]))

    def plot(self) -> Figure:
        """Fitted optima against tokens, with the law and its 90 % interval."""
        return draw_tokens_law(tokens_law_data(self, "rate"), "rate", "best learning rate at the base shape")


def fit_horizon_law(
    rows: pd.DataFrame, *, prior: tuple[float, float] | None = PRIOR, optima: pd.DataFrame | None = None
) -> HorizonLaw:
    """Fit the optimum of each (group, budget), and through them one exponent with an offset per group.

    Args:
        rows: one row per finished run: `n_tokens`, `rate`, `loss` (nats per token; NaN if diverged); optional `group`
            or else `width` (each has an offset), and `seed`.
        prior: mean and standard deviation of the exponent, or None.
        optima: optima from other fits, such as a search's at each of its lengths: `group`, `n_tokens`, `log2_rate`,
            `stderr` (octaves, without the scatter from seed to seed, which is added), each fitted to separate runs. Other
            hyperparameters may have had other values there than in the grids, so each such group has an offset, and determines
            the exponent but not the level.

    Raises:
        ValueError: a column is missing or breaks its rule, a run of one seed is listed twice, the prior has no spread, or a group
            of `optima` is also a group of the grids.
        ScalingError: no group has optima inside the tested rates at two budgets, no grid has one, or the noise is unknown.
    """
    require_columns(rows, ("n_tokens", "rate", "loss"))
    table = pd.DataFrame({"n_tokens": numbers(rows, "n_tokens"), "rate": numbers(rows, "rate"), "loss": losses(rows)})
    by = next((column for column in ("group", "width") if column in rows), None)
    table["group"] = names(rows, by) if by else "all"
    table["seed"] = seeds(rows, *([by] if by else []), "n_tokens", "rate")
    fitted = {
        (group, float(n_tokens)): optimum_or_none(part["rate"], part["loss"], seeds=part["seed"].tolist())
        for (group, n_tokens), part in table.groupby(["group", "n_tokens"])
    }
    found, given = optima_table(fitted, "rate"), _given(optima, set(table["group"]))
    both = pd.concat([found, given], ignore_index=True) if len(given) else found
    return HorizonLaw.fitted(both, prior, "is the batch fixed?", aside=set(given["group"]))


def _given(optima: pd.DataFrame | None, grids: set[str]) -> pd.DataFrame:
    """Return optima from other fits as rows like those of `optima_table`; their curvature is not known."""
    columns = ["group", "n_tokens", "log2_rate", "stderr"]
    if optima is None or optima.empty:
        return pd.DataFrame(columns=columns)
    require_columns(optima, tuple(columns))
    given = pd.DataFrame({"group": names(optima, "group"), "n_tokens": numbers(optima, "n_tokens")})
    if both := sorted(grids & set(given["group"])):
        raise ValueError(f"group must name optima that are no grid's of the rows, got {', '.join(both)} in both")
    return given.assign(
        log2_rate=numbers(optima, "log2_rate", minimum=-np.inf),
        stderr=numbers(optima, "stderr"),
        curvature=np.nan,
        status="given",
        used=True,
    )
