"""Importance of hyperparameters: shares of the variance of log loss over the searched box.

    y = level + Σ_j (slope_j · u_j + bend_j · u_j²) + Σ_c level_c[choice] + rest,      u_j in [−1, 1] over the box

The share of a hyperparameter is the variance of its term, with values spread evenly over the box, over the variance
of all terms and of the rest. The rest is the part that no hyperparameter explains alone: interactions, bends that are no parabola,
and noise between runs.

A user who decides what to search needs the hyperparameters that lead into the good region and move the loss there. In plain
variance a few runs far up the wall would dominate. So a loss counts in full up to the best fraction `within` of the
trials, and gradually less beyond: the farthest loss is at most twice as far from the best as the last one that counts in full.
(Hutter et al. 2014, "An efficient approach for assessing hyperparameter importance", cut the losses off at such a point,
which discards the order of the losses above.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import losses, numbers, require_columns
from scaling.checks import names as names_of
from scaling.drawing import Figure
from scaling.errors import ScalingError
from scaling.minimizers.bootstrap import stem_weights
from scaling.presentation import lines
from scaling.quantiles import tails
from scaling.search.search_figures import draw_importance, importance_data
from scaling.serialization import JsonResult, TableLayout

TRIALS_PER_COEFFICIENT = 2
"""Fewest trials for each coefficient (assumed): with fewer, the residuals hardly determine the noise of the shares."""
PARABOLA = np.array([[1 / 3, 0.0], [0.0, 4 / 45]])
"""Variance of slope·u + bend·u² with u uniform on [−1, 1]: slope²/3 + 4·bend²/45."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Importance(JsonResult):
    """Shares of the variance of log loss, with intervals and noise.

    Attributes:
        table: one row per hyperparameter, the most important first: `share`; `low` and `high`, the interval over trials;
            `noise`, the mean share of the same column after shuffling; `significant`: True if `low` is above `noise`. At a
            level of .9, one in hundreds of irrelevant columns was significant; of columns with 3 % of the whole variance,
            in 40 trials with 10 % noise, 8 in 10 were significant (measured on planted sets).
        rest: share that no hyperparameter explains alone: interactions, misfit, noise.
        within: the best fraction of the trials, whose losses count in full.
        n_trials, n_diverged: number of trials used, and number of rows left out because their runs diverged.
    """

    rest: float
    level: float
    within: float
    n_trials: int
    n_diverged: int
    table: Annotated[pd.DataFrame, TableLayout("records", index="hyperparameter")] = field(repr=False)

    @property
    def significant(self) -> list[str]:
        """Hyperparameters whose share exceeds the noise, the most important first."""
        return [str(name) for name in self.table.index[self.table["significant"]]]

    @property
    def status(self) -> str:
        """`ok`, or the hyperparameters within the noise."""
        unclear = [str(name) for name in self.table.index[~self.table["significant"]]]
        return f"within noise: {', '.join(unclear)}" if unclear else "ok"

    def plot(self) -> Figure:
        """Draw bars with intervals; grey bars lie within the noise."""
        return draw_importance(importance_data(self.table))

    def __str__(self) -> str:
        shares = {
            str(name): f"{row['share']:6.1%}, {row['low']:.1%} to {row['high']:.1%}"
            + ("" if row["significant"] else f": within noise ({row['noise']:.1%})")
            for name, row in self.table.iterrows()
        }
        about = {
            "rest": f"{self.rest:6.1%} interactions, misfit and noise",
            "from": f"{self.n_trials} trials, the best {self.within:.0%} in full; {self.n_diverged} diverged left out",
            "intervals": f"{self.level:.0%} over trials",
            "status": self.status,
        }
        return lines(shares | about)


