"""Calibration of the forecasts: compares every finished run of one or more ledgers with its registered interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import binomtest

from muscale.errors import StudyDirectoryError, one_line
from muscale.full_runs.amend.amended_runs import AmendedRun, amended_runs
from muscale.full_runs.amend.second_forecast import SecondForecast
from muscale.full_runs.promote.promotion import Promotion
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.read_only import Read, open_read_only
from muscale.store.statements import find
from scaling.fits.forecast import interval_factor
from scaling.presentation import Result

_COVERAGE_LEVEL = 0.9  # level of the interval of the share inside
_COLUMNS = (
    *(
        "study",
        "plan",
        "registered",
        "ended",
        "forecast",
        "low",
        "high",
        "level",
        "measured",
        "residual",
        "residual_in_s",
    ),
    *("inside", "asserted", "forced", "amended"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration(Result):
    """Forecasts and measured losses of finished runs, in nats per token.

    Attributes:
        table: One row per finished run, oldest first: study, plan, registered and ended (UTC), forecast, low, high, level, measured,
            residual (measured minus forecast), residual_in_s (log of measured over forecast, in units of the forecast's scale s),
            inside, asserted (whether the run was trained elsewhere), forced, amended (whether it is the second forecast of a run
            that branched off another).
        coverage: One row per level; promoted, asserted and amended runs apart: level, asserted, amended, runs, inside, share, low and
            high of its 90 % interval (Clopper and Pearson, Biometrika 26, 1934).
    """

    table: pd.DataFrame = field(repr=False)

    @property
    def coverage(self) -> pd.DataFrame:
        """See `coverage` in the class docstring."""
        rows = []
        for (level, asserted, amended), group in self.table.groupby(["level", "asserted", "amended"]):
            inside = int(group["inside"].sum())
            limits = binomtest(inside, len(group)).proportion_ci(_COVERAGE_LEVEL, method="exact")
            share = (inside / len(group), float(limits.low), float(limits.high))
            rows.append((level, asserted, amended, len(group), inside, *share))
        return pd.DataFrame(rows, columns=["level", "asserted", "amended", "runs", "inside", "share", "low", "high"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"table": self.table.to_dict("records"), "coverage": self.coverage.to_dict("records")}

    def __str__(self) -> str:
        if self.table.empty:
            return "calibration: no promoted run has ended yet"
        lines = [self.table.to_string(index=False, float_format=lambda value: f"{value:.4g}")]
        for row in self.coverage.to_dict("records"):
            runs = (
                "runs trained elsewhere" if row["asserted"] else "amended runs" if row["amended"] else "promoted runs"
            )
            lines.append(
                f"{row['inside']} of {row['runs']} {runs} inside, nominal {row['level']:.0%}: "
                f"{row['share']:.0%} [{row['low']:.0%}, {row['high']:.0%}]"
            )
        return "\n".join(lines)


def calibrate(ledger: Ledger, others: Sequence[Path] = ()) -> Calibration:
    """Calibrate a ledger and other studies, which are given by file, directory or ledger and opened read-only.

    Raises:
        StudyDirectoryError: If another study has no ledger, or a ledger of another version.
    """
    rows = list(_finished_runs(ledger.read, str(ledger.directory)))
    for source in others:
        with open_read_only(source) as (name, read):
            rows += list(_finished_runs(read, name))
    rows.sort(key=lambda row: row["ended"])
    unique = {(row["plan"], row["registered"], row["asserted"]): row for row in reversed(rows)}
    return Calibration(table=pd.DataFrame(list(unique.values())[::-1], columns=list(_COLUMNS)))


def _finished_runs(read: Read, study: str) -> Iterator[dict[str, Any]]:
    forecasts = {row["plan"]: row["payload"] for row in read(find, "forecasts")}
    for kind in (ResultKind.PROMOTION, ResultKind.EXTERNAL_RUN):
        for row in read(find, "results", {"kind": kind.value}):
            with _refusing(f"{study}: {kind} {one_line(row['key'])}"):
                yield _row(study, row["payload"], forecasts)
    with _refusing(f"{study}: {ResultKind.AMENDMENT}"):
        for run in amended_runs(read):
            if run.forecast and run.measured is not None:
                yield _checked(_amended_row(study, run, run.forecast, run.measured))


@contextmanager
def _refusing(place: str) -> Iterator[None]:
    """Turn errors of a record that may come from anywhere into StudyDirectoryError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise StudyDirectoryError(f"{place}: not a finished run: {reason}") from error


def _amended_row(study: str, run: AmendedRun, forecast: SecondForecast, measured: float) -> dict[str, Any]:
    scale = math.log(forecast.high / forecast.loss) / interval_factor(forecast.level)
    return {
        "study": study,
        "plan": run.key,
        "registered": run.started_at[:19],
        "ended": (run.finished_at or "")[:19],
        "forecast": forecast.loss,
        "low": forecast.low,
        "high": forecast.high,
        "level": forecast.level,
        "measured": measured,
        "residual": measured - forecast.loss,
        "residual_in_s": math.log(measured / forecast.loss) / scale,
        "inside": run.inside,
        "asserted": False,
        "forced": False,
        "amended": True,
    }


def _row(study: str, ended: dict[str, Any], forecasts: Mapping[str, Any]) -> dict[str, Any]:
    """Make a row of the table, checking all values, since the ledger may come from anywhere."""
    run = Promotion.from_dict(ended)
    registered = forecasts.get(run.plan, {"forecast": {}})["forecast"]
    s = registered.get("log_scale") or math.log(run.high / run.forecast) / interval_factor(run.level)
    row = {
        "study": study,
        "plan": run.plan,
        "registered": run.registered_at[:19],
        "ended": run.finished_at[:19],
        "forecast": run.forecast,
        "low": run.low,
        "high": run.high,
        "level": run.level,
        "measured": run.loss,
        "residual": run.residual,
        "residual_in_s": math.log(run.loss / run.forecast) / s,
        "inside": run.inside,
        "asserted": run.asserted,
        "forced": run.forced,
        "amended": False,
    }
    return _checked(row)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: must be a finite number, got {value}")
    return row
