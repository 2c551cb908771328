"""Which hyperparameters a sweep's loss depends on, from all its trials."""

from __future__ import annotations

import numpy as np
import pandas as pd

from muscale.search.across_scales import box_of, coordinates
from muscale.search.sweep_tables import config_of
from scaling import Importance, ScalingError, hyperparameter_importance
from search_spaces import Space

MIN_VALUES = 3
"""Different values from which a hyperparameter has a slope and a bend; with two it is compared as a choice is."""


def importance_of(trials: pd.DataFrame, space: Space, seed: int) -> Importance:
    """Shares of the variance of log loss, each hyperparameter on the scale on which it was searched, an ordinal by its rank.

    What a condition left out of a trial lies in the middle there (of a choice: at its first), so only the trials that have it
    tell its share.

    Args:
        trials: A row each: the searched values (missing where a condition left one out) and `loss`, nats per token, all of
            one length (NaN: diverged).
        space: What was searched.
        seed: Of the resampling.

    Raises:
        ScalingError: If the trials are too few, or tell nothing.
    """
    box = box_of(space)
    table = pd.DataFrame([coordinates(space, config_of(row, space)) for row in trials.to_dict("records")])
    table = table.assign(loss=trials["loss"].to_numpy())
    n_values = table[table["loss"].notna()].drop(columns="loss").nunique()
    numeric = [name for name in box.bounds if n_values[name] >= MIN_VALUES]
    others = [str(name) for name, n in n_values.items() if n > 1 and name not in numeric]
    if not numeric and not others:
        raise ScalingError(f"no hyperparameter takes two values in {int(table['loss'].notna().sum())} finished trials")
    bounds = {name: box.bounds[name] for name in numeric}
    for name, ends in bounds.items():
        table[name] = np.clip(table[name], *ends)
    return hyperparameter_importance(table, numeric, others, box=bounds, seed=seed)
