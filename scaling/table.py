"""What every table that comes in is held to, with messages that name the column, the rule and the value."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def require_columns(rows: pd.DataFrame, columns: tuple[str, ...]) -> None:
    """Raise ValueError unless every column is there."""
    missing = [column for column in columns if column not in rows.columns]
    if missing:
        raise ValueError(
            f"missing column {', '.join(missing)}: need {', '.join(columns)}, got {', '.join(rows.columns)}"
        )


def numbers(rows: pd.DataFrame, column: str, *, minimum: float = 0.0, inclusive: bool = False) -> NDArray[np.float64]:
    """The column in float64.

    Raises:
        ValueError: a value is no finite number, or not above `minimum` (or equal to it, if `inclusive`).
    """
    values = _floats(rows, column)
    above = values >= minimum if inclusive else values > minimum
    bad = ~(np.isfinite(values) & above)
    if bad.any():
        first = int(np.argmax(bad))
        rule = f"finite and {'at least' if inclusive else 'above'} {minimum:g}"
        raise ValueError(
            f"{column} must be {rule}, got {values[first]:g} in row {rows.index[first]!r} "
            f"({bad.sum()} of {len(rows)} rows break this rule)"
        )
    return values


def losses(rows: pd.DataFrame) -> NDArray[np.float64]:
    """The column `loss` of a sweep in float64, NaN where the run diverged (null, NaN or infinite).

    Raises:
        ValueError: a finite loss is not above 0.
    """
    values = _floats(rows, "loss")
    values = np.where(np.isfinite(values), values, np.nan)
    if (values <= 0).any():
        first = int(np.argmax(values <= 0))
        raise ValueError(f"loss must be above 0 (or NaN: diverged), got {values[first]:g} in row {rows.index[first]!r}")
    return values


def _floats(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    try:
        return np.asarray(rows[column].to_numpy(dtype=np.float64, na_value=np.nan), np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{column} must hold numbers, got dtype {rows[column].dtype}") from error
