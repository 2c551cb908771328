"""Reasons why a forecast is unsupported: one function for forecasts, backtests, next runs, decisions and plans.

A reason is kept if forecasts missed the targets that it flags more often, or by more, than other targets.
`tests/benchmarks/forecast.py` prints both for each reason over the public ladders, one family left out at a time. RESULTS.md has the
figures, also of dropped reasons, which predicted no miss. Reasons depend only on the rows and the forecast's fits, not on the fitted
form. Each end of a range takes two runs, and misfit is a median, so one corrupted row extends no support.
"""

import math

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import positive
from scaling.fits.ensemble import MAD, Ensemble
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import NATS, compute_flops

MIN_RUNS = 10
"""Fewest independent runs. Runs drawn at random from the public ladders give errors of 1.8 % (7 runs), 1.7 % (8), 1.5 % (10) and
1.2 % (12); the 95 % intervals widen accordingly and hold 93 to 97 % from 7 on (`tests/benchmarks/forecast.py --few-runs`)."""
MAX_DECADES_BEYOND = 2.5
"""Most decades of compute above the second largest run: the tested range. From two to 2.5 decades above the largest run, 95 %
intervals held all 13 held-out runs of finished ladders, but were 42 % wide. The mean error was 5.5 %, against 1.1 % below two
decades (measured)."""
RATIO_MARGIN = 2.0
"""Largest factor of D/N beyond the range that two runs reach. Outside, 95 % intervals held 79 %, inside 96 % (measured)."""
MAX_MISFIT = 0.02
"""Largest standard deviation, by the median, of log residuals of the forecast's law. Beyond, 95 % intervals held 89 %, below 94 %.
Losses in mid-schedule have 1.6 to 4.7 %, annealed losses .1 to 2.3 % (measured)."""
LEAST_FLOOR = 0.4
"""Least E of the forecast's fits as a share of the least loss that they give a run. Below, 95 % intervals held 84 %, above 95 %
(measured, on losses in mid-schedule). On ladders planted with shares of .05 to .6, 90 % intervals held 77 % of 350 sets below .3,
87 % of 188 from .3 to .4 and 93 % of 162 above (`tests/benchmarks/low_floor.py`)."""
SPARSITY_MARGIN = 1.25
"""Largest factor of sparsity beyond the range that two runs reach: equal experts give sizes sparsities that differ by up to 1.3."""
NEARLY_ONE_SIZE = 1.5
"""Factor between the smallest and the largest N up to which runs say nothing of sizes further away. Mixtures of one width differ in N
by their routers (assumed)."""
ONE_LENGTH = 0.05
"""Relative difference of tokens within which a target has the one length of all runs (assumed)."""
MIN_RUNS_ONE_SIZE = 4
"""Fewest independent runs of one size: with three, the prior alone determines E, beta and D_0 (assumed; planted intervals held)."""
MAX_TIMES = 4.0
"""Most tokens over the longest run of one size: the tested range (`tests/benchmarks/one_size.py`)."""
MAX_RISE = 2.5
"""Largest slope of log loss in log tokens over the longest runs of one size, in standard errors. None of 3,000 planted falling ladders
and of 298 public ones exceeds it; of five runs that rise by .7 % at each doubling, 92 to 100 % do (`tests/benchmarks/one_size.py`).
Of ladders of several sizes, the largest slope in N or in D over the upper half."""
_USUAL_NOISE, _USUAL_RUNS = 0.004, 4
"""Noise of log loss that is usual for finished runs, and the number of residuals that it counts for."""
_LEAST_APART = 0.2
"""Least spread of log N, or log D, that the other one leaves, at which a slope in it is measured (assumed)."""
MOST_NATS = math.log(1e6)
"""Loss of a uniform guess among a million tokens; a larger number is no loss in nats."""


def unsupported(
    rows: pd.DataFrame, ensemble: Ensemble | None, n_params: float, n_tokens: float, **columns: float
) -> dict[str, str]:
    """Return sentences by the short name of the reason; none if a forecast at (N, D) is supported.

    Args:
        rows: n_params, n_tokens, stem and loss of the runs, and the law's further columns; the loss of a planned run is NaN.
        ensemble: the forecast's fits; None if a law has no forecast: then only the range of the runs is checked.

    Raises:
        ValueError: N or D is not finite and positive.
    """
    n_params, n_tokens = float(positive("n_params", n_params)), float(positive("n_tokens", n_tokens))
    return (
        few_runs(rows)
        | ({} if ensemble is None else _of_fits(rows, ensemble))
        | _of_target(rows, n_params, n_tokens)
        | (_of_sparsity(rows, n_tokens, columns[SPARSITY]) if SPARSITY in columns else {})
    )


