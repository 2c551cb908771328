"""Fit the loss surface to the runs of a ladder.

Three steps: (1) variable projection: for fixed (alpha, beta) the surface is linear in E, A, B, so a grid of exponents
is solved in closed form as a handful of matrix products; (2) the best cells are polished by a damped Newton method in
centred log coordinates, through Huber thresholds that narrow to `delta`; (3) the same method, warm, refits bootstrap
draws. The objective is Σ Huber(log L̂ − log L; delta) of Hoffmann et al. (2203.15556, app. D.2); this reaches the
minimum of the replication (Besiroglu et al. 2404.10102) in about 20 ms, where their 4,500 starts take 65 s.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.bootstrap import refit, stem_weights
from scaling.form import PARAMETERS, Array, SumOfPowers
from scaling.newton import minimize, objective
from scaling.result import ScalingFit
from scaling.table import numbers, require_columns

GRID = np.geomspace(0.05, 2.0, 24)
"""Exponents screened, for alpha and for beta."""
N_STARTS = 6
MIN_POINTS = 6
"""Distinct (N, D) below which nothing is fitted: five parameters go through five points exactly and leave no
residual."""
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
    delta: float = 1e-3,
    n_bootstrap: int = 400,
    seed: int = 0,
    max_regret: float = 0.0025,
) -> ScalingFit:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to finished, annealed, tuned runs.

    Args:
        runs: one row per (N, D, loss). Required columns: `n_params`, `n_tokens`, `loss` (nats per token). Optional:
            `stem` (rows branched from one training run share it and are resampled together), `regret` (predicted
            relative loss given up by the row's hyperparameters), `annealed` (False for a loss read in mid-schedule).
        n_params_convention: what N counts, e.g. "total" or "without embeddings"; the exponents depend on it.
        delta: Huber threshold on log residuals.
        n_bootstrap: refits under resampled stems.
        seed: of the resampling. The result does not depend on the order of the rows.
        max_regret: rows above it are left out, and listed with the reason in `ScalingFit.left_out`, as un-annealed rows
            are.

    Raises:
        ValueError: a column is missing or breaks its rule, or too few distinct points remain.
    """
    if not n_params_convention.strip():
        raise ValueError("n_params_convention must say what n_params counts, e.g. 'total' or 'without embeddings'")
    for name, value in (("delta", delta), ("max_regret", max_regret)):
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and above 0, got {value!r}")
    if n_bootstrap < 2:
        raise ValueError(f"n_bootstrap must be at least 2, got {n_bootstrap}")

    rows, left_out = _select(runs, max_regret)
    form = SumOfPowers.at(rows["n_params"].to_numpy(), rows["n_tokens"].to_numpy())
    log_loss = np.log(rows["loss"].to_numpy())
    deltas = (10 * delta, 3 * delta, delta)

    starts = _screen(form, log_loss, delta)
    thetas, values, converged = minimize(form, log_loss, np.ones((len(starts), len(rows))), starts, deltas)
    best = int(np.argmin(values))
    stems = pd.factorize(rows["stem"])[0]
    draws, draws_converged = refit(form, log_loss, stem_weights(stems, n_bootstrap, seed), thetas[best], deltas[1:])

    return ScalingFit(
        surface=form.surface(thetas[best]),
        objective=float(values[best]),
        delta=delta,
        n_params_convention=n_params_convention,
        rows=rows,
        left_out=left_out,
        draws=form.natural(draws),
        warnings=(
            *_doubts_about_rows(rows),
            *_doubts_about_fit(form, log_loss, thetas[best], bool(converged[best]), draws, draws_converged),
        ),
    )


