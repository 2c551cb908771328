"""The fitted law."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from scaling.arrays import Array
from scaling.drawing import Figure
from scaling.errors import ScalingError
from scaling.fits.allocation_figures import allocation_data, contours_data, draw_allocation, draw_contours
from scaling.fits.caveats import caveats, high_floor
from scaling.fits.ensemble import MAD, Ensemble, fit_ensemble
from scaling.fits.forecast import Forecast, forecast
from scaling.fits.identification import Unidentified, unidentified
from scaling.fits.law_figures import draw_fit, draw_frontier, fit_data, frontier_data
from scaling.fits.profile import Profile, profile
from scaling.fits.runs import UNIT_ASSUMED
from scaling.fits.size_figures import draw_sizes, sizes_data
from scaling.fits.spread_figures import draw_parameters, draw_variants, parameters_data, variants_data
from scaling.fits.support import unsupported
from scaling.forms import OneSize, forecast_form
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import Law, compute_flops, params_exponent
from scaling.presentation import counted, lines, span
from scaling.quantiles import tails
from scaling.serialization import JsonResult, TableLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalingFit(JsonResult):
    """A loss law, the runs that the law was fitted to, and how far both can be trusted.

    Attributes:
        objective: Σ Huber of log residuals at the estimate; at one size with the prior's part.
        rows: the fitted rows: n_params, n_tokens, the form's other columns, loss, stem; the index is the caller's.
        left_out: rows that were not fitted, with a `reason`.
        refits: parameters of the bootstrap refits, [n_draws, n_parameters], in the form's order.
        widening: factor by which the logarithm of what follows from a refit is moved away from the estimate, so that percentiles also
            cover with few runs (`scaling.minimizers.bootstrap.widening`).
        draws: the refits' parameters moved so, each by itself. Parameters compensate each other, which such draws do not, so a
            quantity of several parameters is computed from `refits`, and moved then.
        warnings: why the fitted form and its parameters are doubtful; a forecast states its reasons separately.
        assumptions: assumptions about the rows that no column states.
    """

    law: Law
    objective: float
    delta: float
    rows: Annotated[pd.DataFrame, TableLayout("tight")] = field(repr=False)
    left_out: Annotated[pd.DataFrame, TableLayout("tight")] = field(repr=False)
    refits: Array = field(repr=False)
    widening: float
    draws: Array = field(repr=False)
    seed: int
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def n_params_convention(self) -> str:
        """Convention by which N is counted; predictions need N counted the same way."""
        return self.law.n_params_convention

    @property
    def loss_unit(self) -> str:
        return self.law.loss_unit

    @property
    def status(self) -> str:
        """`ok`; `look` if there are `caveats`; `doubtful` for the reasons in `warnings`."""
        return "doubtful" if self.warnings else "look" if self.caveats else "ok"

    @cached_property
    def caveats(self) -> tuple[str, ...]:
        """Findings that do not rule out a forecast: rows far off the law; best D/N outside the runs' range or not identified."""
        try:
            law = self.best_law
        except ScalingError:  # too few runs for a decision
            law = None
        of_rows = caveats(law, self.residuals(), self.unidentified(self.compute_range[1]))
        return (*of_rows, *high_floor(self.law)) if UNIT_ASSUMED in self.assumptions else of_rows

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    @property
    def n_stems(self) -> int:
        """Independent training runs among the fitted rows."""
        return int(self.rows["stem"].nunique())

    @property
    def one_size(self) -> float | None:
        """N of all runs if the law is one of tokens only, so that it says nothing of other sizes; None for a law of N and D."""
        return float(self.rows["n_params"].iloc[0]) if self.law.form.tokens_only else None

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
        """Standard deviation of the log residuals, with one degree of freedom less for each parameter."""
        residual = self.residuals()["log_residual"]
        # Under the prior of one size, rows may be as few as parameters.
        return float(np.sqrt((residual**2).sum() / max(self.n_rows - len(self.law.parameters), 1)))

    def unidentified(self, compute_flops: float) -> Unidentified | None:
        """Reason why the runs do not identify the best D/N of a budget, with two runs that would; None if they identify it.

        None as well for a law of one size, which has no best D/N.
        """
        if self.one_size is not None:
            return None
        residual = np.abs(self.residuals()["log_residual"].to_numpy())
        noise = MAD * float(np.median(residual)) * (self.n_rows / (self.n_rows - len(self.law.parameters))) ** 0.5
        return unidentified(self.rows, noise, compute_flops)

    @cached_property
    def ensemble(self) -> Ensemble:
        """Fits behind a forecast: of the same rows, and the same whatever form the law has.

        Raises:
            ScalingError: forecasts were not tested for the columns of the law.
        """
        if (form := forecast_form(self.law.form)) is None:
            raise ScalingError(
                f"forecasts are tested for laws of n_params and n_tokens, of their sparsity, and of one size; "
                f"{self.law.form.name} depends on {', '.join(self.law.form.columns)}: see predict() for the law's own value"
            )
        return fit_ensemble(
            self.rows, form=form, seed=self.seed, n_params_convention=self.n_params_convention, loss_unit=self.loss_unit
        )

    @property
    def best_law(self) -> Law:
        """Law for decisions and frontiers: the mean of the forecast's fits, or the law itself if it has no forecast."""
        return self.ensemble.law if self.has_forecast else self.law

    @property
    def has_forecast(self) -> bool:
        """True if forecasts were tested for laws with these columns: N and D, also with the sparsity, or D at one size."""
        return forecast_form(self.law.form) is not None

    def predict(self, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> Array:
        """Loss by the law alone, in `loss_unit`, of the broadcast shape of the columns."""
        return self.law.loss(n_params, n_tokens, **columns)

    def forecast(self, n_params: float, n_tokens: float, level: float = 0.9, **columns: float) -> Forecast:
        """Forecast the loss of one run by several fits, with an interval that allows for the form's error (`scaling.fits.forecast`).

        Raises:
            ValueError: a column is missing or unknown to the law, or not finite and positive, or `level` is not between 0 and 1.
            ScalingError: forecasts were not tested for the columns of the law, or it is one of another size.
        """
        if self.one_size not in (None, n_params):
            raise ScalingError(f"all runs have {self.one_size:.4g} parameters, so they say nothing of {n_params:.4g}")
        reasons = self.unsupported_reasons(n_params, n_tokens, **columns)
        return forecast(self.law, self.ensemble, n_params, n_tokens, level=level, reasons=reasons, columns=columns)

    def unsupported_reasons(self, n_params: float, n_tokens: float, **columns: float) -> tuple[str, ...]:
        """Reasons why a forecast at (N, D) is unsupported (`scaling.fits.support`); they do not depend on the fitted form."""
        ensemble = self.ensemble if self.has_forecast else None
        return tuple(unsupported(self.rows, ensemble, n_params, n_tokens, **columns).values())

    def residuals(self) -> pd.DataFrame:
        """The fitted rows with `compute_flops`, `predicted` and `log_residual` = log(loss / predicted)."""
        predicted = self.predict(**{name: self.rows[name] for name in self.law.form.run_columns})
        flops = compute_flops(self.rows["n_params"], self.rows["n_tokens"])
        residual = np.log(self.rows["loss"] / predicted)
        return self.rows.assign(compute_flops=flops, predicted=predicted, log_residual=residual)

    def intervals(self, level: float = 0.9) -> pd.DataFrame:
        """Columns estimate, low, high for the parameters and, if the law has one, the `params_exponent` a of the optimum N ∝ C^a.

        The bounds are percentiles of the widened bootstrap: on planted ladders of 20 runs nominal 90 % covered 87 to 97 %
        (tests/benchmarks/RESULTS.md). They assume that the form is right: for a loss use `forecast`.
        """
        estimate, draws = dict(self.law.parameters), dict(zip(self.law.parameters, self.draws.T, strict=True))
        if (exponent := self.law.params_exponent) is not None:
            estimate["params_exponent"] = exponent
            refits = dict(zip(self.law.parameters, self.refits.T, strict=True))
            draws["params_exponent"] = exponent * (params_exponent(self.law.form, refits) / exponent) ** self.widening
        low, high = np.quantile(np.stack([*draws.values()]), tails(level), axis=1)
        return pd.DataFrame({"estimate": [*estimate.values()], "low": low, "high": high}, index=[*estimate])

    def profile(self, name: str, *, level: float = 0.9, at: Mapping[str, float] | None = None) -> "Profile":
        """Interval of a parameter, `params_exponent`, `tokens_exponent` or the law's `loss` at a run, by profile likelihood.

        A profile's interval is open if the runs do not bound the quantity; percentiles (`intervals`) do not show this
        (see `scaling.fits.profile`, also for the errors raised). A law of one size has no profile: it is fitted under a prior.
        """
        if isinstance(self.law.form, OneSize):
            raise ScalingError("a profile is of the runs alone, the law of one size also of its prior: see intervals()")
        return profile(self.law, self.rows, name, delta=self.delta, seed=self.seed, level=level, at=at)

    def plot(self) -> Figure:
        """Predicted against actual loss, and the residuals against compute."""
        return draw_fit(fit_data(self.residuals()), self.n_params_convention, self.loss_unit)

    def plot_frontier(self, target: Forecast | None = None, **columns: float) -> Figure:
        """Loss against compute: the runs, the best loss of each budget (at one size, its loss) with a 90 % band, the forecast."""
        return draw_frontier(
            frontier_data(self.residuals(), self.ensemble, target, **self._shown(columns, target)), self.loss_unit
        )

    def plot_contours(self, target: Forecast | None = None, **columns: float) -> Figure:
        """Lines of equal loss over N and D by `best_law`, with the runs, the efficient frontier and lines of equal compute.

        Raises:
            ScalingError: the law is one of tokens only.
        """
        self._require_sizes()
        data = contours_data(self.residuals(), self.best_law, target, **self._shown(columns, target))
        return draw_contours(data, self.n_params_convention, self.loss_unit)

    def plot_allocation(self, level: float = 0.9, **columns: float) -> Figure:
        """The best N, D and D/N against compute with intervals, by `best_law`; raises ScalingError for a law of tokens only."""
        self._require_sizes()
        fits = self.ensemble if self.has_forecast else self.refits
        shown = self._shown(columns)
        data = allocation_data(self.best_law, fits, self.compute_range, level, widening=self.widening, **shown)
        return draw_allocation(data, self.n_params_convention)

    def plot_sizes(self, compute_flops: Sequence[float], within: float = 0.005, **columns: float) -> Figure:
        """Loss over size at fixed budgets by `best_law`, with the band of sizes at most `within` worse than the best.

        Raises:
            ScalingError: the law is one of tokens only.
        """
        self._require_sizes()
        data = sizes_data(self.best_law, compute_flops, within, **self._shown(columns))
        return draw_sizes(data, self.n_params_convention, self.loss_unit)

    def plot_parameters(self) -> Figure:
        """Pairs of parameters over the bootstrap, with the ellipse that holds 90 % of the refits."""
        return draw_parameters(parameters_data(self.law, self.draws), self.loss_unit)

    def plot_variants(self, target: Forecast) -> Figure:
        """Loss by each fit behind a forecast, with the forecast and its interval."""
        return draw_variants(variants_data(self.law, self.ensemble, target), self.loss_unit)

    def _require_sizes(self) -> None:
        if self.one_size is not None:
            raise ScalingError(f"all runs have {self.one_size:.4g} parameters: the law says nothing of other sizes")

    def _shown(self, columns: Mapping[str, float], target: Forecast | None = None) -> dict[str, float]:
        """Further columns of a figure: as given, else the target's, else the runs' median."""
        further = {*self.law.form.columns} - {"n_params", "n_tokens"} if self.has_forecast else set()
        medians = {name: float(self.rows[name].median()) for name in further}
        return {**medians, **(target.columns if target else {}), **columns}

    @property
    def about(self) -> str:
        """Lines about the data behind the parameters, and the status."""
        return lines(
            {
                "interval": f"90 % of {len(self.draws)} bootstrap refits over {self.n_stems} runs",
                "rows": f"{self.n_rows} fitted, {len(self.left_out)} left out",
                "N": f"{span(*self.n_params_range)} parameters ({counted(self.n_params_convention)})",
                "D": f"{span(*self.n_tokens_range)} tokens, {span(*self.tokens_per_param_range)} per parameter",
                "C": f"{span(*self.compute_range)} FLOPs",
                **(
                    {SPARSITY: span(self.rows[SPARSITY].min(), self.rows[SPARSITY].max())}
                    if SPARSITY in self.rows
                    else {}
                ),
                "residual": f"{self.residual_std:.2%} of the loss",
                "objective": f"{self.objective:.8g}, sum of Huber terms at delta {self.delta:g}",
                **({"assumed": "; ".join(self.assumptions)} if self.assumptions else {}),
                "status": "; ".join((self.status, *self.warnings, *self.caveats)),
            }
        )

    def __str__(self) -> str:
        table = self.intervals(0.9).map("{:.5g}".format).to_string()
        unit = (
            f"{self.loss_unit} (assumed: no loss_unit was given)"
            if UNIT_ASSUMED in self.assumptions
            else self.loss_unit
        )
        of = "N, D" if self.one_size is None else "D"
        return f"L({of}) = {self.law.form.formula}, {unit}\n{table}\n{self.about}"
