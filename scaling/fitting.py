"""Fit a form of the loss law to the runs of a ladder.

Three steps: (1) starts: for Chinchilla's form variable projection — for fixed (alpha, beta) it is linear in E, A, B, so a
grid of exponents is solved in closed form as a handful of matrix products; (2) the best are polished by a damped Newton
method in centred log coordinates, through Huber thresholds that narrow to `delta`; (3) the same method, warm, refits
bootstrap draws. The objective is Σ Huber(log L̂ − log L; delta) of Hoffmann et al. (2203.15556, app. D.2); this reaches the
minimum of the replication (Besiroglu et al. 2404.10102) in milliseconds, where their 4,500 starts take 65 s.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.bootstrap import refit, stem_weights, widening
from scaling.errors import ScalingError, TooFewRunsError
from scaling.forms import ALL_FORMS, Chinchilla
from scaling.forms.form import Array, Form, Problem
from scaling.multistart import N_STARTS as N_MULTISTARTS
from scaling.multistart import descend
from scaling.newton import minimize, objective
from scaling.result import ScalingFit
from scaling.table import numbers, require_columns

N_STARTS, N_FINALISTS = 6, 3
"""Minimised under a wide Huber threshold, and of these under the last."""
MANY_ROWS, SCREENED_ROWS = 2000, 100
"""Of more, that many drawn at random tell where the minima lie, and which starts are worth following."""
MIN_LEVELS = 3
"""Distinct N, and distinct D, below which the three numbers of E + A/N^alpha (E + B/D^beta) can't be told apart."""
MIN_RUNS = 15
MIN_DECADES = 1.0
"""Runs and decades of compute below which intervals were found dishonest (18 public ladders; measured here)."""
MAX_CONDITION = 1e3
"""Of the Jacobian with columns of length one. Public ladders: 15–80; N and D in strict proportion: 1e16."""


def fit(
    runs: pd.DataFrame,
    *,
    n_params_convention: str,
    form: Form | None = None,
    method: Literal["newton", "multistart"] = "newton",
    delta: float = 1e-3,
    n_bootstrap: int = 400,
    seed: int = 0,
    max_regret: float = 0.0025,
) -> ScalingFit:
    """Fit a law to finished, annealed, tuned runs; by default L(N, D) = E + A/N^alpha + B/D^beta.

    Args:
        runs: one row per (N, D, loss). Required columns: `n_params`, `n_tokens`, `loss` (nats per token), and what else
            the form depends on. Optional: `stem` (rows branched from one training run share it and are resampled
            together), `regret` (predicted relative loss given up by the row's hyperparameters), `annealed` (False for a
            loss read in mid-schedule), `noise` (relative standard deviation of the loss from seed to seed; rows are
            weighted by 1/noise²).
            A metric other than loss that is positive and falls to a floor (bits per byte, the share of answers that are
            wrong) may stand in the column `loss`: the law is then in its unit.
        n_params_convention: what N counts, e.g. "total" or "without embeddings"; the exponents depend on it.
        form: of `scaling.forms`, or one's own; Chinchilla's by default.
        method: how the minimum is sought: the damped Newton method, or scipy's L-BFGS-B from many starts, slower, as a
            check. Both are approach 3 of Hoffmann et al.; approaches 1 and 2 are `fit_envelope` and `fit_isoflops`.
        delta: Huber threshold on log residuals; infinite for least squares.
        n_bootstrap: refits under resampled stems.
        seed: of the resampling. The result does not depend on the order of the rows.
        max_regret: rows above it are left out, and listed with the reason in `ScalingFit.left_out`, as un-annealed rows
            are.

    Raises:
        ValueError: a column or an argument is missing or breaks its rule, or too few distinct points remain (`TooFewRunsError`).
        TypeError: the form is none.
        ScalingError: the form's loss is nowhere above 0.
    """
    if not (isinstance(n_params_convention, str) and n_params_convention.strip()):
        raise ValueError(
            "n_params_convention must say what n_params counts, e.g. 'total' or 'without embeddings', "
            f"got {n_params_convention!r}"
        )
    for name, value in (("delta", delta), ("max_regret", max_regret)):
        if not (isinstance(value, Real) and value > 0):
            raise ValueError(f"{name} must be above 0, got {value!r}")
    if method not in ("newton", "multistart"):
        raise ValueError(f"method must be newton or multistart, got {method!r}: for isoFLOPs see fit_isoflops")
    if not (isinstance(n_bootstrap, Integral) and n_bootstrap >= 2):
        raise ValueError(f"n_bootstrap must be at least 2, got {n_bootstrap!r}")

    form = require_form(Chinchilla() if form is None else form)
    rows, left_out = select(runs, form, max_regret)
    log_loss = np.log(rows["loss"].to_numpy())
    problem = form.problem({name: rows[name].to_numpy() for name in form.columns}, log_loss)
    weights = noise_weights(rows)
    deltas = (10 * delta, 3 * delta, delta) if np.isfinite(delta) else (delta,)

    if method == "multistart":
        starts = _screen(problem, log_loss, weights, deltas[0], N_MULTISTARTS)
        thetas, values, converged = descend(problem, log_loss, weights, starts, delta)
    else:
        thetas, values, converged = minima(problem, log_loss, weights, deltas)
    best = int(np.argmin(values))
    _require_loss(values)
    stems = pd.factorize(rows["stem"])[0]
    resampled = weights * stem_weights(stems, n_bootstrap, seed)
    draws, draws_converged = refit(problem, log_loss, resampled, thetas[best], deltas[1:] or deltas)
    apart = thetas[best] + widening(problem, thetas[best], weights, stems) * (draws - thetas[best])

    return ScalingFit(
        law=form.law(**_named(form, problem.natural(thetas[best][None])[0])),
        objective=float(values[best]),
        delta=delta,
        n_params_convention=n_params_convention,
        rows=rows,
        left_out=left_out,
        draws=problem.natural(np.clip(apart, problem.lower, problem.upper)),
        seed=seed,
        warnings=(
            *doubts_about_rows(rows),
            *_doubts_about_fit(form, problem, log_loss, thetas[best], bool(converged[best]), draws, draws_converged),
        ),
    )


