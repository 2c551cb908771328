"""Checks of numbers and tables, with messages that name the column, the rule and the value."""

import math
import re
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

OTHER_NAMES = {
    "n_params": "n params parameters num_params n_parameters num_parameters param_count model_size "
    "non_embedding_params non_embedding_parameters n_params_non_embedding params_non_embedding n_non_embedding_params",
    "n_tokens": "d tokens num_tokens tokens_seen total_tokens train_tokens training_tokens",
    "loss": "final_loss val_loss eval_loss test_loss validation_loss",
}
"""Names of our columns in other tables, without capitals and punctuation."""
_NEAR = {"n_params": "param|size|weight", "n_tokens": "token|flop|compute", "loss": "loss|bpb|nll|entropy|bits_per"}
"""Patterns in the name of a column that may be meant by a missing one."""
_ANOTHER_QUANTITY = re.compile("batch|decay|vocab|context|(token|flop)s?_per")
"""Pattern of names that are never meant, such as batch_size_tokens, weight_decay and tokens_per_second."""

COLUMNS = "columns"
"""Key of `DataFrame.attrs` for the names of all columns in the caller's table."""
FOUND_AS = "found_as"
"""Key of `DataFrame.attrs` for the former names of renamed columns."""
DROP = ": drop such rows"
LEAVE_OUT = DROP + ", or give the reason in a column left_out"
"""Advice on rows without a value."""


def positive(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return the values in float64; raise ValueError naming the first that is no number, or not finite and above 0."""
    given = np.asarray(values)
    try:
        array = np.asarray(given, np.float64) if given.dtype.kind not in "SU" else np.full(given.shape, np.nan)
    except (TypeError, ValueError):
        array = np.full(given.shape, np.nan)
    right = (array > 0) & (array < np.inf)
    if not right.all():
        raise ValueError(f"{name} must be finite and above 0, got {given[~right].tolist()[0]!r}")
    return array


def require_filled(rows: pd.DataFrame, column: str) -> None:
    """Raise ValueError, which names the first such row, if a row has no value in the column."""
    missing = rows[column].isna().to_numpy()
    if missing.any():
        raise ValueError(
            f"{column_name(rows, column)} must have a value in every row, got none in row "
            f"{row_name(rows, int(missing.argmax()))} ({missing.sum()} of {len(rows)} rows break this rule)"
        )


def names(rows: pd.DataFrame, column: str) -> NDArray[np.object_]:
    """Return the column as strings; raise ValueError if a value is missing."""
    require_filled(rows, column)
    return np.array([str(name) for name in rows[column]], dtype=object)


def require_columns(rows: pd.DataFrame, columns: tuple[str, ...]) -> None:
    """Raise ValueError unless every column is there; the message suggests columns that may be meant under another name."""
    missing = [column for column in columns if column not in rows.columns]
    if missing:
        got = rows.attrs.get(COLUMNS, [str(column) for column in rows.columns])
        known = [column for column in missing if column in OTHER_NAMES]
        exact = {column: [name for name in got if plain(name) in OTHER_NAMES[column].split()] for column in known}
        near = {
            column: exact[column]
            or [
                name
                for name in got
                if re.search(_NEAR[column], plain(name)) and not _ANOTHER_QUANTITY.search(plain(name))
            ]
            for column in known
        }
        meant = [f"rename {' or '.join(found)} to {column}" for column, found in near.items() if found]
        if known:
            meant.append(
                f"or name the columns: columns={{{known[0]!r}: …}}, on the command line --{known[0].removeprefix('n_')}"
            )
        if "n_tokens" in missing and any("flop" in plain(name) for name in got):
            meant.append("a column compute_flops with each run's FLOPs can replace n_tokens or n_params")
        raise ValueError(
            "; ".join(
                [
                    f"missing column {', '.join(missing)}: need {', '.join(columns)}, got {', '.join(got)}",
                    *(meant or ["rename the column that has it"]),
                ]
            )
        )
    if repeated := [column for column in columns if (rows.columns == column).sum() > 1]:
        raise ValueError(
            f"column {repeated[0]} must occur once, but occurs {(rows.columns == repeated[0]).sum()} times"
        )


def plain(name: str) -> str:
    """Return a column's name in small letters, with underscores for punctuation."""
    return re.sub(r"\W+", "_", name.strip()).lower()


def numbers(
    rows: pd.DataFrame, column: str, *, minimum: float = 0.0, inclusive: bool = False, remedy: str = DROP
) -> NDArray[np.float64]:
    """Return the column in float64; raise ValueError, with `remedy`, for a value that is not finite and above (or at) `minimum`."""
    values = _floats(rows, column)
    above = values >= minimum if inclusive else values > minimum
    bad = ~(np.isfinite(values) & above)
    if bad.any():
        first = int(np.argmax(bad))
        rule = f"finite and {'at least' if inclusive else 'above'} {minimum:g}"
        raise ValueError(
            f"{column_name(rows, column)} must be {rule}, got {values[first]:g} in row {row_name(rows, first)} "
            f"({bad.sum()} of {len(rows)} rows break this rule)" + (remedy if np.isnan(values[first]) else "")
        )
    return values


def losses(rows: pd.DataFrame) -> NDArray[np.float64]:
    """Return a sweep's column `loss` in float64, NaN for diverged runs; raise ValueError if a finite loss is not above 0."""
    values = _floats(rows, "loss")
    values = np.where(np.isfinite(values), values, np.nan)
    if (values <= 0).any():
        first = int(np.argmax(values <= 0))
        raise ValueError(
            f"{column_name(rows, 'loss')} must be above 0 (or NaN: diverged), got {values[first]:g} in row {row_name(rows, first)}"
        )
    return values


def seeds(rows: pd.DataFrame, *settings: str) -> NDArray[Any]:
    """Return the column `seed`; without this column 0 in each row, and equal settings count as further seeds.

    Raises:
        ValueError: a seed is missing, or two rows have one seed and the same settings: a repeated row is no evidence of noise.
    """
    if "seed" not in rows:
        return np.zeros(len(rows), np.int64)
    require_filled(rows, "seed")
    twice = rows.duplicated([*settings, "seed"]).to_numpy()
    if twice.any():
        first = int(np.argmax(twice))
        values = rows[[*settings, "seed"]].astype(object).iloc[first]
        run = ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        )
        raise ValueError(f"a run must occur once, but row {row_name(rows, first)} is another of {run}")
    return np.asarray(rows["seed"])


