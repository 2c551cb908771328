"""Backtest of a ladder on its largest or sparsest runs: fit the runs below a cut, and compare with the runs above.

A backtest shows how far to trust a forecast; do not use it to choose a form. A form chosen by its held-out error is chosen in
hindsight, and its interval would be too narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import numbers, require_columns
from scaling.drawing import Figure
from scaling.errors import ScalingError, TooFewRunsError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.fitting import fit, require_form
from scaling.fits.forecast import DEFAULT, interval_factor, log_scale
from scaling.fits.law_figures import backtest_data, draw_backtest
from scaling.fits.result import ScalingFit
from scaling.fits.runs import Table, naming, read_runs, require_convention
from scaling.fits.sparsity import with_sparsity
from scaling.fits.support import unsupported
from scaling.forms import Chinchilla, Form, Joint, Kaplan, TiedChinchilla, forecast_form
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import compute_flops
from scaling.presentation import counted
from scaling.quantiles import two_sided
from scaling.serialization import JsonResult, TableLayout

FORMS_COMPARED: tuple[Form, ...] = (Chinchilla(), TiedChinchilla(), Joint(), Kaplan())
COMPUTE = "compute_flops"
CUTS, CUTS_ONE_SIZE = (10.0, 30.0), (2.0, 4.0)
"""Default cuts of ladders, and of runs of one size."""
LEVELS = (0.9, 0.95)
N_BOOTSTRAP = 100
"""Bootstrap draws of each fit: enough for a standard deviation, from which intervals are computed."""
TOP = 2.0
"""Factor of compute below the largest run within which runs count as the top."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Backtest(JsonResult):
    """Forecasts of runs that the fit had not seen.

    Attributes:
        predictions: a row for each cut, method and held-out run: cut, method, the forecast's columns, compute_flops, loss, predicted,
            log_error (of the prediction), and for each level low_… and high_…; reasons (short names, for `forecast` only; empty if
            the forecast is supported) and supported.
        too_few: cuts with too few runs below them for a fit, and why.
        along: column that the cuts divide.
    """

    predictions: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    too_few: dict[float, str]
    n_params_convention: str
    loss_unit: str
    along: str = COMPUTE

    def table(self) -> pd.DataFrame:
        """Table with a row for each cut and method.

        Columns: held_out (runs), mean_error and top_error (mean |log error| of all runs and of runs within a factor of two of
        the largest, in %), bias (mean log error, in %), and for each level coverage_… (share of runs within) and
        width_… (median full width, % of the loss); supported (share of the runs).
        """
        rows = []
        for (cut, method), part in self.predictions.groupby(["cut", "method"], sort=False):
            top = part["compute_flops"] >= part["compute_flops"].max() / TOP
            error = part["log_error"]
            row: dict[str, Any] = {
                "cut": cut,
                "method": method,
                "held_out": len(part),
                "mean_error": 100 * error.abs().mean(),
                "top_error": 100 * error[top].abs().mean(),
                "bias": 100 * error.mean(),
                "supported": part["supported"].mean(),
            }
            for level in LEVELS:
                low, high = part[f"low_{level:g}"], part[f"high_{level:g}"]
                row[f"coverage_{level:g}"] = part["loss"].between(low, high).mean()
                row[f"width_{level:g}"] = 100 * (high / low - 1).median()
            rows.append(row)
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """Distance of the measured losses from the default forecast, with its intervals.

        Raises:
            ScalingError: no cut leaves enough runs.
        """
        if self.predictions.empty:
            raise ScalingError(f"there is nothing to draw: {self}")
        return draw_backtest(backtest_data(self.predictions))

    def __str__(self) -> str:
        table = self.table().round(2).to_string(index=False) if len(self.predictions) else "no cut leaves enough runs"
        below = "C < Cmax" if self.along == COMPUTE else f"{self.along} < the largest"
        units = f"losses in {self.loss_unit}; N: {counted(self.n_params_convention)}"
        return "\n".join([table, *(f"{below}/{cut:g}: {why}" for cut, why in self.too_few.items()), units])


