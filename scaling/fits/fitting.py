"""Fit a form of the loss law to the runs of a ladder.

The fit has three steps. (1) Find starts: Chinchilla's form is linear in E, A, B for fixed (alpha, beta), so variable projection
solves a grid of exponents in closed form by a few matrix products. (2) Polish the best starts by a damped Newton
method in centred log coordinates, through Huber thresholds that narrow to `delta`. (3) Refit bootstrap draws by the same method,
from the estimate. The objective is Σ Huber(log L̂ − log L; delta) of Hoffmann et al. (2203.15556, app. D.2). The fit reaches the
minimum of the replication (Besiroglu et al. 2404.10102) in milliseconds, where their 4,500 starts take 65 s. This is approach 3 of
Hoffmann et al.; approaches 1 and 2 are `fit_envelope` and `fit_isoflops`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.errors import TooFewRunsError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.ensemble import MIN_LEVELS, BaseFits, least_points, spread
from scaling.fits.law_prior import shifts
from scaling.fits.result import ScalingFit
from scaling.fits.runs import Runs, Table, check_runs, naming, read_runs, require_convention
from scaling.fits.sparsity import with_sparsity
from scaling.fits.support import has_one_size
from scaling.forms import ALL_FORMS, Chinchilla, OneSize, forecast_form
from scaling.forms.expert_law import OF_TOKENS, SPARSITY
from scaling.forms.law import Form, Law
from scaling.forms.problem import Problem
from scaling.minimizers.bootstrap import noise_weights, refit, stem_weights
from scaling.minimizers.newton import NormalPrior
from scaling.minimizers.starts import minima, multistart, require_loss, thresholds
from scaling.presentation import span

MIN_SPARSITIES = 2
"""Distinct sparsities below which active and total parameters cannot be separated."""
MAX_MISFIT, SEEN_MISFIT = 0.02, 0.013
"""Standard deviations of log residuals, by the median. The 12 public ladders of finished runs have .2–1.23 %; the three ladders of
losses in mid-schedule have 2.1–5.4 %, and forecasts fail there."""
LEAST_SHARE = 0.3
"""Share of the least loss below which E raises a warning; the share is .43 to 1.02 on every public ladder but one in mid-schedule.
The forecast's prior expects .73: under an earlier prior, 90 % intervals held 57 % with E planted near .1 of the least loss."""
MAX_CONDITION = 1e3
"""Largest condition number of the Jacobian with columns scaled to length one: 15–80 on public ladders, 1e16 for N ∝ D."""