def hyperparameter_importance(
    rows: pd.DataFrame,
    coordinates: Sequence[str],
    categorical: Sequence[str] = (),
    n_bootstrap: int = 200,
    seed: int = 0,
    *,
    box: Mapping[str, tuple[float, float]] | None = None,
    within: float = 0.5,
    level: float = 0.9,
) -> Importance:
    """Share of the variance of log loss over the box that each hyperparameter explains alone.

    The variance that the coefficients' errors add is subtracted from shares, and no share is below zero. Intervals come from a
    bootstrap over trials. For comparison the table has the share that each column reaches when it is shuffled over the trials.

    Args:
        rows: one row per finished run: the named columns, `loss` (nats per token; NaN if diverged, and then left out), and
            `trial` if trials were repeated over seeds: rows of one trial are resampled together. All runs must be
            comparable: one size, one budget.
        coordinates: columns of continuous hyperparameters, in the scale in which they were searched (the unit cube, or
            log2 of a rate): at least three values each.
        categorical: columns of choices, at least two values each.
        n_bootstrap: number of refits for the intervals, and for each shuffled column.
        seed: seed of refits and shuffles; the same seed gives the same answer.
        box: least and greatest searched value of each coordinate; by default those of the trials.
        within: fraction of the trials, 0 < within ≤ 1, whose losses count in full; 1 counts all.

    Raises:
        ValueError: a column is missing or breaks its rule, a trial has no name, or an argument is out of its range.
        ScalingError: fewer than TRIALS_PER_COEFFICIENT trials for each coefficient, columns that always move together,
            or losses that are all equal.
    """
    names = [*coordinates, *categorical]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"coordinates and categorical must name each column once, and at least one, got {names}")
    ends = tails(level)
    if not 0 < within <= 1 or n_bootstrap < 20:
        raise ValueError(f"need 0 < within ≤ 1 and n_bootstrap ≥ 20, got {within!r} and {n_bootstrap!r}")
    require_columns(rows, (*names, "loss"))
    finished = rows[np.isfinite(losses(rows))]
    box = dict(box or {})
    if not box.keys() <= set(coordinates):
        raise ValueError(f"box must be of coordinates, got {', '.join(box.keys() - set(coordinates))}")
    blocks = {name: _parabola(finished, name, box.get(name)) for name in coordinates}
    blocks |= {name: _levels(finished, name) for name in categorical}
    trials = pd.factorize(names_of(finished, "trial"))[0] if "trial" in finished else np.arange(len(finished))
    n_trials, n_coefficients = len(np.unique(trials)), 1 + sum(block.columns.shape[1] for block in blocks.values())
    if n_trials < TRIALS_PER_COEFFICIENT * n_coefficients:
        raise ScalingError(
            f"{n_trials} finished trials cannot determine {n_coefficients} coefficients of {', '.join(names)}: "
            f"need {TRIALS_PER_COEFFICIENT * n_coefficients}, or fewer hyperparameters"
        )
    y = _compressed(np.log(losses(finished)), within)
    design = np.hstack([np.ones((len(y), 1)), *(block.columns for block in blocks.values())])
    if np.linalg.matrix_rank(design) < n_coefficients:
        raise ScalingError(f"some of {', '.join(names)} always move together in these trials: leave one out")
    if np.ptp(y) == 0:
        raise ScalingError(f"all {len(y)} losses are equal: there is no variance to share out")

    terms = list(blocks.values())
    theta, inverse, rest = _fit(design[None], y, np.ones((1, len(y))))
    error = _errors(inverse, rest, terms)
    share, remainder = _shares(_variances(theta, terms) - error, rest)
    refits, _, rests = _fit(design[None], y, stem_weights(trials, n_bootstrap, seed))
    # Residuals of a fit are smaller than the errors, and so is the spread of refits: correct it as MacKinnon & White
    # (1985) do, HC1. A draw has the estimate's error and its own error, so subtract the error twice.
    refits = theta + np.sqrt(len(y) / (len(y) - n_coefficients)) * (refits - theta)
    draws, _ = _shares(_variances(refits, terms) - 2 * error, rests)
    low, high = np.quantile(draws, ends, axis=0)
    share = share[0]
    noise = _by_chance(design, y, trials, terms, n_bootstrap, seed)
    table = pd.DataFrame(
        {"share": share, "low": np.minimum(low, share), "high": np.maximum(high, share), "noise": noise},
        index=pd.Index(names, name="hyperparameter"),
    )
    return Importance(
        table=table.assign(significant=table["low"] > table["noise"]).sort_values(
            "share", ascending=False, kind="stable"
        ),
        rest=float(remainder[0]),
        level=level,
        within=within,
        n_trials=n_trials,
        n_diverged=len(rows) - len(finished),
    )


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Columns of one hyperparameter [K, P], and the matrix [P, P] of the quadratic form from its coefficients to its variance."""

    columns: Array
    measure: Array


def _parabola(rows: pd.DataFrame, name: str, box: tuple[float, float] | None) -> _Block:
    values = numbers(rows, name, minimum=-np.inf)
    if (n := len(np.unique(values))) < 3:
        raise ValueError(
            f"{name} must take at least 3 values to be a coordinate, got {n}: make it categorical or fixed"
        )
    tested = (float(values.min()), float(values.max()))
    low, high = box or tested
    if not low <= tested[0] <= tested[1] <= high:
        raise ValueError(f"{name} must lie in its box, {low:g} to {high:g}, got {tested[0]:g} to {tested[1]:g}")
    u = (2 * values - high - low) / (high - low)
    return _Block(columns=np.column_stack([u, u**2]), measure=PARABOLA)


def _levels(rows: pd.DataFrame, name: str) -> _Block:
    codes, choices = pd.factorize(rows[name], use_na_sentinel=False)
    if len(choices) < 2:
        raise ValueError(f"{name} must take at least 2 values to be compared, got {len(choices)}: leave it out")
    # The first choice is the level itself; the variance over equally likely choices does not depend on which one is first.
    n = len(choices)
    return _Block(
        columns=(codes[:, None] == np.arange(1, n)).astype(np.float64),
        measure=np.eye(n - 1) / n - np.ones((n - 1, n - 1)) / n**2,
    )


def _compressed(log_loss: Array, within: float) -> Array:
    """Excess of log loss over the best: unchanged up to c, the excess of the best fraction `within`; c·(2 − c / excess) beyond.

    Beyond c the slope is (c / excess)², the weight of a run that high in `fit_optimum`.
    """
    excess = log_loss - log_loss.min()
    knee = float(np.quantile(excess, within))
    beyond = excess > knee
    return np.where(beyond, knee * (2 - knee / np.where(beyond, excess, 1)), excess) if knee else excess


def _fit(designs: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Least squares of J designs [J or 1, K, P] under J weightings [J or 1, K]: theta [J, P], inverse [J, P, P], rest [J]."""
    weighted = designs * weights[:, :, None]
    inverse = np.linalg.inv(np.swapaxes(weighted, 1, 2) @ designs)
    theta = (inverse @ (np.swapaxes(weighted, 1, 2) @ y)[:, :, None])[:, :, 0]
    residual = y - (designs @ theta[:, :, None])[:, :, 0]
    rest = np.average(residual**2, axis=1, weights=np.broadcast_to(weights, residual.shape))
    return np.asarray(theta), np.asarray(inverse), np.asarray(rest * len(y) / (len(y) - designs.shape[2]))