def require_distinct(rows: pd.DataFrame) -> None:
    """Raise ValueError if a row repeats another in every column: counted as a further seed, it would hide the noise."""
    repeated = rows.astype(str).duplicated().to_numpy()
    if repeated.any():
        raise ValueError(
            f"row {row_name(rows, int(repeated.argmax()))} repeats another in every column ({repeated.sum()} in all): drop it; "
            "runs of several seeds are distinguished by a column seed"
        )


def column_name(rows: pd.DataFrame, column: str) -> str:
    """Return a column's name for messages, with its name in the caller's table."""
    found = rows.attrs.get(FOUND_AS, {}).get(column)
    return column if found in (None, column) else f"{found} (read as {column})"


def renamed(rows: pd.DataFrame, found: str, column: str) -> pd.DataFrame:
    """Return the table with a renamed column, and a note of the former name."""
    table = rows.rename(columns={found: column})
    table.attrs[FOUND_AS] = {**rows.attrs.get(FOUND_AS, {}), column: found}
    return table


def row_name(rows: pd.DataFrame, number: int) -> str:
    """Return the caller's name of a row as a Python object's repr, since numpy's integers would show their type."""
    return repr(rows.index[[number]].tolist()[0])


def or_nan(value: object) -> float:
    """Return a cell as a number, NaN if it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _floats(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    try:
        return np.asarray(rows[column].to_numpy(dtype=np.float64, na_value=np.nan), np.float64)
    except (TypeError, ValueError) as error:
        odd = [i for i, cell in enumerate(rows[column]) if not pd.api.types.is_scalar(cell) or _is_text(cell)]
        first = (
            f"{rows[column].iloc[odd[0]]!r} in row {row_name(rows, odd[0])}" if odd else f"dtype {rows[column].dtype}"
        )
        raise ValueError(f"{column_name(rows, column)} must hold numbers, got {first}") from error


def _is_text(cell: object) -> bool:
    return not pd.isna(cell) and math.isnan(or_nan(cell))