def fit(
    runs: Table,
    *,
    n_params_convention: str,
    loss_unit: str | None = None,
    form: Form | None = None,
    method: Literal["newton", "multistart"] = "newton",
    delta: float = 1e-3,
    n_bootstrap: int = 400,
    seed: int = 0,
    max_regret: float = 0.0025,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> ScalingFit:
    """Fit a law to finished, annealed, tuned runs; by default L(N, D) = E + A/N^alpha + B/D^beta.

    Runs of one size are fitted by a law of tokens only, E + B/(D + D_0)^beta (`OneSize`), under the prior of its forecast: with
    three lengths, the fewest, the prior determines E, beta and D_0, and the intervals show this.

    Args:
        runs: one row per (N, D, loss): a DataFrame, a list of dicts, the path of a Parquet, CSV, TSV or JSON Lines (.jsonl) file,
            or a study's `ladder()`. Required columns: `n_params` and `n_tokens`, `loss`, and the form's further columns; in the place
            of `sparsity` also `n_params_total` (`scaling.fits.sparsity`).
            Usual other names, counts in words ("1.3B", a column "Params (M)") and compute instead of tokens are read,
            and listed under `assumptions`. A row whose loss is empty, NaN or infinite is left out, with a note that names it; more
            than half of such rows are an error. Optional: `stem` (rows branched from one training run share a stem and are
            resampled together; without this column each row is a separate run), `regret` (predicted relative loss given up by the
            row's hyperparameters), `annealed` (False for a loss read in mid-schedule), `left_out` (why the table itself leaves
            a row out; else empty), `noise` (relative standard deviation of the loss from seed to seed; rows are
            weighted by 1/noise²), `compute_flops` (FLOPs, compared with 6·N·D).
        n_params_convention: what N counts, e.g. "total" or "without embeddings"; the exponents depend on this, and every
            result states it.
        loss_unit: unit of `loss`: "nats per token" (the default, listed as assumed) or "bits per token" ("bits"). Bits become nats;
            so do bits per byte ("bpb") if a column `bytes_per_token` has the tokens' mean length. Any other metric that is
            positive and falls to a floor (bits per byte, the share of wrong answers) is fitted unchanged, under the name
            given here.
        form: a form of `scaling.forms`, or a custom form; by default Chinchilla's, or `OneSize` if all rows have one size.
        method: search for the minimum: the damped Newton method, or scipy's L-BFGS-B from many starts, slower, as a check.
        delta: Huber threshold on log residuals; infinite for least squares.
        n_bootstrap: number of refits under resampled stems.
        seed: seed of the resampling. The result does not depend on the order of the rows.
        max_regret: rows with more regret are left out, and listed with the reason in `ScalingFit.left_out`, like un-annealed
            rows.
        columns: names of the table's columns, by ours, where they differ: `{"loss": "c4_loss", "n_params": …, "n_tokens": …}`; only
            the last row of each `run` is fitted.

    Raises:
        ValueError: the file can't be read, a column or an argument is missing or breaks its rule, or too few distinct points
            remain (`TooFewRunsError`).
        TypeError: `form` is no form.
        ScalingError: at no start the form's loss is above 0 for every run.
    """
    require_convention(n_params_convention)
    for name, value in (("delta", delta), ("max_regret", max_regret)):
        if not (isinstance(value, Real) and value > 0):
            raise ValueError(f"{name} must be above 0, got {value!r}")
    if method not in ("newton", "multistart"):
        raise ValueError(f"method must be newton or multistart, got {method!r}: for isoFLOPs see fit_isoflops")
    if not (isinstance(n_bootstrap, Integral) and n_bootstrap >= 2):
        raise ValueError(f"n_bootstrap must be at least 2, got {n_bootstrap!r}")

    checked, form = select(
        runs,
        None if form is None else require_form(form),
        max_regret=max_regret,
        loss_unit=loss_unit,
        columns=columns,
    )
    rows = checked.rows
    log_loss = np.log(rows["loss"].to_numpy())
    problem = form.problem({name: rows[name].to_numpy() for name in form.columns}, log_loss)
    weights = noise_weights(rows)
    priors = _Priors.of(rows, form, delta) if isinstance(form, OneSize) else None
    search = minima if method == "newton" else multistart
    thetas, values, converged = search(problem, log_loss, weights, delta, priors and priors.own)
    best = int(np.argmin(values))
    require_loss(values)
    stems = pd.factorize(rows["stem"])[0]
    resampled = weights * stem_weights(stems, n_bootstrap, seed)
    drawn = priors and priors.drawn(n_bootstrap, seed)
    draws, draws_converged = refit(problem, log_loss, resampled, thetas[best], thresholds(delta)[-2:], drawn)
    widening = spread(form, problem, thetas[best], weights, stems)
    apart = thetas[best] + widening * (draws - thetas[best])

    return ScalingFit(
        law=Law(
            form=form,
            parameters=_named(form, problem.natural(thetas[best][None])[0]),
            n_params_convention=n_params_convention,
            loss_unit=checked.loss_unit,
        ),
        objective=float(values[best]),
        delta=delta,
        rows=rows,
        left_out=checked.left_out,
        refits=problem.natural(draws),
        widening=widening,
        draws=problem.natural(np.clip(apart, problem.lower, problem.upper)),
        seed=seed,
        warnings=(
            *checked.warnings,
            *_fit_warnings(form, problem, log_loss, thetas[best], bool(converged[best]), draws, draws_converged),
        ),
        assumptions=checked.assumptions,
    )


@dataclass(frozen=True, kw_only=True)
class _Priors:
    """Priors of a law that is fitted under its forecast's prior.

    Attributes:
        variance: variance of the residuals in the units of the objective: sigma² if Huber's threshold is above sigma, else
            sigma·threshold, as slopes are cut there.
    """

    fits: BaseFits
    variance: float

    @classmethod
    def of(cls, rows: pd.DataFrame, form: Form, delta: float) -> "_Priors":
        fits = BaseFits.of(rows, form)
        sigma = fits.adaptive()[1]
        return cls(fits=fits, variance=sigma * min(sigma, delta))

    @property
    def own(self) -> NormalPrior:
        return self.fits.prior(self.variance)

    def drawn(self, n_draws: int, seed: int) -> NormalPrior:
        """Priors with drawn means, one for each refit (`scaling.fits.law_prior.shifts`)."""
        return self.fits.prior(self.variance, shifts(n_draws, seed, self.fits.form))


def require_form(form: object) -> Form:
    """Return the form if it is one; raise TypeError otherwise, which for a class or a name suggests the form."""
    if isinstance(form, Form):
        return form
    name = form if isinstance(form, str) else getattr(form, "name", None)
    meant = f": {ALL_FORMS[name].__name__}() is meant" if name in ALL_FORMS else ""
    raise TypeError(f"form must be a form with its parentheses, such as Joint(), got {form!r}{meant}")


def _named(form: Form, values: Array) -> Mapping[str, float]:
    return dict(zip(form.parameters, map(float, values), strict=True))


def select(
    runs: Table, form: Form | None, *, max_regret: float, loss_unit: str | None, columns: Mapping[str, str] = NO_COLUMNS
) -> tuple[Runs, Form]:
    """Select the rows to fit and the rows to leave out, and the form if none is given (see `fit`); raise if too few remain."""
    table, wanted = read_runs(runs, columns), form or Chinchilla()
    with naming(runs):
        if SPARSITY in wanted.columns:
            table = with_sparsity(table)
        checked = check_runs(table, wanted.run_columns, max_regret=max_regret, loss_unit=loss_unit)
        if form is None and has_one_size(checked.rows):
            wanted = OneSize()
        _require_points(checked, wanted)
    return checked, wanted


def _require_points(checked: Runs, form: Form) -> None:
    """Raise TooFewRunsError, with every missing level and point, unless the rows determine the form and a forecast."""
    rows, lacking = checked.rows, []
    experts = SPARSITY in form.columns
    needed = {"n_params": MIN_LEVELS, "n_tokens": MIN_LEVELS, **({SPARSITY: MIN_SPARSITIES} if experts else {})}
    if form.tokens_only:
        needed.pop("n_params")
        if len(sizes := np.unique(rows["n_params"])) > 1:
            lacking.append(f"a law of tokens only is for runs of one n_params, got {span(sizes[0], sizes[-1])}")
    for column, least in needed.items():
        levels = len(np.unique(rows[column].to_numpy()))
        if levels < least and not (experts and column == "n_tokens" and levels == 1):
            lacking.append(
                f"need at least {least} distinct values of {column} to separate E, coefficient and exponent, got {levels}"
            )
    columns = {name: rows[name].to_numpy() for name in form.columns}
    # A form meets as many points as it has parameters exactly, without a residual; a forecast's fits have one parameter more.
    points = len(np.unique(np.stack([*columns.values()]), axis=1).T)
    log_loss = np.log(rows["loss"].to_numpy())
    fitted = [form, *filter(None, [forecast_form(form)])]
    n_parameters = {each: len(each.problem(columns, log_loss).lower) for each in fitted if len(rows)}
    least = max((least_points(each, count) for each, count in n_parameters.items()), default=0)
    if points < least:
        lacking.append(
            f"need at least {least} distinct ({', '.join(form.columns)}) for {max(n_parameters.values())} parameters, got {points}"
        )
    if lacking and (rising := _rising(rows)):
        lacking.append(rising)
    if lacking:
        raise TooFewRunsError("; ".join([*lacking, *filter(None, [checked.omitted])]))


def _rising(rows: pd.DataFrame) -> str:
    """Remark if larger models have larger losses at one length; else empty."""
    for n_tokens, part in rows.groupby("n_tokens"):
        sizes = part.groupby("n_params")["loss"].mean()
        if len(sizes) > 1 and sizes.iloc[-1] > sizes.iloc[0]:
            return (
                f"the loss rises with n_params at {n_tokens:.3g} tokens, from {sizes.iloc[0]:.4g} to {sizes.iloc[-1]:.4g}: "
                "check that it is tuned at each size and that lower is better"
            )
    return ""


def _fit_warnings(
    form: Form,
    problem: Problem,
    log_loss: Array,
    theta: Array,
    converged: bool,
    draws: Array,
    draws_converged: NDArray[np.bool_],
) -> list[str]:
    warnings, names = [], [*form.parameters]
    if len(problem.lower) < len(names):
        names = [name for name in names if name not in OF_TOKENS]
        warnings.append(
            "n_tokens has one value: E includes the loss due to few tokens, {} and {} are arbitrary".format(*OF_TOKENS)
        )
    if not converged:
        warnings.append("the minimum was not reached to full precision")
    if (share := 1 - draws_converged.mean()) > 0.05:
        warnings.append(f"{share:.0%} of the bootstrap refits did not converge")
    for i, name in enumerate(names):
        stuck = (draws[:, i] <= problem.lower[i]) | (draws[:, i] >= problem.upper[i])
        if theta[i] <= problem.lower[i] or theta[i] >= problem.upper[i]:
            warnings.append(f"{name} lies on its bound: the runs do not determine it")
        elif stuck.mean() > 0.05:
            warnings.append(
                f"{name} lies on its bound in {stuck.mean():.0%} of the bootstrap refits: it is hardly determined"
            )
    if (E := _named(form, problem.natural(theta[None])[0]).get("E")) is not None:
        share = E / float(np.exp(log_loss.min()))
        if share >= 1:
            warnings.append(f"E = {E:.4g} is {share:.3g} of the least loss: larger runs cannot be forecast from it")
        elif share < LEAST_SHARE:
            warnings.append(
                f"E = {E:.4g} is {share:.3g} of the least loss, below {LEAST_SHARE:g}, the least at which forecasts were tested"
            )
    predicted, jacobian = (found[0] for found in problem.linearise(theta[None]))
    if (typical := 1.4826 * float(np.median(np.abs(predicted - log_loss)))) > MAX_MISFIT:
        warnings.append(
            f"losses typically lie {typical:.1%} off the law: finished runs of one recipe were seen within {SEEN_MISFIT:.1%}, "
            "losses in mid-schedule or of several recipes beyond"
        )
    if isinstance(form, OneSize):  # the prior determines what the runs do not
        return warnings
    lengths = np.maximum(np.linalg.norm(jacobian, axis=0), np.finfo(np.float64).tiny)  # 0 without effect
    condition = float(np.linalg.cond(jacobian / lengths))
    if condition > MAX_CONDITION:
        warnings.append(
            f"ill-conditioned (condition number {condition:.1e}): N and D vary too much together "
            "to determine the parameters and the best allocation"
        )
    return warnings