def _columns(terms: list[_Block]) -> Iterator[tuple[_Block, slice]]:
    """Yield each hyperparameter with its columns in the design; the first column of the design is the level's."""
    first = 1
    for term in terms:
        last = first + term.columns.shape[1]
        yield term, slice(first, last)
        first = last


def _variances(theta: Array, terms: list[_Block]) -> Array:
    """Variance over the box of each hyperparameter's term, [J, H], from the coefficients [J, P]."""
    own = [np.einsum("jp,pq,jq->j", theta[:, at], term.measure, theta[:, at]) for term, at in _columns(terms)]
    return np.column_stack(own)


def _errors(inverse: Array, rest: Array, terms: list[_Block]) -> Array:
    """Mean excess of `_variances` that the coefficients' errors add, [J, H]."""
    own = [rest * np.einsum("jpq,qp->j", inverse[:, at, at], term.measure) for term, at in _columns(terms)]
    return np.column_stack(own)


def _shares(variances: Array, rest: Array) -> tuple[Array, Array]:
    """Shares of the hyperparameters [J, H] and of the rest [J], none below zero."""
    variances = np.maximum(variances, 0)
    total = variances.sum(axis=1) + rest
    return variances / total[:, None], rest / total


def _by_chance(
    design: Array, y: Array, trials: NDArray[np.int64], terms: list[_Block], n_draws: int, seed: int
) -> Array:
    """Mean share that each hyperparameter gets when its values are shuffled over the trials, [H].

    Shuffles that make it move together with another hyperparameter, as can happen with few values over few trials, are left out,
    since such trials are refused; the share is 1 if no shuffle is left.
    """
    generator = np.random.default_rng([seed, 1])
    first_row = np.unique(trials, return_index=True)[1]
    found = []
    for j, (_, at) in enumerate(_columns(terms)):
        order = generator.permuted(np.tile(first_row, (n_draws, 1)), axis=1)[:, trials]
        shuffled = np.tile(design, (n_draws, 1, 1))
        shuffled[:, :, at] = design[:, at][order]
        shuffled = shuffled[np.linalg.matrix_rank(shuffled) == design.shape[1]]
        if not len(shuffled):
            found.append(1.0)
            continue
        theta, inverse, rest = _fit(shuffled, y, np.ones((1, len(y))))
        shares, _ = _shares(_variances(theta, terms) - _errors(inverse, rest, terms), rest)
        found.append(float(shares[:, j].mean()))
    return np.array(found)
