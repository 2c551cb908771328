"""Early stopping replayed on runs that all went to the end: pure functions of a table of signals and final losses."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from muscale.search.protocols import Start
from muscale.search.record import Record, RungResult
from muscale.search.schedulers import Asha
from muscale.store.ledger import Ledger

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

Way = Literal["corrected", "chained", "rung", "worst"]
"""Rung's loss + median of (final - rung) of the trials that ended; + sum of the medians from rung to rung; as it is; 1.01 x the
worst final loss."""
_WORSE = 1.01  # as a divergence is reported


def rank_correlation(signal: Array, final: Array) -> float:
    """Spearman's, over [n] trials; a NaN is a divergence, and ranks last. NaN of fewer than two."""
    if len(signal) < 2:
        return math.nan
    ranks = [rankdata(np.where(np.isnan(values), np.inf, values)) for values in (signal, final)]
    return float(np.corrcoef(ranks)[0, 1])


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One sweep with early stopping.

    Attributes:
        reached: Of each trial, the last rung that it was measured at, `n_rungs` for its end, -1 if it never began. [n]
        spent: What it cost all together, in full runs.
    """

    reached: Integers
    spent: float

    def regret(self, final: Array) -> float:
        """Final loss of the best trial that ended over that of the best of all, nats; of none, infinite."""
        ended = final[(self.reached == self.reached.max()) & ~np.isnan(final)]
        return float(ended.min() - np.nanmin(final)) if len(ended) else math.inf


class _Nowhere:
    """In place of a ledger: a replay is not kept."""

    def sweep_rows(self, _sweep: str) -> dict[str, list[dict[str, Any]]]:
        return {table: [] for table in ("rounds", "trials", "rungs", "decisions")}

    def __getattr__(self, name: str) -> Callable[..., list[dict[str, Any]]]:
        return lambda *args, **kwargs: []


def successive_halving(
    signals: Array,
    costs: Sequence[float],
    order: Sequence[int],
    *,
    reduction: int,
    workers: int = 4,
    budget: float = math.inf,
) -> Replay:
    """The platform's own ASHA, asked as a sweep asks it.

    Args:
        signals: What is compared, [n, n_rungs], NaN after a divergence.
        costs: From each rung to the next in full runs, measuring included, the last one to the end, [n_rungs + 1].
        order: In which the trials begin.
        reduction: Of the trials at a rung, one in so many goes on.
        workers: That run trials at the same time; each takes time as its costs.
        budget: Full runs; once it is spent no trial begins.
    """
    n_rungs = signals.shape[1]
    rule, record = Asha(top=n_rungs, eta=reduction), Record(cast(Ledger, _Nowhere()), "")
    reached = np.full(len(signals), -1)
    waiting, spent, now = list(order), 0.0, 0.0
    begun: list[int] = []  # trial of each number in the record
    running: list[tuple[float, int, int]] = []  # time, number, rung it comes to
    while True:
        while len(running) < workers:
            move = rule.next(record, may_start=bool(waiting) and spent < budget)
            if move is None:
                break
            if isinstance(move, Start):
                number = record.start({}, move.until)
                begun.append(waiting.pop(0))
            else:
                number = move.trial
                record.go_on(number, move.until)
            spent += costs[move.until]
            heapq.heappush(running, (now + costs[move.until], number, move.until))
        if not running:
            return Replay(reached=reached, spent=spent)
        now, number, rung = heapq.heappop(running)
        reached[begun[number]] = rung
        signal = 0.0 if rung == n_rungs else float(signals[begun[number], rung])  # nobody is compared at the end
        loss = None if math.isnan(signal) else signal
        record.add_result(RungResult(trial=number, rung=rung, loss=loss, segment="", tokens=0, seconds=0.0))


def random_search_regret(final: Array, n: float) -> float:
    """Expected regret of the best of `n` trials drawn without replacement, nats; between whole numbers, linear."""
    low = math.floor(n)
    if low < 1 or n > len(final):
        raise ValueError(f"n must lie between 1 and the {len(final)} trials, got {n}")
    if n > low:
        share = n - low
        return (1 - share) * random_search_regret(final, low) + share * random_search_regret(final, low + 1)
    losses = np.sort(np.where(np.isnan(final), np.nanmax(final), final))
    chances = [math.comb(len(losses) - 1 - k, low - 1) / math.comb(len(losses), low) for k in range(len(losses))]
    return float(np.dot(chances, losses) - losses[0])


def reported(way: Way, signals: Array, final: Array, reached: Integers) -> Array:
    """Log loss that a searcher is given for each trial, [n]; NaN of those that never began.

    A trial that ended is reported with its final loss. The offsets are medians over the trials that went on: to the end, or
    for "chained" to the next rung.

    Args:
        way: See `Way`.
        signals: Losses at each rung, [n, n_rungs].
        final: Final losses, [n]; read only where `reached` is `n_rungs`.
        reached: As `Replay.reached`.
    """
    n_rungs = signals.shape[1]
    columns = np.log(np.column_stack([signals, final]))
    ended = reached == n_rungs
    values = np.where(ended, columns[:, -1], np.nan)
    worst = math.log(_WORSE) + np.nanmax(values)
    for trial in np.flatnonzero((reached >= 0) & ~ended):
        rung = reached[trial]
        at_rung = columns[trial, rung]
        match way:
            case _ if way == "worst" or np.isnan(at_rung):
                values[trial] = worst
            case "corrected":
                values[trial] = at_rung + np.nanmedian((columns[:, -1] - columns[:, rung])[ended])
            case "chained":
                steps = (np.diff(columns, axis=1)[reached > step, step] for step in range(rung, n_rungs))
                values[trial] = at_rung + sum(float(np.nanmedian(step)) for step in steps)
            case "rung":
                values[trial] = at_rung
    return np.asarray(values)


@dataclass(frozen=True, kw_only=True)
class Error:
    """Errors of the values reported for the stopped trials.

    Attributes:
        bias: Mean of reported - true log loss, over the stopped.
        rmse: Root of their mean square.
        correlation: Spearman's of reported and true over all that were reported.
    """

    bias: float
    rmse: float
    correlation: float


def telling_error(values: Array, final: Array, reached: Integers) -> Error:
    """Compare the reported values with the truth, which was never seen."""
    truth = np.log(final)
    stopped = ~np.isnan(values) & ~np.isnan(truth) & (reached < reached.max())
    known = ~np.isnan(values)
    errors = (values - truth)[stopped]
    return Error(
        bias=float(errors.mean()) if len(errors) else math.nan,
        rmse=float(np.sqrt(np.mean(errors**2))) if len(errors) else math.nan,
        correlation=rank_correlation(values[known], truth[known]),
    )
