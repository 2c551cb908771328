"""Runs that would decide an undecided transfer, and the interval to expect from them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from scaling.optima.drift import MAX_DRIFT, MAX_HALF_WIDTH, MIN_SIZES, MIN_SPAN, Transfer, half_width, values_of
from scaling.optima.optimum import fit_optimum
from scaling.optima.tokens_law import plural

MAX_SEEDS = 8
"""Most seeds that are proposed; if these would not decide, the drift is too near its bound for a decision (assumed)."""
STEPS_BEYOND = 2
"""Grid steps by which tested values are extended if an optimum lies outside them (assumed)."""
COLUMNS = ["along", "over", "add", "settings", "new_runs", "n_tokens", "half_width", "decides"]


def runs_to_decide(transfer: Transfer, n_tokens: float) -> pd.DataFrame:
    """List additions that would decide an undecided transfer, a row for each; no rows if it passed or failed.

    Columns: along, over; add: the addition in words; settings: key and new value in muscale's [transfer] table; new_runs
    and n_tokens: runs added to this transfer at its longest horizon, and their tokens; half_width: expected half of the drift's 90 %
    interval, octaves, NaN if the noise is unknown; decides: True if this is narrow enough, given that the estimate stays.

    The expectation is for parabolas with the median curvature found, at the tested and the added values, under the noise
    found about the parabolas, pooled over sizes. On planted grids it was a tenth to a quarter too small if every optimum is
    found, and up to 45 % if half of them are not: noise raises the curvature of the optima that are found.
    """
    if transfer.verdict != "not enough evidence":
        return pd.DataFrame(columns=COLUMNS)
    rows = transfer.rows
    seeds, values = sorted(rows["seed"].unique().tolist()), sorted(rows[transfer.over].unique().tolist())
    sizes = sorted(transfer.optima)
    records: list[list[Any]] = []

    def add(what: str, settings: dict[str, Any], new_runs: int, expected: float) -> None:
        records.append([what, settings, new_runs, new_runs * n_tokens, expected, expected <= _wanted(transfer)])

    beyond: list[float] = []
    if any(optimum.status == "edge" for optimum in transfer.optima.values()):
        settings, beyond = _extended(transfer, values)
        words = f"add {values_of(transfer.over)} {', '.join(f'{value:.3g}' for value in beyond)}"
        add(words, settings, len(beyond) * len(seeds) * len(sizes), expected_half_width(transfer, values=beyond))
    if new_sizes := _missing_sizes(sizes):
        words = f"add {transfer.along} {', '.join(f'{size:g}' for size in new_sizes)}"
        settings = {plural(transfer.along): [_plain(size) for size in sorted([*sizes, *new_sizes])]}
        add(words, settings, len(new_sizes) * len(values) * len(seeds), expected_half_width(transfer))
    flat = any(optimum.status == "flat" for optimum in transfer.optima.values())
    reach = expected_half_width(transfer, values=beyond) if beyond else transfer.half_width
    if flat or reach > _wanted(transfer):
        more = range(len(seeds) + 1, MAX_SEEDS + 1)
        enough = (n for n in more if expected_half_width(transfer, n, beyond) <= _wanted(transfer))
        count = max(next(enough, max(MAX_SEEDS, len(seeds) + 1)), 2 * len(seeds) if flat else 0)
        new_seeds = [n for n in range(count + len(seeds)) if n not in seeds][: count - len(seeds)]
        which = f"seed{'s' if new_seeds[1:] else ''} {', '.join(map(str, new_seeds))}"
        words = f"add {which} at {plural(transfer.along)} {', '.join(f'{s:g}' for s in sizes)}"
        runs = len(new_seeds) * (len(values) + len(beyond)) * len(sizes)
        add(words, {"seeds": [*seeds, *new_seeds]}, runs, expected_half_width(transfer, count, beyond))
    table = pd.DataFrame(records, columns=COLUMNS[2:])
    return table.assign(along=transfer.along, over=transfer.over)[COLUMNS]


def expected_half_width(transfer: Transfer, n_seeds: int | None = None, values: Sequence[float] = ()) -> float:
    """Expected half width of the drift's 90 % interval with `n_seeds` seeds (default: as many as now); NaN if unknown.

    Args:
        n_seeds: Number of all seeds, finished seeds included.
        values: further values to test.
    """
    optima = list(transfer.optima.values())
    curvatures = [o.curvature for o in optima if math.isfinite(o.curvature)]
    noisy = [o for o in optima if o.dof]
    if not curvatures or not noisy:
        return math.nan
    noise = math.sqrt(sum(o.dof * o.noise**2 for o in noisy) / sum(o.dof for o in noisy))
    seeds = n_seeds or transfer.rows["seed"].nunique()
    ends = []
    for size, optimum in (list(transfer.optima.items())[i] for i in (0, -1)):
        tested = transfer.rows.loc[transfer.rows[transfer.along] == size, transfer.over]
        x = np.log2([*tested.unique(), *values])
        log_loss = float(np.median(curvatures)) / 2 * (x - optimum.log2_rate) ** 2
        repeated = np.repeat(np.arange(seeds), len(x)).tolist()
        ends.append(fit_optimum(np.tile(2**x, seeds), np.exp(np.tile(log_loss, seeds)), seeds=repeated))
    small, large = ends
    errors = small.stderr_at(noise), large.stderr_at(noise)
    return half_width(errors, (max(1, small.dof), max(1, large.dof)), (seeds, seeds))


def _plain(size: float) -> float:
    return int(size) if size.is_integer() else size


def _wanted(transfer: Transfer) -> float:
    """Half width that decides if the estimate stays: a pass if the estimate is inside the bound, a fail if outside."""
    beyond = abs(transfer.drift_octaves) - MAX_DRIFT
    return beyond if beyond > 0 else MAX_HALF_WIDTH


def _missing_sizes(sizes: Sequence[float]) -> list[float]:
    """Doublings of the smallest size that are needed for enough sizes over a wide enough span."""
    missing: list[float] = []
    while len(every := sorted([*sizes, *missing])) < MIN_SIZES or every[-1] / every[0] < MIN_SPAN:
        wide_enough = every[-1] / every[0] >= MIN_SPAN
        doublings = (every[0] * 2**n for n in itertools.count(1 if wide_enough else math.ceil(math.log2(MIN_SPAN))))
        missing.append(next(size for size in doublings if size not in every))
    return missing


def _extended(transfer: Transfer, values: list[float]) -> tuple[dict[str, Any], list[float]]:
    """Extend the grid beyond its ends: on both sides for rates, since the settings give their number and span."""
    octaves = np.log2(values)
    step = float(octaves[-1] - octaves[0]) / (len(values) - 1)
    low, high = _sides(transfer, float(np.mean(octaves)))
    below = [values[0] * 2 ** (-step * n) for n in range(STEPS_BEYOND, 0, -1)]
    above = [values[-1] * 2 ** (step * n) for n in range(1, STEPS_BEYOND + 1)]
    if transfer.over == "rate":
        wider = float(octaves[-1] - octaves[0]) + 2 * STEPS_BEYOND * step
        span = float(f"{wider:.6g}")  # as many digits as the rates
        return {"rates": len(values) + 2 * STEPS_BEYOND, "octaves": span}, [*below, *above]
    beyond = [float(f"{value:.4g}") for value in (below if low else []) + (above if high else [])]
    return {f"over.{transfer.over}": sorted([*values, *beyond])}, beyond


def _sides(transfer: Transfer, middle: float) -> tuple[bool, bool]:
    """Whether an optimum lies below the tested values, and whether one lies above."""
    outside = [o.log2_rate for o in transfer.optima.values() if o.status == "edge"]
    return any(x < middle for x in outside), any(x > middle for x in outside)