def few_runs(rows: pd.DataFrame) -> dict[str, str]:
    """Reason if the rows come from fewer than MIN_RUNS independent runs, or MIN_RUNS_ONE_SIZE if all have one size."""
    least = MIN_RUNS_ONE_SIZE if has_one_size(rows) else MIN_RUNS
    lacking = least - rows["stem"].nunique()
    if lacking <= 0:
        return {}
    return {"few runs": f"{least - lacking} independent runs: intervals were validated from {least} on, add {lacking}"}


def _of_fits(rows: pd.DataFrame, ensemble: Ensemble) -> dict[str, str]:
    made, found = rows[rows["loss"].notna()], {}
    predicted = ensemble.law.loss(**made[[*ensemble.form.run_columns]])
    typical = MAD * float(np.median(np.abs(np.log(predicted / made["loss"]))))
    if typical > MAX_MISFIT:
        found["misfit"] = (
            f"losses typically lie {typical:.1%} off the law: finished runs of one recipe were seen within {MAX_MISFIT:.0%}, "
            "losses in mid-schedule or of several recipes beyond"
        )
    if (share := floor_share(rows, ensemble)) < LEAST_FLOOR:
        found["low floor"] = (
            f"the runs end far above the floor of the loss: E is {share:.3g} of the least loss, below {LEAST_FLOOR:g}, the least at "
            "which forecasts were tested; larger or longer runs help"
        )
    slopes = (
        {} if has_one_size(rows) else _slopes(made, [name for name in (SPARSITY,) if name in ensemble.form.columns])
    )
    what = max(slopes, key=slopes.__getitem__, default="")
    if what and slopes[what] > MAX_RISE:
        found["rising"] = (
            f"the losses of the larger runs rise with the {what}, by {slopes[what]:.2g} standard errors: the law can only fall; too "
            "high a rate or repeated text may cause it"
        )
    if ensemble.law.loss_unit == NATS and (most := float(made["loss"].max())) > MOST_NATS:
        found["unit"] = (
            f"a loss of {most:.4g} nats per token is worse than a uniform guess among a million tokens, as a perplexity is: "
            "forecasts were tested on losses"
        )
    return found


def floor_share(rows: pd.DataFrame, ensemble: Ensemble) -> float:
    """E of the forecast's fits over the second least loss that they give a finished run."""
    made = rows[rows["loss"].notna()]
    floor = float(np.exp(np.mean([np.log(law["E"]) for law in ensemble.variants.values()])))
    return floor / _within_two(ensemble.law.loss(**made[[*ensemble.form.run_columns]]))[0]


def _of_target(rows: pd.DataFrame, n_params: float, n_tokens: float) -> dict[str, str]:
    if has_one_size(rows):
        return _of_length(rows, n_params, n_tokens)
    found = {}
    low, high = _within_two(compute_flops(rows["n_params"], rows["n_tokens"]))
    flops, reach = float(compute_flops(n_params, n_tokens)), 10**MAX_DECADES_BEYOND
    if flops > high * reach:
        found["far"] = (
            f"{np.log10(flops / high):.2f} decades of compute above the second largest run: tested to {MAX_DECADES_BEYOND:g}; two "
            f"runs of {flops / reach:.2g} FLOPs would bring it inside"
        )
    if flops < low:
        found["below"] = f"{flops:.3g} FLOPs lie below the second smallest run's {low:.3g}: tested upwards only"
    low, high = float(rows["n_params"].min()), float(rows["n_params"].max())
    if high < NEARLY_ONE_SIZE * low and not low / NEARLY_ONE_SIZE <= n_params <= high * NEARLY_ONE_SIZE:
        found["sizes"] = (
            f"{n_params:.4g} parameters: all runs have {low:.4g} to {high:.4g}, so they say next to nothing of other sizes; add runs "
            "of other widths or depths"
        )
    low, high = _within_two(rows["n_tokens"] / rows["n_params"])
    ratio = n_tokens / n_params
    if not low / RATIO_MARGIN <= ratio <= high * RATIO_MARGIN:
        found["ratio"] = (
            f"{ratio:.3g} tokens per parameter: tested within {RATIO_MARGIN:g}× of what two runs have, {low:.3g} to {high:.3g}; "
            f"two at {ratio * RATIO_MARGIN if ratio < low else ratio / RATIO_MARGIN:.3g} would bring it inside"
        )
    return found


def has_one_size(rows: pd.DataFrame) -> bool:
    """Return whether all rows have one `n_params`, for which only a law of tokens can be fitted."""
    sizes = rows["n_params"].to_numpy()
    return len(sizes) > 0 and bool((sizes == sizes[0]).all())


