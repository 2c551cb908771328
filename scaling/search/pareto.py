"""Runs for which no other run is both cheaper and better."""

import numpy as np
import pandas as pd

from scaling.checks import losses, numbers, require_columns


def pareto_front(rows: pd.DataFrame, cost: str = "compute_flops") -> pd.DataFrame:
    """Return the rows on the front by rising cost, so by falling loss; columns and index are the caller's.

    A row is on the front if every row that costs and loses at most as much is equal in both. So of rows with one cost only the best
    are on the front, and of rows with one loss only the cheapest; rows equal in both are all on it, in their
    order. Diverged runs (loss null, NaN or infinite) are not on the front.

    Args:
        rows: one row per run: `loss`, nats per token, and any other columns.
        cost: the column of a run's cost, in any unit, at least 0.

    Raises:
        ValueError: a column is missing, a cost is not finite or below 0, or a finite loss is not above 0.
    """
    require_columns(rows, (cost, "loss"))
    paid, lost = numbers(rows, cost, inclusive=True), losses(rows)
    order = np.lexsort((lost, paid))  # stable; NaN losses come last within their cost
    order = order[np.isfinite(lost[order])]
    least_before = np.minimum.accumulate(np.append(np.inf, lost[order]))[:-1]
    better = lost[order] < least_before
    # A row that equals the row before it is on the front if that row is.
    twins = np.zeros(len(order), dtype=bool)
    twins[1:] = (np.diff(lost[order]) == 0) & (np.diff(paid[order]) == 0)
    group = np.cumsum(~twins)
    on_front = np.isin(group, group[better])
    return rows.iloc[order[on_front]]
