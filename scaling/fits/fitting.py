"""Fit a form of the loss law to the runs of a ladder.

Three steps: (1) starts: for Chinchilla's form variable projection — for fixed (alpha, beta) it is linear in E, A, B, so a
grid of exponents is solved in closed form as a handful of matrix products; (2) the best are polished by a damped Newton
method in centred log coordinates, through Huber thresholds that narrow to `delta`; (3) the same method, warm, refits
bootstrap draws. The objective is Σ Huber(log L̂ − log L; delta) of Hoffmann et al. (2203.15556, app. D.2); this reaches the
minimum of the replication (Besiroglu et al. 2404.10102) in milliseconds, where their 4,500 starts take 65 s. It is approach 3 of
Hoffmann et al.; approaches 1 and 2 are `fit_envelope` and `fit_isoflops`.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.errors import TooFewRunsError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.result import ScalingFit
from scaling.fits.runs import Runs, Table, check_runs, naming, read_runs, require_convention
from scaling.forms import ALL_FORMS, Chinchilla, Joint
from scaling.forms.law import Form, Law
from scaling.forms.problem import Problem
from scaling.minimizers.bootstrap import free_columns, noise_weights, refit, stem_weights, widening
from scaling.minimizers.starts import minima, multistart, require_loss, thresholds

MIN_LEVELS = 3
"""Distinct N, and distinct D, below which the three numbers of E + A/N^alpha (E + B/D^beta) cannot be separated."""
MAX_MISFIT, SEEN_MISFIT = 0.02, 0.013
"""Standard deviation of log residuals, by the median. The 12 public ladders of finished runs: .2–1.23 %; the three of losses in
mid-schedule: 2.1–5.4 %, where forecasts fail."""
LEAST_SHARE = 0.3
"""Share of the least loss below which E is warned of; it is .43 to 1.02 on every public ladder but one in mid-schedule. The
forecast's prior expects .73: by an earlier one, where E was planted near .1 of the least loss, its 90 % intervals held 57 %."""
MAX_CONDITION = 1e3
"""Condition number of the Jacobian with columns of length one. Public ladders: 15–80; N and D in strict proportion: 1e16."""


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

    Args:
        runs: one row per (N, D, loss): a DataFrame, a list of dicts, the path of a Parquet, CSV, TSV or JSON Lines (.jsonl) file,
            or a study's `ladder()`. Required columns: `n_params` and `n_tokens`, `loss`, and what else the form depends on;
            usual other names, counts in words ("1.3B", a column "Params (M)") and compute in the place of tokens are read,
            and listed under `assumptions`. A row whose loss is empty, NaN or infinite is left out, with a note that names it; more
            than half of such rows are an error. Optional: `stem` (rows branched from one training run share it and are
            resampled together; without it each row is a run of its own), `regret` (predicted relative loss given up by the row's
            hyperparameters), `annealed` (False for a loss read in mid-schedule), `left_out` (why the table itself leaves
            a row out; empty if it doesn't), `noise` (relative standard deviation of the loss from seed to seed; rows are
            weighted by 1/noise²), `compute_flops` (FLOPs, held against 6·N·D).
        n_params_convention: what N counts, e.g. "total" or "without embeddings"; the exponents depend on it, and every
            result states it.
        loss_unit: of `loss`: "nats per token", assumed where none is given, or "bits per token" ("bits"), which become nats, as
            do bits per byte ("bpb") where a column `bytes_per_token` has the tokens' mean length. A metric other than these that is
            positive and falls to a floor (bits per byte, the share of answers that are wrong) is fitted as it is, under
            the name given here.
        form: of `scaling.forms`, or one's own; Chinchilla's by default.
        method: how the minimum is sought: the damped Newton method, or scipy's L-BFGS-B from many starts, slower, as a check.
        delta: Huber threshold on log residuals; infinite for least squares.
        n_bootstrap: refits under resampled stems.
        seed: of the resampling. The result does not depend on the order of the rows.
        max_regret: rows above it are left out, and listed with the reason in `ScalingFit.left_out`, as un-annealed rows
            are.
        columns: names of the table's columns, by ours, where they differ: `{"loss": "c4_loss", "n_params": …, "n_tokens": …}`; of
            rows that share a `run` the last is fitted.

    Raises:
        ValueError: the file can't be read, a column or an argument is missing or breaks its rule, or too few distinct points
            remain (`TooFewRunsError`).
        TypeError: the form is none.
        ScalingError: the form's loss is nowhere above 0.
    """
    require_convention(n_params_convention)
    for name, value in (("delta", delta), ("max_regret", max_regret)):
        if not (isinstance(value, Real) and value > 0):
            raise ValueError(f"{name} must be above 0, got {value!r}")
    if method not in ("newton", "multistart"):
        raise ValueError(f"method must be newton or multistart, got {method!r}: for isoFLOPs see fit_isoflops")
    if not (isinstance(n_bootstrap, Integral) and n_bootstrap >= 2):
        raise ValueError(f"n_bootstrap must be at least 2, got {n_bootstrap!r}")

    form = require_form(Chinchilla() if form is None else form)
    checked = select(runs, form, max_regret=max_regret, loss_unit=loss_unit, columns=columns)
    rows = checked.rows
    log_loss = np.log(rows["loss"].to_numpy())
    problem = form.problem({name: rows[name].to_numpy() for name in form.columns}, log_loss)
    weights = noise_weights(rows)
    search = minima if method == "newton" else multistart
    thetas, values, converged = search(problem, log_loss, weights, delta)
    best = int(np.argmin(values))
    require_loss(values)
    stems = pd.factorize(rows["stem"])[0]
    resampled = weights * stem_weights(stems, n_bootstrap, seed)
    draws, draws_converged = refit(problem, log_loss, resampled, thetas[best], thresholds(delta)[-2:])
    apart = thetas[best] + widening(free_columns(problem, thetas[best]), weights, stems) * (draws - thetas[best])

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
        draws=problem.natural(np.clip(apart, problem.lower, problem.upper)),
        seed=seed,
        warnings=(
            *checked.warnings,
            *_fit_warnings(form, problem, log_loss, thetas[best], bool(converged[best]), draws, draws_converged),
        ),
        assumptions=checked.assumptions,
    )


def require_form(form: object) -> Form:
    """The form, if it is one.

    Raises:
        TypeError: it is none; the message suggests what was meant by a class or a name.
    """
    if isinstance(form, Form):
        return form
    name = form if isinstance(form, str) else getattr(form, "name", None)
    meant = f": {ALL_FORMS[name].__name__}() is meant" if name in ALL_FORMS else ""
    raise TypeError(f"form must be a form with its parentheses, such as Joint(), got {form!r}{meant}")


def _named(form: Form, values: Array) -> Mapping[str, float]:
    return dict(zip(form.parameters, map(float, values), strict=True))


def select(
    runs: Table, form: Form, *, max_regret: float, loss_unit: str | None, columns: Mapping[str, str] = NO_COLUMNS
) -> Runs:
    """The rows to fit and those left out (see `fit`), enough of them for the form."""
    table = read_runs(runs, columns)
    with naming(runs):
        checked = check_runs(table, form.columns, max_regret=max_regret, loss_unit=loss_unit)
        _require_points(checked, form)
    return checked


def _require_points(checked: Runs, form: Form) -> None:
    """Raise TooFewRunsError, with every level and point that is missing, unless the rows determine the form and a forecast."""
    rows, lacking = checked.rows, []
    for column in ("n_params", "n_tokens"):
        if (levels := len(np.unique(rows[column].to_numpy()))) < MIN_LEVELS:
            lacking.append(
                f"need at least {MIN_LEVELS} distinct values of {column} to separate E, coefficient and exponent, got {levels}"
            )
    columns = [rows[name].to_numpy() for name in form.columns]
    # As many points as there are parameters are met exactly, and leave no residual; a forecast's fits have one parameter more.
    points = len(np.unique(np.stack(columns), axis=1).T)
    fitted = (form, Joint()) if {*form.columns} == {*Joint().columns} else (form,)
    n_parameters = max(len(each.parameters) for each in fitted)
    if points <= n_parameters:
        lacking.append(
            f"need at least {n_parameters + 1} distinct ({', '.join(form.columns)}) for {n_parameters} parameters, got {points}"
        )
    if lacking and (rising := _rising(rows)):
        lacking.append(rising)
    if lacking:
        raise TooFewRunsError("; ".join([*lacking, *filter(None, [checked.omitted])]))


def _rising(rows: pd.DataFrame) -> str:
    """Remark where larger models have larger losses at one length; empty where they do not."""
    for n_tokens, part in rows.groupby("n_tokens"):
        sizes = part.groupby("n_params")["loss"].mean()
        if len(sizes) > 1 and sizes.iloc[-1] > sizes.iloc[0]:
            return (
                f"the loss rises with n_params at {n_tokens:.3g} tokens, from {sizes.iloc[0]:.4g} to {sizes.iloc[-1]:.4g}: "
                "is it tuned at each size, and is less better?"
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
    warnings = []
    if not converged:
        warnings.append("the minimum was not reached to full precision")
    if (share := 1 - draws_converged.mean()) > 0.05:
        warnings.append(f"{share:.0%} of the bootstrap refits did not converge")
    for i, name in enumerate(form.parameters):
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
    lengths = np.maximum(np.linalg.norm(jacobian, axis=0), np.finfo(np.float64).tiny)  # 0 of what has no effect
    condition = float(np.linalg.cond(jacobian / lengths))
    if condition > MAX_CONDITION:
        warnings.append(
            f"ill-conditioned (condition number {condition:.1e}): N and D vary too much together "
            "to determine the parameters and the best allocation"
        )
    return warnings
