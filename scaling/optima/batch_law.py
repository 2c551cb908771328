"""Law of the best batch in the number of training tokens, with the learning rate tuned for each batch.

For optima of groups g (sizes, say) at token budgets D:   log2 B = offset_g + exponent · log2(D / D_ref).
At one D, the loss at the best rate of each batch is a parabola in log2 B, whose minimum is the best batch at this D. The best batch
has the lowest loss at equal tokens; it is not the largest batch that is still efficient.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.checks import losses, names, numbers, require_columns, seeds
from scaling.drawing import Figure
from scaling.optima.optimum import Optimum
from scaling.optima.optimum_figures import draw_tokens_law, tokens_law_data
from scaling.optima.tokens_law import TokensLaw, optima_table, optimum_or_none
from scaling.serialization import TableLayout

PRIOR = (0.48, 0.15)
"""Prior mean and standard deviation of the exponent. The mean is that of .383 (Power Lines, arXiv 2505.13738) and .571
(Step Law, 2503.04715, B = .58 D^.571 tokens), which both find no dependence on N. The deviation is assumed; both exponents lie
within one deviation."""
MAX_EXCESS = 0.01
"""Largest log loss above the best batch's with which a batch enters the parabola: about two octaves either side at the curvature
measured on Step Law's grids, .002 to .009 per octave², a tenth of the rate's curvature."""
BATCH_SCATTER = 0.2
"""Octaves by which the best batch of one cell scatters about the law in addition to its error; added to every optimum's error
(measured on Step Law's 17 cells: .18 with an offset for each size, .21 without)."""

RATE_EXPONENT = (0.5, 0.2)
"""Prior mean and standard deviation of r in best rate ∝ batch^r at equal tokens: the square root that 2205.10287 derives for Adam,
measured as .51 at eight times the batch (tests/benchmarks/batch_transfer.py). The deviation covers most of the slopes on Step Law's
17 cells, .11 to .63, on average .30."""
CURVATURE = 0.0055
"""Second derivative of log loss in log2 of the batch, with tuned rate: median of Step Law's 17 cells (.0026 to .0092)."""
RATE_SCATTER = 0.25
"""Octaves by which the best rate of one batch scatters about the line of its group and budget (measured on Step Law's cells: .24)."""
TOO_FEW = "fewer than three finite rates"
PUBLISHED_RANGE = (4e9, 1e11)
"""Range of tokens in the cells of Step Law's public table, on which `published_batch` was found to hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLaw(TokensLaw):
    """Best batch ∝ D^exponent; `optima` holds `log2_batch`, batches in tokens.

    Attributes:
        cells: one row per group, budget and batch: group, n_tokens, batch_tokens, loss at the best rate, log2_rate,
            status of that optimum, used (True if the optimum lies inside the tested rates).
    """

    NAME: ClassVar[str] = "batch"
    SIGN: ClassVar[int] = 1
    SCATTER: ClassVar[float] = BATCH_SCATTER

    cells: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)

    def batch_tokens(self, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """The best batch in tokens at a budget of `n_tokens`, of its shape; constant outside `supported_range`."""
        return self.best(n_tokens)

    @property
    def rate_exponent(self) -> tuple[float, float]:
        """Exponent r of best rate ∝ batch^r at equal tokens, from the used cells and `RATE_EXPONENT` as prior, and its standard error.

        Each group and budget has a separate level; the best rate of a batch scatters by `RATE_SCATTER` about its line.
        """
        used = self.cells[self.cells["used"]]
        cells = used.assign(x=np.log2(used["batch_tokens"]), y=used["log2_rate"])
        off = cells[["x", "y"]] - cells.groupby(["group", "n_tokens"])[["x", "y"]].transform("mean")
        mean, spread = RATE_EXPONENT
        weight = float((off["x"] ** 2).sum()) / RATE_SCATTER**2
        data = float((off["x"] * off["y"]).sum()) / RATE_SCATTER**2
        precision = weight + spread**-2
        return (data + mean * spread**-2) / precision, precision**-0.5

    def plot(self) -> Figure:
        """Best batches against tokens, with the law and its 90 % interval."""
        return draw_tokens_law(tokens_law_data(self, "batch_tokens"), "batch_tokens", "best batch (tokens)")


def fit_batch_law(rows: pd.DataFrame, *, prior: tuple[float, float] | None = PRIOR) -> BatchLaw:
    """Fit the best rate of each (group, budget, batch), the best batch of each (group, budget), and the law.

    A batch whose best rate lies outside the tested rates is listed in `cells` and not used.

    Args:
        rows: one row per finished run: `n_tokens`, `batch_tokens`, `rate`, `loss` (nats per token; NaN if diverged);
            optional `group` (each has an offset), and `seed`.
        prior: mean and standard deviation of the exponent, or None.

    Raises:
        ValueError: a column is missing or breaks its rule, or a run of one seed is listed twice.
        ScalingError: no group has optima inside the tested batches at two budgets, or the noise is unknown.
    """
    require_columns(rows, ("n_tokens", "batch_tokens", "rate", "loss"))
    table = pd.DataFrame({name: numbers(rows, name) for name in ("n_tokens", "batch_tokens", "rate")})
    table["loss"] = losses(rows)
    by = ["group"] if "group" in rows else []
    table["group"] = names(rows, "group") if by else "all"
    table["seed"] = seeds(rows, *by, "n_tokens", "batch_tokens", "rate")
    cells = _cells(table)
    fitted: dict[tuple[str, float], Optimum | None] = {}
    for (group, n_tokens), part in cells.groupby(["group", "n_tokens"]):
        usable = part[part["used"]]
        best = optimum_or_none(usable["batch_tokens"], usable["loss"], max_excess=MAX_EXCESS)
        fitted[group, float(n_tokens)] = best
    contradicted = "is the rate tuned for each batch?"
    return BatchLaw.fitted(optima_table(fitted, "batch"), prior, contradicted, cells=cells)


def _cells(table: pd.DataFrame) -> pd.DataFrame:
    """Loss at the best rate of every group, budget and batch."""
    records = []
    for key, part in table.groupby(["group", "n_tokens", "batch_tokens"]):
        best = optimum_or_none(part["rate"], part["loss"], seeds=part["seed"].tolist())
        found = [best.loss, best.log2_rate, best.status, best.inside] if best else [math.nan, math.nan, TOO_FEW, False]
        records.append([*key, *found])
    columns = ["group", "n_tokens", "batch_tokens", "loss", "log2_rate", "status", "used"]
    return pd.DataFrame(records, columns=columns)


def published_batch(n_tokens: float) -> float | None:
    """Best batch in tokens by Step Law, B = .58 · D^.571 (2503.04715, abstract); None outside `PUBLISHED_RANGE`."""
    low, high = PUBLISHED_RANGE
    return 0.58 * n_tokens**0.571 if low <= n_tokens <= high else None
