"""The runs of which no other is both cheaper and better."""

import numpy as np
import pandas as pd

from scaling.checks import losses, numbers, require_columns


def pareto_front(rows: pd.DataFrame, cost: str = "compute_flops") -> pd.DataFrame:
    """The rows on the front, cost ascending and so loss descending; columns and index are the caller's.

    A row is on the front if no other costs at most as much and loses at most as much, with one of the two less. Of rows of
    one cost only the best are on it, of rows of one loss only the cheapest; rows equal in both are all on it, in their
    order. Diverged runs (loss null, NaN or infinite) are not.

    Args:
        rows: one row per run: `loss`, nats per token, and any other columns.
        cost: the column of what a run cost, in any unit, at least 0.

    Raises:
        ValueError: a column is missing, a cost is not finite or below 0, or a finite loss is not above 0.
    """
    require_columns(rows, (cost, "loss"))
    paid, lost = numbers(rows, cost, inclusive=True), losses(rows)
    order = np.lexsort((lost, paid))  # stable; NaN losses last of their cost
    order = order[np.isfinite(lost[order])]
    least_before = np.minimum.accumulate(np.append(np.inf, lost[order]))[:-1]
    better = lost[order] < least_before
    # Rows equal to the one before them share its fate.
    twins = np.zeros(len(order), dtype=bool)
    twins[1:] = (np.diff(lost[order]) == 0) & (np.diff(paid[order]) == 0)
    group = np.cumsum(~twins)
    on_front = np.isin(group, group[better])
    return rows.iloc[order[on_front]]