def require_form(form: object) -> Form:
    """The form, if it is one.

    Raises:
        TypeError: it is none; the message says what was meant by a class or a name.
    """
    if isinstance(form, Form):
        return form
    name = form if isinstance(form, str) else getattr(form, "name", None)
    meant = f": {ALL_FORMS[name].__name__}() is meant" if name in ALL_FORMS else ""
    raise TypeError(f"form must be a form with its parentheses, such as Joint(), got {form!r}{meant}")


def _require_loss(objectives: Array) -> None:
    """Raise ScalingError if the form's loss is above 0 for every run nowhere that was tried."""
    if not np.isfinite(objectives).any():
        raise ScalingError("the form gives no loss above 0 for every run, wherever between its bounds it was tried")


def _named(form: Form, values: Array) -> Mapping[str, float]:
    return dict(zip(form.parameters, map(float, values), strict=True))


def select(runs: pd.DataFrame, form: Form, max_regret: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows to fit (see `fit`), in an order of their own, and the rows left out with a `reason`."""
    needed = tuple(dict.fromkeys(("n_params", "n_tokens", *form.columns, "loss")))
    require_columns(runs, needed)
    columns: dict[str, Any] = {c: numbers(runs, c) for c in ((*needed, "noise") if "noise" in runs else needed)}
    stem = runs["stem"] if "stem" in runs else pd.Series(np.arange(len(runs)))
    if stem.isna().any():
        raise ValueError(f"stem must name a training run in every row, got {stem.isna().sum()} empty values")
    rows = pd.DataFrame({**columns, "stem": stem.array}, index=runs.index)

    reason = np.full(len(runs), "", dtype=object)
    if "regret" in runs:
        regret = numbers(runs, "regret", inclusive=True)
        for i in np.flatnonzero(regret > max_regret):
            reason[i] = f"predicted regret {regret[i]:.3%} is above {max_regret:.3%}"
    if "annealed" in runs:
        annealed = runs["annealed"]
        if not annealed.isin([True, False]).all():
            raise ValueError(f"annealed must be True or False in every row, got {annealed.unique().tolist()}")
        reason[~annealed.astype(bool).to_numpy()] = "not annealed: a loss in mid-schedule lies on another surface"

    kept = reason == ""
    left_out = rows[~kept].assign(reason=pd.array(reason[~kept], dtype="str"))
    order = np.lexsort([columns[name][kept] for name in ("loss", "n_tokens", "n_params")])
    rows = rows.iloc[np.flatnonzero(kept)[order]]
    _require_points(rows, form, left_out)
    return rows, left_out


def _require_points(rows: pd.DataFrame, form: Form, left_out: pd.DataFrame) -> None:
    also = (
        f"; {len(left_out)} rows were left out, the first because: {left_out['reason'].iloc[0]}"
        if len(left_out)
        else ""
    )
    columns = [rows[name].to_numpy() for name in form.columns]
    points, wanted = len(np.unique(np.stack(columns), axis=1).T), len(form.parameters) + 1
    if points < wanted:  # as many as there are parameters are met exactly, and leave no residual
        raise TooFewRunsError(
            f"need at least {wanted} distinct ({', '.join(form.columns)}) for {wanted - 1} parameters, got {points}{also}"
        )
    for column in ("n_params", "n_tokens"):
        if (levels := len(np.unique(rows[column].to_numpy()))) < MIN_LEVELS:
            raise TooFewRunsError(
                f"need at least {MIN_LEVELS} distinct values of {column} to separate E, coefficient and exponent, "
                f"got {levels}{also}"
            )


def noise_weights(rows: pd.DataFrame) -> Array:
    """1/noise², of mean one; even where the rows don't say."""
    weights = rows["noise"].to_numpy() ** -2.0 if "noise" in rows else np.ones(len(rows))
    return np.asarray(weights / weights.mean())


def minima(
    problem: Problem, log_loss: Array, weights: Array, deltas: tuple[float, ...]
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """The best minima: theta [N_FINALISTS, P], objective, converged.

    Of many rows a part tells where the minima lie, and only the best are polished on all of them.
    """
    starts = _screen(problem, log_loss, weights, deltas[0], N_STARTS)
    some = _some(len(log_loss), MANY_ROWS)
    thetas, values, _ = minimize(
        problem.part(some), log_loss[some], np.tile(weights[some], (len(starts), 1)), starts, deltas[:1]
    )
    best = thetas[np.argsort(values)[:N_FINALISTS]]
    thetas, values, converged = minimize(
        problem, log_loss, np.tile(weights, (len(best), 1)), best, deltas[1:] or deltas
    )
    return thetas, values, converged


def _screen(problem: Problem, log_loss: Array, weights: Array, delta: float, n_starts: int) -> Array:
    """The most promising starts, [n_starts, P], fewer where the form's loss is above 0 at fewer."""
    some = _some(len(log_loss), MANY_ROWS)
    starts = problem.part(some).starts(log_loss[some])
    few = _some(len(log_loss), SCREENED_ROWS)
    values = objective(problem.part(few), log_loss[few], weights[few], starts, delta)
    _require_loss(values)
    values = np.where(np.isfinite(values), values, np.inf)
    return np.asarray(starts[np.argsort(values)[: min(n_starts, int(np.isfinite(values).sum()))]])


def _some(n_rows: int, wanted: int) -> NDArray[np.int64]:
    """Rows drawn at random, in order: a stride could meet the period of a grid of N and D."""
    return np.sort(np.random.default_rng(0).permutation(n_rows)[:wanted])


def doubts_about_rows(rows: pd.DataFrame) -> list[str]:
    """Why a ladder's intervals can't be relied on, from its rows alone."""
    doubts = []
    n_runs = rows["stem"].nunique()
    if n_runs < MIN_RUNS:
        doubts.append(f"{n_runs} independent runs: intervals were found honest from {MIN_RUNS} on")
    compute = rows["n_params"].to_numpy() * rows["n_tokens"].to_numpy()
    decades = float(np.log10(compute.max() / compute.min()))
    if decades < MIN_DECADES:
        doubts.append(f"the runs span {decades:.2f} decades of compute: at least {MIN_DECADES:g} is wanted")
    return doubts


def _doubts_about_fit(
    form: Form,
    problem: Problem,
    log_loss: Array,
    theta: Array,
    converged: bool,
    draws: Array,
    draws_converged: NDArray[np.bool_],
) -> list[str]:
    doubts = []
    if not converged:
        doubts.append("the minimum was not reached to full precision")
    if (share := 1 - draws_converged.mean()) > 0.05:
        doubts.append(f"{share:.0%} of the bootstrap refits did not converge")
    for i, name in enumerate(form.parameters):
        stuck = (draws[:, i] <= problem.lower[i]) | (draws[:, i] >= problem.upper[i])
        if theta[i] <= problem.lower[i] or theta[i] >= problem.upper[i]:
            doubts.append(f"{name} lies on its bound: the runs do not determine it")
        elif stuck.mean() > 0.05:
            doubts.append(
                f"{name} lies on its bound in {stuck.mean():.0%} of the bootstrap refits: it is hardly determined"
            )
    E = _named(form, problem.natural(theta[None])[0]).get("E", 0.0)
    if (least := float(np.exp(log_loss.min()))) <= E:
        doubts.append(f"E = {E:.4g} is not below the least loss, {least:.4g}: larger runs can't be forecast from it")
    jacobian = problem.linearise(theta[None])[1][0]
    lengths = np.maximum(np.linalg.norm(jacobian, axis=0), np.finfo(np.float64).tiny)  # 0 of what has no effect
    condition = float(np.linalg.cond(jacobian / lengths))
    if condition > MAX_CONDITION:
        doubts.append(
            f"ill-conditioned (condition number {condition:.1e}): N and D vary too much together "
            "to tell the parameters and the best allocation apart"
        )
    return doubts