def _select(runs: pd.DataFrame, max_regret: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows to fit, in an order of their own, and the rows left out with a `reason`."""
    require_columns(runs, ("n_params", "n_tokens", "loss"))
    rows = pd.DataFrame({c: numbers(runs, c) for c in ("n_params", "n_tokens", "loss")}, index=runs.index)
    rows["stem"] = runs["stem"] if "stem" in runs else np.arange(len(runs))
    if rows["stem"].isna().any():
        raise ValueError(f"stem must name a training run in every row, got {rows['stem'].isna().sum()} empty values")

    reason = pd.Series("", index=runs.index, dtype="str")
    if "regret" in runs:
        regret = numbers(runs, "regret", inclusive=True)
        for i in np.flatnonzero(regret > max_regret):
            reason.iloc[i] = f"predicted regret {regret[i]:.3%} is above {max_regret:.3%}"
    if "annealed" in runs:
        annealed = runs["annealed"]
        if not annealed.isin([True, False]).all():
            raise ValueError(f"annealed must be True or False in every row, got {annealed.unique().tolist()}")
        reason[~annealed.astype(bool).to_numpy()] = "not annealed: a loss in mid-schedule lies on another surface"

    kept = (reason == "").to_numpy()
    left_out = rows[~kept].assign(reason=reason[~kept])
    rows = rows[kept].sort_values(["n_params", "n_tokens", "loss"], kind="stable")
    _require_points(rows, left_out)
    return rows, left_out


def _require_points(rows: pd.DataFrame, left_out: pd.DataFrame) -> None:
    also = (
        f"; {len(left_out)} rows were left out, the first because: {left_out['reason'].iloc[0]}"
        if len(left_out)
        else ""
    )
    points = len(rows[["n_params", "n_tokens"]].drop_duplicates())
    if points < MIN_POINTS:
        raise ValueError(
            f"need at least {MIN_POINTS} distinct (n_params, n_tokens) for five parameters, got {points}{also}"
        )
    for column in ("n_params", "n_tokens"):
        if rows[column].nunique() < MIN_LEVELS:
            raise ValueError(
                f"need at least {MIN_LEVELS} distinct values of {column} to separate E, coefficient and exponent, "
                f"got {rows[column].nunique()}{also}"
            )


def _screen(form: SumOfPowers, log_loss: Array, delta: float) -> Array:
    """The most promising starts, [N_STARTS, 5], by relative least squares in E, A, B at each (alpha, beta)."""
    scale = np.exp(-log_loss)
    u, v = (np.exp(-GRID[:, None] * z) * scale for z in (form.x, form.y))
    normal = np.empty((len(GRID), len(GRID), 3, 3))
    normal[..., 0, 0] = scale @ scale
    normal[..., 0, 1] = normal[..., 1, 0] = (u @ scale)[:, None]
    normal[..., 0, 2] = normal[..., 2, 0] = v @ scale
    normal[..., 1, 1] = (u * u).sum(axis=1)[:, None]
    normal[..., 2, 2] = (v * v).sum(axis=1)
    normal[..., 1, 2] = normal[..., 2, 1] = u @ v.T
    target = np.empty((len(GRID), len(GRID), 3))
    target[..., 0] = scale.sum()
    target[..., 1] = u.sum(axis=1)[:, None]
    target[..., 2] = v.sum(axis=1)
    ridge = 1e-10 * np.trace(normal, axis1=-2, axis2=-1)[..., None, None] * np.eye(3)
    coefficients = np.linalg.solve(normal + ridge, target[..., None])[..., 0]
    exponents = np.stack(np.meshgrid(GRID, GRID, indexing="ij"), axis=-1)
    # A negative E, A or B is no surface: it is lifted to the least value allowed, and the objective judges it there.
    theta = np.concatenate([np.log(np.maximum(coefficients, 1e-12)), exponents], axis=-1).reshape(-1, 5)
    theta = np.clip(theta, *form.bounds(np.exp(log_loss)))
    values = objective(form, log_loss, np.ones(len(log_loss)), theta, 10 * delta)
    return np.asarray(theta[np.argsort(values)[:N_STARTS]])


def _doubts_about_rows(rows: pd.DataFrame) -> list[str]:
    doubts = []
    n_runs = rows["stem"].nunique()
    if n_runs < MIN_RUNS:
        doubts.append(f"{n_runs} independent runs: intervals were found honest from {MIN_RUNS} on")
    compute = rows["n_params"] * rows["n_tokens"]
    decades = float(np.log10(compute.max() / compute.min()))
    if decades < MIN_DECADES:
        doubts.append(f"the runs span {decades:.2f} decades of compute: at least {MIN_DECADES:g} is wanted")
    return doubts


def _doubts_about_fit(
    form: SumOfPowers, log_loss: Array, theta: Array, converged: bool, draws: Array, draws_converged: NDArray[np.bool_]
) -> list[str]:
    doubts = []
    if not converged:
        doubts.append("the minimum was not reached to full precision")
    if (share := 1 - draws_converged.mean()) > 0.05:
        doubts.append(f"{share:.0%} of the bootstrap refits did not converge")
    lower, upper = form.bounds(np.exp(log_loss))
    for i, name in enumerate(PARAMETERS):
        stuck = (draws[:, i] <= lower[i]) | (draws[:, i] >= upper[i])
        if theta[i] <= lower[i] or theta[i] >= upper[i]:
            doubts.append(f"{name} lies on its bound: the runs do not determine it")
        elif stuck.mean() > 0.05:
            doubts.append(
                f"{name} lies on its bound in {stuck.mean():.0%} of the bootstrap refits: it is hardly determined"
            )
    jacobian = form.linearise(theta[None])[1][0]
    condition = float(np.linalg.cond(jacobian / np.linalg.norm(jacobian, axis=0)))
    if condition > MAX_CONDITION:
        doubts.append(
            f"ill-conditioned (condition number {condition:.1e}): N and D vary too much together "
            "to tell A, B and the best allocation apart"
        )
    return doubts
