"""The fitted law."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scaling.forecast import Forecast, forecast
from scaling.form import PARAMETERS, Array
from scaling.presentation import Result, lines, span
from scaling.surface import LossSurface, compute_flops

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalingFit(Result):
    """A loss surface, the runs that it was fitted to, and how far both can be trusted.

    Attributes:
        surface: the point estimate.
        objective: Σ Huber of log residuals at the estimate.
        delta: the Huber threshold.
        n_params_convention: what N counts; predictions want N counted the same way.
        rows: the fitted rows: n_params, n_tokens, loss, stem; the index is the caller's.
        left_out: rows that were not fitted, with a `reason`.
        draws: bootstrap refits [n_draws, 5], columns E, A, B, alpha, beta.
        warnings: why the fit is doubtful; empty if it is not.
    """

    surface: LossSurface
    objective: float
    delta: float
    n_params_convention: str
    rows: pd.DataFrame = field(repr=False)
    left_out: pd.DataFrame = field(repr=False)
    draws: Array = field(repr=False)
    warnings: tuple[str, ...]

    @property
    def status(self) -> str:
        """`ok`, or `doubtful` for the reasons in `warnings`."""
        return "doubtful" if self.warnings else "ok"

    @property
    def n_rows(self) -> int:
        """Fitted rows."""
        return len(self.rows)

    @property
    def n_stems(self) -> int:
        """Independent training runs among the fitted rows."""
        return int(self.rows["stem"].nunique())

    @property
    def n_params_range(self) -> tuple[float, float]:
        """Smallest and largest N fitted."""
        return float(self.rows["n_params"].min()), float(self.rows["n_params"].max())

    @property
    def n_tokens_range(self) -> tuple[float, float]:
        """Smallest and largest D fitted."""
        return float(self.rows["n_tokens"].min()), float(self.rows["n_tokens"].max())

    @property
    def compute_range(self) -> tuple[float, float]:
        """Smallest and largest C = 6·N·D fitted, FLOPs."""
        flops = compute_flops(self.rows["n_params"], self.rows["n_tokens"])
        return float(flops.min()), float(flops.max())

    @property
    def tokens_per_param_range(self) -> tuple[float, float]:
        """Smallest and largest D/N fitted."""
        ratio = self.rows["n_tokens"] / self.rows["n_params"]
        return float(ratio.min()), float(ratio.max())

    @property
    def residual_std(self) -> float:
        """Standard deviation of the log residuals, five degrees of freedom taken off."""
        residual = self.residuals()["log_residual"]
        return float(np.sqrt((residual**2).sum() / (self.n_rows - len(PARAMETERS))))

    def predict(self, n_params: ArrayLike, n_tokens: ArrayLike) -> Array:
        """Expected loss, nats per token, of the broadcast shape of `n_params` and `n_tokens`."""
        return self.surface.loss(n_params, n_tokens)

    def forecast(self, n_params: float, n_tokens: float, level: float = 0.9) -> Forecast:
        """The loss of one run with an interval that allows for the form's own error (see `scaling.forecast`).

        Raises:
            ValueError: N or D is not finite and positive, or `level` not between 0 and 1.
        """
        return forecast(self, n_params, n_tokens, level)

    def residuals(self) -> pd.DataFrame:
        """The fitted rows with `compute_flops`, `predicted` and `log_residual` = log(loss / predicted)."""
        predicted = self.predict(self.rows["n_params"], self.rows["n_tokens"])
        flops = compute_flops(self.rows["n_params"], self.rows["n_tokens"])
        residual = np.log(self.rows["loss"] / predicted)
        return self.rows.assign(compute_flops=flops, predicted=predicted, log_residual=residual)

    def intervals(self, level: float = 0.9) -> pd.DataFrame:
        """Columns estimate, low, high for the five parameters and the `params_exponent` a of the optimum N ∝ C^a.

        These are percentiles of the bootstrap: they say how the numbers depend on which runs were made, not whether the
        form is right. For a loss use `forecast`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level!r}")
        draws = np.column_stack([self.draws, self.draws[:, 4] / (self.draws[:, 3] + self.draws[:, 4])])
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
        estimate = [*self.surface.to_dict().values(), self.surface.params_exponent]
        return pd.DataFrame({"estimate": estimate, "low": low, "high": high}, index=[*PARAMETERS, "params_exponent"])

    def plot(self) -> "go.Figure":
        """Predicted against actual loss, and the residuals against compute."""
        from scaling.figures import draw_fit, fit_data

        return draw_fit(fit_data(self))

    def plot_frontier(self, target: Forecast | None = None) -> "go.Figure":
        """Loss against compute: the runs, the best loss of each budget with a 90 % band, and the forecast."""
        from scaling.figures import draw_frontier, frontier_data

        return draw_frontier(frontier_data(self, target))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, draws included; `from_dict` restores it exactly (index and stems must be JSON types)."""
        return {
            "surface": self.surface.to_dict(),
            "objective": self.objective,
            "delta": self.delta,
            "n_params_convention": self.n_params_convention,
            "rows": self.rows.to_dict("tight"),
            "left_out": self.left_out.to_dict("tight"),
            "draws": self.draws.tolist(),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ScalingFit":
        """The inverse of `to_dict`."""
        restored = {
            "surface": LossSurface.from_dict(data["surface"]),
            "rows": _table(data["rows"]),
            "left_out": _table(data["left_out"]),
            "draws": np.asarray(data["draws"], np.float64),
            "warnings": tuple(data["warnings"]),
        }
        return cls(**(data | restored))

    def __str__(self) -> str:
        """Parameters with 90 % intervals, the data behind them, and the status."""
        table = self.intervals(0.9).map("{:.5g}".format).to_string()
        about = lines(
            {
                "interval": f"90 % of {len(self.draws)} bootstrap refits over {self.n_stems} runs",
                "rows": f"{self.n_rows} fitted, {len(self.left_out)} left out",
                "N": f"{span(*self.n_params_range)} parameters ({self.n_params_convention})",
                "D": f"{span(*self.n_tokens_range)} tokens, {span(*self.tokens_per_param_range)} per parameter",
                "C": f"{span(*self.compute_range)} FLOPs",
                "residual": f"{self.residual_std:.2%} of the loss",
                "objective": f"{self.objective:.8g}, sum of Huber terms at delta {self.delta:g}",
                "status": "; ".join((self.status, *self.warnings)),
            }
        )
        return f"L(N, D) = E + A/N^alpha + B/D^beta, nats per token\n{table}\n{about}"


def _table(data: dict[str, Any]) -> pd.DataFrame:
    """Rows from JSON, where an empty table has lost its types."""
    table = pd.DataFrame.from_dict(data, orient="tight")
    types = {"n_params": np.float64, "n_tokens": np.float64, "loss": np.float64, "reason": "str"}
    return table.astype({column: kind for column, kind in types.items() if column in table})
