"""Signal of a score over its noise: do runs of different size and length differ by more than a run differs from its repetition?

    signal    (largest − least final score) / mean, over sizes and lengths; a size and length with several seeds has their mean
    noise     standard deviation / mean, of seeds at one size and length or of a run's last checkpoints, whichever is larger

Signal and ratio are those of Heineman et al. 2508.13144, who take the last checkpoints of a run for the noise. Checkpoints of a small
run still improve, so their deviations here are from a straight line in ln tokens. The end of a run is left out of that line, because
annealing lifts the end off it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import FOUND_AS, column_name, names, numbers, require_columns, require_distinct, row_name, seeds
from scaling.errors import ScalingError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.runs import Table, naming, read_runs, unannealed, without_stated
from scaling.presentation import lines
from scaling.serialization import JsonResult

NEARLY_ALL = 0.99
"""Least share of a run's tokens at its end: runs have whole batches (assumed)."""
LAST_CHECKPOINTS = 5
"""Checkpoints of a run, counted from its end, that show the noise (assumed; 2508.13144 takes up to 30 of longer runs)."""
MIN_RATIO = 5.0
"""Least ratio at which a score is forecast. Twenty runs that differ by noise alone have a range of 5.0 standard deviations or more in
one case of twenty (studentized range), ten runs 4.5."""
_LINE = 2  # degrees of freedom of a straight line


@dataclass(frozen=True, kw_only=True, eq=False)
class SignalToNoise(JsonResult):
    """Spread of a score between runs over its noise.

    Attributes:
        signal, noise: as shares of the mean score.
        n_points: sizes and lengths behind the signal.
        n_seeds: seeds behind the noise, in addition to the first of each size and length.
        n_checkpoints: checkpoints behind the noise.
    """

    DERIVED = ("ratio",)

    metric: str
    signal: float
    noise: float
    n_points: int
    n_seeds: int
    n_checkpoints: int

    @property
    def ratio(self) -> float:
        """Signal over noise; infinite without noise, 0 if there is neither."""
        if not self.noise:
            return math.inf if self.signal else 0.0
        return self.signal / self.noise

    def __str__(self) -> str:
        return lines(
            {
                self.metric: f"signal to noise {self.ratio:.3g}",
                "signal": f"{self.signal:.3g} of the mean, over {self.n_points} sizes and lengths",
                "noise": f"{self.noise:.3g} of the mean, of {self.n_seeds} further seeds and {self.n_checkpoints} checkpoints",
            }
        )


def signal_to_noise(runs: Table, metric: str = "accuracy", *, columns: Mapping[str, str] = NO_COLUMNS) -> SignalToNoise:
    """Compare the spread of a score between runs with its noise.

    Args:
        runs: one row per evaluation, a table or file: `n_params`, `n_tokens` of the run, and the metric's column. Optional `tokens`,
            those that the evaluated checkpoint has seen; without it every row is the end of a run, except that of a run named by
            `columns` the last row is. A row whose `annealed` is False is a checkpoint, even at the end. Optional `run` or `seed`,
            which tell runs of one size and length apart. Rows without a score, or with a reason in `left_out`, are left out.
        columns: as for `fit`.

    Raises:
        ValueError: a column is missing or breaks its rule, or a seed occurs twice, or a row repeats another.
        ScalingError: there are neither two seeds of one size and length nor three checkpoints before the end of a run, or all runs
            have one size and length.
    """
    ends, checkpoints = ends_and_checkpoints(runs, metric, columns)
    point = ends.groupby(["n_params", "n_tokens"])[metric]
    final = point.mean()
    if len(final) < 2:
        raise ScalingError(f"{metric}: need runs of two sizes or lengths for a signal, got {len(final)}")
    of_seeds = (ends[metric] - point.transform("mean")).to_numpy(np.float64)
    lasts = [run.sort_values("tokens").tail(LAST_CHECKPOINTS) for _, run in checkpoints.groupby("run")]
    lasts = [run for run in lasts if len(run) > _LINE]
    of_checkpoints = np.concatenate([*(_off_line(run, metric) for run in lasts), np.zeros(0)])
    n_seeds, n_free = len(ends) - len(final), len(of_checkpoints) - _LINE * len(lasts)
    if not (n_seeds or n_free):
        raise ScalingError(
            f"{metric}: the noise needs two seeds of one size and length, or {_LINE + 1} checkpoints before the end of a run; "
            f"got {len(ends)} runs and {len(checkpoints)} checkpoints"
        )
    noise = max(_deviation(of_seeds, n_seeds), _deviation(of_checkpoints, n_free))
    mean = float(final.mean()) or 1.0
    return SignalToNoise(
        metric=metric,
        signal=float(np.ptp(final)) / mean,
        noise=noise / mean,
        n_points=len(final),
        n_seeds=n_seeds,
        n_checkpoints=len(of_checkpoints),
    )


def ends_and_checkpoints(
    runs: Table, metric: str, columns: Mapping[str, str] = NO_COLUMNS
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows at the end of a run, and the other rows, each with a column `run`; for the table of `signal_to_noise`.

    Raises:
        ValueError: for the reasons of `signal_to_noise`.
    """
    table = read_runs(runs, columns)
    if metric not in table and table.attrs.get(FOUND_AS, {}).get("loss") == metric:
        table = table.rename(columns={"loss": metric})  # a metric in bits per byte was read as the loss
    with naming(runs):
        require_columns(table, ("n_params", "n_tokens", metric))
        table = without_stated(table[table[metric].notna()], annealed=False)
        require_distinct(table)
        n_params, n_tokens = numbers(table, "n_params"), numbers(table, "n_tokens")
        scores = numbers(table, metric, inclusive=True)
        tokens = numbers(table, "tokens") if "tokens" in table else n_tokens
        if "tokens" not in table and "run" in table.attrs.get(FOUND_AS, {}):  # n_tokens are those so far
            n_tokens = pd.Series(tokens).groupby([n_params, names(table, "run")]).transform("max").to_numpy()
        if (late := tokens > n_tokens).any():
            first = int(np.argmax(late))
            raise ValueError(
                f"{column_name(table, 'tokens')} must be at most n_tokens = {n_tokens[first]:g}, the run's end, got "
                f"{tokens[first]:g} in row {row_name(table, first)}"
            )
        table = table.assign(n_params=n_params, n_tokens=n_tokens, tokens=tokens, **{metric: scores})
        name = names(table, "run") if "run" in table else seeds(table, "n_params", "n_tokens", "tokens")
        run = [
            f"{of:g} parameters, {to:g} tokens, {each}" for of, to, each in zip(n_params, n_tokens, name, strict=True)
        ]
        last = pd.Series(tokens).groupby(run).transform("max").to_numpy()
        at_end = (tokens == last) & (tokens >= NEARLY_ALL * n_tokens)
        if "annealed" in table:
            at_end &= ~unannealed(table["annealed"])
        return table[at_end].assign(run=np.array(run)[at_end]), table[~at_end].assign(run=np.array(run)[~at_end])


def _off_line(run: pd.DataFrame, metric: str) -> Array:
    """Deviations of a run's checkpoints from a straight line in ln tokens."""
    x, y = np.log(run["tokens"].to_numpy()), run[metric].to_numpy(np.float64)
    return np.asarray(y - np.polyval(np.polyfit(x, y, 1), x))


def _deviation(residuals: Array, freedom: int) -> float:
    return math.sqrt(float((residuals**2).sum()) / freedom) if freedom else 0.0
