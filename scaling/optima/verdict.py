"""The verdict of a transfer check: the drift of every optimum along a scale, and the laws in the tokens."""

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from scaling.checks import names, numbers, require_columns
from scaling.drawing import Figure
from scaling.errors import ScalingError
from scaling.optima.axis_law import AxisLaw, fit_axis_law
from scaling.optima.batch_law import BatchLaw, fit_batch_law
from scaling.optima.drift import MAX_DRIFT, OF_EXPERTS, UNORDERED, Judgement, Transfer, fit_transfer
from scaling.optima.evidence import COLUMNS, runs_to_decide
from scaling.optima.horizon import HorizonLaw, fit_horizon_law
from scaling.optima.optimum_figures import draw_drifts, draw_verdict
from scaling.presentation import lines
from scaling.serialization import JsonResult

LAWS = ("horizon law", "batch law")


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict(JsonResult):
    """Judgement: do tuned values transfer to full size?

    Attributes:
        transfers: one for each requested scale and hyperparameter, at the longest horizon of all its sizes; `drift_octaves` and
            `interval` are those of the first (in a study, the rate along the width).
        n_tokens: the longest of these horizons, tokens.
        horizons: tokens of each transfer's runs, in the order of `transfers`.
        horizon: law of the best rate in tokens; None if no such grid was run or fitted.
        batch: law of the best batch in tokens; None if no such grid was run or fitted.
        missing: why a transfer or a law has no answer, by its name, such as `rate along depth` or `horizon law`.
    """

    DERIVED = ("verdict", "reasons", "drift_octaves", "interval", "wider_is_better", "next_runs", "options")

    n_tokens: float
    horizons: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    horizon: HorizonLaw | None = None
    batch: BatchLaw | None = None
    missing: dict[str, str]

    @property
    def verdict(self) -> Judgement:
        """`fail` if any transfer failed, `pass` if all requested transfers passed, else `not enough evidence`.

        Runs of one size request no transfer, and pass.
        """
        judgements = {transfer.verdict for transfer in self.transfers}
        if "fail" in judgements:
            return "fail"
        return "pass" if judgements <= {"pass"} and not self._unfitted else "not enough evidence"

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"

    @property
    def is_of_one_size(self) -> bool:
        """Whether all runs have one size, so that only the laws in the tokens are known."""
        return not self.transfers and not self._unfitted

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the verdict is not a pass (after a failure only the failure's), each with the name of its transfer."""
        failed = self.verdict == "fail"
        shown = [t for t in self.transfers if not failed or t.verdict == "fail"]
        several = len(self.transfers) + len(self._unfitted) > 1
        reasons = [f"{label(t)}: {reason}" if several else reason for t in shown for reason in t.reasons]
        return (*reasons, *(() if failed else (f"{name}: {reason}" for name, reason in self._unfitted.items())))

    @property
    def drift_octaves(self) -> float:
        """Drift of the first transfer's optimum, octaves; NaN if not known."""
        return self.transfers[0].drift_octaves if self.transfers else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval of the drift, octaves."""
        return self.transfers[0].interval if self.transfers else (-math.inf, math.inf)

    @property
    def wider_is_better(self) -> bool:
        """True if larger models are no worse beyond the noise along every checked scale but UNORDERED, and there is such a scale."""
        ordered = [transfer.larger_is_better for transfer in self.transfers if transfer.along not in UNORDERED]
        return bool(ordered) and all(ordered)

    def of_axes(self, along: Container[str]) -> "Verdict":
        """Return the verdict without the scales of experts that are not among these."""
        kept = [
            number
            for number, transfer in enumerate(self.transfers)
            if transfer.along not in OF_EXPERTS or transfer.along in along
        ]
        missing = {
            name: reason
            for name, reason in self.missing.items()
            if (scale := name.rpartition(" along ")[2]) not in OF_EXPERTS or scale in along
        }
        return replace(
            self,
            transfers=tuple(self.transfers[number] for number in kept),
            horizons=tuple(self.horizons[number] for number in kept),
            missing=missing,
        )

    @property
    def axis_verdicts(self) -> dict[str, Judgement]:
        """Judgement of the rate along each tested scale of experts."""
        judged = {transfer.along: transfer.verdict for transfer in self.transfers if transfer.along in OF_EXPERTS}
        return judged | {axis: "not enough evidence" for axis in OF_EXPERTS if f"rate along {axis}" in self.missing}

    @cached_property
    def axis_laws(self) -> dict[str, AxisLaw | str]:
        """Law of the best rate along each scale of experts on which it did not pass, or the reason why the evidence supports none."""
        found: dict[str, AxisLaw | str] = {}
        for transfer in self.transfers:
            if transfer.along in OF_EXPERTS and transfer.over == "rate" and not transfer.passed:
                try:
                    found[transfer.along] = fit_axis_law(transfer.optima, along=transfer.along)
                except ScalingError as error:
                    found[transfer.along] = str(error)
        return found

    @cached_property
    def next_runs(self) -> pd.DataFrame:
        """Runs that would decide, a row for each addition; see `evidence.runs_to_decide` for the columns."""
        parts = [runs_to_decide(*each) for each in zip(self.transfers, self.horizons, strict=True)]
        found = [part for part in parts if len(part)] if self.verdict == "not enough evidence" else []
        return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=COLUMNS)

    @property
    def options(self) -> str:
        """All settings of `next_runs` as options of the command line; empty if there is nothing to run."""
        merged: dict[str, Any] = {}
        for settings in self.next_runs["settings"]:
            for key, value in settings.items():
                merged[key] = sorted({*merged.get(key, []), *value}) if isinstance(value, list) else value
        return " ".join(f"--set 'transfer.{key}={_toml(value)}'" for key, value in merged.items())

    @property
    def _unfitted(self) -> dict[str, str]:
        return {name: reason for name, reason in self.missing.items() if name not in LAWS}

    def table(self) -> pd.DataFrame:
        """One row per transfer: along, over, drift_octaves, low, high, regret_transferred, larger_is_better, verdict."""
        names = ["along", "over", "drift_octaves", "low", "high", "regret_transferred", "larger_is_better", "verdict"]
        records = [
            [t.along, t.over, t.drift_octaves, *t.interval, t.regret_transferred, t.larger_is_better, t.verdict]
            for t in self.transfers
        ]
        return pd.DataFrame(records, columns=names)

    def plot(self) -> Figure:
        """Draw loss against the value, a panel for each transfer."""
        return draw_verdict([transfer.plot() for transfer in self.transfers])

    def plot_drifts(self) -> Figure:
        """Draw the drift of each optimum with its interval, and the band that a pass needs."""
        return draw_drifts(self.table(), MAX_DRIFT)

    @property
    def about(self) -> str:
        """Lines about the laws, the verdict over several transfers, and the runs that would decide."""
        about = {name: reason for name, reason in self.missing.items() if name in LAWS}
        if self.horizon:
            law = self.horizon
            about["horizon law"] = f"best rate ∝ D^{-law.exponent:.2f}, ± {law.stderr:.2f}, {law.status}"
        if self.batch:
            grows = self.batch
            about["batch law"] = f"best batch ∝ D^{grows.exponent:.2f}, ± {grows.stderr:.2f}, {grows.status}"
        about |= {f"{along} law": f"{law}" for along, law in self.axis_laws.items()}
        if self.is_of_one_size:
            about["verdict"] = "pass; all runs have one size, so nothing is carried over sizes"
        if len(self.transfers) > 1 or self._unfitted:
            about["verdict"] = "; ".join((self.verdict, *self.reasons))
        parts = [lines(about)] if about else []
        for row in self.next_runs.to_dict("records"):
            expected = f"±{row['half_width']:.2f} octaves expected" if row["half_width"] > 0 else "interval unknown"
            enough = "" if row["decides"] else ", which may not decide"
            cost = f"{row['new_runs']} runs, {row['n_tokens']:.3g} tokens"
            parts.append(f"to decide {row['over']} along {row['along']}: {row['add']}; {cost}; {expected}{enough}")
        if self.options:
            parts.append(f"options  {self.options}")
        return "\n".join(parts)

    def __str__(self) -> str:
        several = len(self.transfers) > 1
        parts = [f"{label(t)}\n{t}" if several else str(t) for t in self.transfers]
        return "\n".join([*parts, self.about] if self.about else parts)


def label(transfer: Transfer) -> str:
    """Name of a transfer: `rate along width`."""
    return f"{transfer.over} along {transfer.along}"


def fit_verdict(rows: pd.DataFrame, *, optima: pd.DataFrame | None = None, one_size: bool = False) -> Verdict:
    """Judge every transfer at the longest horizon that all its sizes were trained at, and fit the laws in the tokens.

    Args:
        rows: one row per run and grid. `along`: the scale of the grid, `width`, `depth`, `batch` or one of OF_EXPERTS;
            `size`: the run's value of this scale (for a batch: tokens); `over` and `value`: the hyperparameter that the grid
            varies and its value, at the base shape; `n_tokens`; `loss` (nats per token; NaN if diverged); and, if several
            seeds were run, `seed`. If there is a column `run`, a run in several grids has the same `run` in each.
        optima: best rates from other fits, for the horizon law; see `fit_horizon_law`.
        one_size: all runs have one size, as those from given weights: nothing is judged, and only the laws in the tokens are fitted.

    Raises:
        ValueError: a column is missing or breaks its rule, or a grid has only one size; with `one_size`, if there are several.
    """
    require_columns(rows, ("along", "size", "over", "value", "n_tokens", "loss"))
    named = {column: names(rows, column) for column in ("along", "over")}
    rows = rows.assign(**named, size=numbers(rows, "size"), n_tokens=numbers(rows, "n_tokens"))
    sized = rows[rows["along"] != "batch"]
    if sized.empty:
        raise ValueError(f"along must name a scale other than batch, got {sorted(rows['along'].unique())}")
    if one_size and (several := sized.groupby("along")["size"].nunique().max()) > 1:
        raise ValueError(f"size must be the same in all rows with one_size, got {several} sizes")
    transfers, horizons, missing = [], [], {}
    longest = 0.0
    for (along, over), grid in sized.groupby(["along", "over"], sort=False):
        horizon = _longest_shared(grid)
        longest = max(longest, horizon)
        if one_size:
            continue
        try:
            at_longest = _named(grid[grid["n_tokens"] == horizon], along, over)
            transfers.append(fit_transfer(at_longest, along=along, over=over))
            horizons.append(horizon)
        except ScalingError as error:
            missing[f"{over} along {along}"] = str(error)
    laws: dict[str, Any] = {}
    rates = sized[sized["over"] == "rate"]
    rates = rates.assign(
        rate=rates["value"], group=[f"{a} {s:g}" for a, s in zip(rates["along"], rates["size"], strict=True)]
    )
    if "run" in rates:
        rates = rates.drop_duplicates("run")
    batches = rows[rows["along"] == "batch"].rename(columns={"size": "batch_tokens", "value": "rate"})
    try:
        laws["horizon"] = fit_horizon_law(rates, optima=optima) if len(rates) else None
    except ScalingError as error:
        missing["horizon law"] = str(error)
    if len(batches):
        try:
            laws["batch"] = fit_batch_law(batches)
        except ScalingError as error:
            missing["batch law"] = str(error)
    return Verdict(transfers=tuple(transfers), n_tokens=longest, horizons=tuple(horizons), missing=missing, **laws)


def _longest_shared(grid: pd.DataFrame) -> float:
    """Most tokens at which every size of a grid was trained; if there are none, the most tokens of any size."""
    sizes = grid.groupby("n_tokens")["size"].nunique()
    shared = sizes[sizes == grid["size"].nunique()]
    return float((shared if len(shared) else sizes).index.max())


def _named(grid: pd.DataFrame, along: str, over: str) -> pd.DataFrame:
    """Return the grid with its columns `size` and `value` renamed to `along` and `over`."""
    return grid[["size", "value", "loss", *grid.columns.intersection(["seed"])]].rename(
        columns={"size": along, "value": over}
    )


def _toml(value: Any) -> str:
    """Format a number or a list as TOML, without spaces."""
    if isinstance(value, list):
        return f"[{','.join(map(_toml, value))}]"
    return repr(value.item() if isinstance(value, np.generic) else value)
