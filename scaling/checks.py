"""What single numbers and columns of names that come in are held to, with messages that say the name and the value."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray


def positive(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """The values in float64.

    Raises:
        ValueError: one is no number, or not finite and above 0; the first such one is named.
    """
    given = np.asarray(values)
    try:
        array = np.asarray(given, np.float64) if given.dtype.kind not in "SU" else np.full(given.shape, np.nan)
    except (TypeError, ValueError):
        array = np.full(given.shape, np.nan)
    right = (array > 0) & (array < np.inf)
    if not right.all():
        raise ValueError(f"{name} must be finite and above 0, got {given[~right].tolist()[0]!r}")
    return array


def names(rows: pd.DataFrame, column: str) -> NDArray[np.object_]:
    """The column as strings.

    Raises:
        ValueError: a value is missing.
    """
    if missing := int(rows[column].isna().sum()):
        raise ValueError(f"{column} must be named in every row, got {missing} empty values")
    return np.array([str(name) for name in rows[column]], dtype=object)
