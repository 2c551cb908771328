"""Compares two runs: the settings that differ, both losses, and their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import pandas as pd

from muscale.serialization import dotted
from muscale.store.run_selection import one_run

_LONGEST = 60  # most characters of a value in the table
_NAMED = ("purpose", "label", "created_at", "n_params", "n_tokens", "seed")


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Differences between two runs.

    Attributes:
        losses: Held-out losses; None for a diverged run.
        seconds: Duration of each run.
        settings: Differing values of both runs, by name: run, hyperparameters, model and data.
        environment: The same for machine and versions.
    """

    keys: tuple[str, str]
    losses: tuple[float | None, float | None]
    seconds: tuple[float, float]
    settings: dict[str, tuple[Any, Any]]
    environment: dict[str, tuple[Any, Any]]

    @classmethod
    def of(cls, runs: pd.DataFrame, first: str, second: str) -> Self:
        """Compare two runs of `Ledger.runs()`.

        Args:
            first: Key of a run, or an unambiguous beginning of the key.
            second: The same for the other run.

        Raises:
            RunSelectionError: If there is no such run, or more than one.
        """
        rows = [one_run(runs, key).to_dict() for key in (first, second)]
        settings = [
            {name: row[name] for name in _NAMED} | dotted(row["hyperparameters"]) | _numerics(row) for row in rows
        ]
        a, b = (None if math.isnan(row["loss"]) else float(row["loss"]) for row in rows)
        return cls(
            keys=(rows[0]["key"], rows[1]["key"]),
            losses=(a, b),
            seconds=(float(rows[0]["seconds"]), float(rows[1]["seconds"])),
            settings=_differing(*settings),
            environment=_differing(*(dotted(row["environment"] or {}) for row in rows)),
        )

    @property
    def difference(self) -> float | None:
        """Loss of the second run minus that of the first; None if one diverged."""
        first, second = self.losses
        return None if first is None or second is None else second - first

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the difference."""
        return {**asdict(self), "difference": self.difference}

    def __str__(self) -> str:
        first = self.losses[0]
        rows = [("run", *self.keys)]
        rows += [_row(name, pair) for name, pair in self.settings.items()]
        rows += [_row(f"on {name}", pair) for name, pair in self.environment.items()]
        rows.append(_row("seconds", self.seconds))
        rows.append(_row("loss", self.losses, none="diverged"))
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:<{wide[0]}}  {a:<{wide[1]}}  {b}" for name, a, b in rows]
        if self.difference is not None and first:
            lines.append(f"the second's loss is {self.difference:+.4f} ({self.difference / first:+.2%})")
        if not self.settings:
            lines.insert(1, "all settings are equal")
        return "\n".join(lines)


def _row(name: str, pair: tuple[Any, Any], none: str = "–") -> tuple[str, str, str]:
    return name, _short(pair[0], none), _short(pair[1], none)


def _short(value: Any, none: str) -> str:
    """Format a value for a table, cut off if long; `none` represents None."""
    if value is None:
        return none
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _numerics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Model, base shape, data and semantics."""
    return dotted({name: value for name, value in row["numerics"].items() if name not in ("seed", "run_tokens")})


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}