def backtest(
    runs: Table,
    *,
    n_params_convention: str,
    cuts: Sequence[float] | None = None,
    forms: Sequence[Form] | Form = FORMS_COMPARED,
    along: str = COMPUTE,
    seed: int = 0,
    columns: Mapping[str, str] = NO_COLUMNS,
    **options: Any,
) -> Backtest:
    """Fit the runs with C < Cmax/cut, and predict the runs above.

    The default forecast is that of N and D. If a form has further columns that forecasts were tested for, it is that form's.

    The interval of a form by itself comes from its bootstrap with residual noise, as is usual.

    Args:
        cuts: factors of `along`: for each, runs below the largest/cut are fitted; by default 10 and 30, at one size 2 and 4.
        along: `compute_flops`, or a further column of a form, such as `sparsity`.
        forms: one or several forms to compare with the default forecast; the runs must have their further columns. At one size,
            `OneSize` by default.
        columns: as for `fit`.
        options: further options of `fit`, such as `loss_unit`; not `form`, nor `n_bootstrap`, which is N_BOOTSTRAP.

    Raises:
        ValueError: the runs can't be fitted at all, a column is missing, `along` is no such column, or a cut is not above 1.
        TypeError: an option is unknown, or one of `forms` is no form.
    """
    if fixed := {"form", "n_bootstrap"} & set(options):
        raise TypeError(f"backtest has no option {', '.join(sorted(fixed))}: pass forms as forms=[…]")
    forms = [require_form(form) for form in ((forms,) if isinstance(forms, Form) else forms)]
    require_convention(n_params_convention)
    table = read_runs(runs, columns).reset_index(drop=True)
    names = dict.fromkeys(name for form in forms for name in form.columns if name not in ("n_params", "n_tokens"))
    if any(not cut > 1 for cut in cuts or ()):
        raise ValueError(f"cuts must be above 1, got {list(cuts or ())}")
    if along not in (COMPUTE, *names):
        raise ValueError(f"along must be one of {', '.join([COMPUTE, *names])}, got {along!r}")
    base = next((form for form in forms if names and forecast_form(form) and {*names} <= {*form.columns}), None)
    options = {"n_params_convention": n_params_convention, **options}
    with naming(runs):
        if SPARSITY in names:
            table = with_sparsity(table)
        require_columns(table, ("n_params", "n_tokens", "loss", *names))
        checked = fit(table, form=base, n_bootstrap=2, **options)
        base = checked.law.form
        every = checked.rows.assign(**{name: numbers(table.loc[checked.rows.index], name) for name in names})
    if base.tokens_only:
        forms = [base] if {*forms} == {*FORMS_COMPARED} else forms
    if cuts is None:
        cuts = CUTS_ONE_SIZE if base.tokens_only else CUTS
    options["loss_unit"] = checked.loss_unit  # losses in bits are in nats by now
    divided = compute_flops(every["n_params"], every["n_tokens"]) if along == COMPUTE else every[along]
    tables, too_few = [], {}
    for cut in cuts:
        below = divided < divided.max() / cut
        try:
            predicted = _predictions(every[below], every[~below], base, forms, seed, options)
            tables += [each.assign(cut=cut) for each in predicted]
        except TooFewRunsError as error:
            too_few[cut] = str(error)
    first = ["cut", "method"]
    found = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=first)
    return Backtest(
        predictions=found[[*first, *found.columns.difference(first, sort=False)]],
        too_few=too_few,
        n_params_convention=n_params_convention,
        loss_unit=checked.loss_unit,
        along=along,
    )


def _predictions(
    known: pd.DataFrame,
    unknown: pd.DataFrame,
    base: Form,
    forms: Sequence[Form],
    seed: int,
    options: dict[str, Any],
) -> Iterator[pd.DataFrame]:
    held_out = unknown[[*base.run_columns, "loss"]].assign(
        compute_flops=compute_flops(unknown["n_params"], unknown["n_tokens"])
    )
    at = {name: held_out[name].to_numpy() for name in base.run_columns}
    fits = {
        form: fit(known, form=form, n_bootstrap=N_BOOTSTRAP, seed=seed, **options)
        for form in dict.fromkeys((base, *forms))
    }
    fits_of = fits[base].ensemble
    targets = (dict(zip(at, values, strict=True)) for values in zip(*at.values(), strict=True))
    reasons = [", ".join(unsupported(known, fits_of, **target)) for target in targets]
    yield _table(held_out, DEFAULT, fits_of.log_loss(**at), log_scale(fits_of, **at), interval_factor, reasons)
    for form in forms:
        result, rows = fits[form], {name: unknown[name].to_numpy() for name in form.columns}
        scale = np.hypot(_spread(result, rows), result.residual_std)
        predicted = form.loss(result.law.parameters, rows)
        yield _table(held_out, form.name, np.log(predicted), scale, two_sided, "")


def _table(
    held_out: pd.DataFrame, method: str, log_loss: Array, scale: Array, factor: Any, reasons: list[str] | str
) -> pd.DataFrame:
    table = held_out.assign(method=method, predicted=np.exp(log_loss), reasons=reasons)
    table["supported"] = table["reasons"] == ""
    table["log_error"] = log_loss - np.log(held_out["loss"])
    for level in LEVELS:
        reach = factor(level) * scale
        table[f"low_{level:g}"], table[f"high_{level:g}"] = np.exp(log_loss - reach), np.exp(log_loss + reach)
    return table


def _spread(result: ScalingFit, rows: dict[str, Array]) -> Array:
    """Standard deviation of log loss over the bootstrap refits, widened, [K]."""
    values = result.law.form.stacked(result.refits)
    return np.asarray(result.widening * np.log(result.law.form.loss(values, rows)).std(axis=0))