def _of_length(rows: pd.DataFrame, n_params: float, n_tokens: float) -> dict[str, str]:
    """Reasons about size and tokens under a law of one size."""
    found, size = {}, float(rows["n_params"].iloc[0])
    low, longest = _within_two(rows["n_tokens"])[0], float(rows["n_tokens"].max())
    if n_params != size:
        found["size"] = f"{n_params:.4g} parameters: all runs have {size:.4g}, so they say nothing of other sizes"
    if n_tokens > MAX_TIMES * longest:
        found["far"] = (
            f"{n_tokens / longest:.3g} times the tokens of the longest run: tested to {MAX_TIMES:g}; a run of "
            f"{n_tokens / MAX_TIMES:.3g} tokens would bring it inside"
        )
    if "loss" in rows and (slope := _rise(rows[rows["loss"].notna()])) > MAX_RISE:  # planned runs have none
        found["rising"] = (
            f"the losses of the longest runs rise with the tokens, by {slope:.2g} standard errors: the law can only fall, tested to "
            f"{MAX_RISE:g}; repeated text or too high a rate may cause it"
        )
    if n_tokens < low:
        found["below"] = f"{n_tokens:.3g} tokens lie below the second shortest run's {low:.3g}: tested upwards only"
    return found


def _rise(rows: pd.DataFrame) -> float:
    """Largest slope of log loss in log tokens over the two or more longest lengths, in standard errors; -inf below two lengths.

    The noise is that of the residuals of a parabola over all runs, pooled with the usual noise.
    """
    x, y = np.log(rows["n_tokens"].to_numpy(np.float64)), np.log(rows["loss"].to_numpy(np.float64))
    lengths = np.unique(x)
    degree = min(2, len(lengths) - 1)
    if degree < 1:
        return -math.inf
    centred = x - x.mean()
    residuals = y - np.polyval(np.polyfit(centred, y, degree), centred)
    variance = (_USUAL_RUNS * _USUAL_NOISE**2 + residuals @ residuals) / (_USUAL_RUNS + len(x) - degree - 1)
    slopes = []
    for first in lengths[:-1]:
        longer = x >= first
        away = x[longer] - x[longer].mean()
        slopes.append(float(away @ y[longer] / math.sqrt(variance * (away @ away))))
    return max(slopes)


def _slopes(rows: pd.DataFrame, further: list[str]) -> dict[str, float]:
    """Slopes of log loss in log N and log D over the upper half of each, the others held, in standard errors.

    Where N and D move together, as at one D/N, the slope in log compute takes their place.
    """
    log_n, log_d, *others = np.log(rows[["n_params", "n_tokens", *further]].to_numpy(np.float64).T)
    held = [other for other in others if np.ptp(other) > 0]
    if min(_apart(log_n, [log_d, *held]), _apart(log_d, [log_n, *held])) < _LEAST_APART:
        along = {"compute": (log_n + log_d, held)}
    else:
        along = {"parameters": (log_n, [log_d, *held]), "tokens": (log_d, [log_n, *held])}
    y = np.log(rows["loss"].to_numpy(np.float64))
    found = {}
    for name, (x, rest) in along.items():
        values = np.unique(x)
        upper = x >= values[len(values) // 2]
        design = np.column_stack([np.ones(upper.sum()), x[upper], *(other[upper] for other in rest)])
        freedom = len(design) - design.shape[1]
        apart = _apart(x[upper], [other[upper] for other in rest])
        if freedom < 2 or apart < _LEAST_APART:
            continue
        slope = np.linalg.lstsq(design, y[upper], rcond=None)[0]
        residuals = y[upper] - design @ slope
        variance = (_USUAL_RUNS * _USUAL_NOISE**2 + residuals @ residuals) / (_USUAL_RUNS + freedom)
        found[name] = float(slope[1] * apart * math.sqrt(len(design) / variance))
    return found


def _apart(x: Array, others: list[Array]) -> float:
    """Standard deviation of what the other logarithms leave of one."""
    design = np.column_stack([np.ones(len(x)), *others])
    return float(np.std(x - design @ np.linalg.lstsq(design, x, rcond=None)[0]))


def _of_sparsity(rows: pd.DataFrame, n_tokens: float, sparsity: float) -> dict[str, str]:
    """Reasons about the sparsity and, if all runs have one length, about the length."""
    found = {}
    low, high = _within_two(rows[SPARSITY])
    if not low / SPARSITY_MARGIN <= sparsity <= high * SPARSITY_MARGIN:
        found["sparsity"] = (
            f"a sparsity of {sparsity:.4g}: tested within {SPARSITY_MARGIN:g}× of what two runs have, {low:.4g} to {high:.4g}; "
            "two runs at this sparsity would bring it inside"
        )
    length, longest = rows["n_tokens"].min(), rows["n_tokens"].max()
    if length == longest and not math.isclose(n_tokens, length, rel_tol=ONE_LENGTH):
        found["length"] = f"{n_tokens:.3g} tokens: all runs have {length:.3g}, so they do not show the effect of tokens"
    return found


def _within_two(values: Array | pd.Series) -> tuple[float, float]:
    """Second least and second largest value, which one row alone can't extend."""
    ordered = np.sort(np.asarray(values, np.float64))
    return float(ordered[1]), float(ordered[-2])
