"""Loss curves of the ladder's runs: the training loss of every step, and the held-out loss at the end of each segment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from muscale.errors import first_line
from muscale.layout import CURVES
from muscale.store.ledger import Ledger
from proxy_models.recipes.segments import Segment

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RunCurve:
    """One annealed run along its tokens; losses in nats per token.

    Attributes:
        stem: Runs with the same stem share weights.
        warmup_tokens: Warmup of the run's schedule.
        ends: (tokens, held-out loss of the last weights) at the end of each segment; the last is the run's end.
        positions: Tokens seen before each step, at which its training loss was measured; shape (steps,). Steps without a token that
            counts in the loss are left out.
        train_loss: Training loss of each step, shape (steps,).
        rates: Rate of each step at the base shape, shape (steps,).
    """

    stem: str
    warmup_tokens: int
    ends: tuple[tuple[int, float], ...]
    positions: Floats
    train_loss: Floats
    rates: Floats

    @property
    def n_tokens(self) -> int:
        """Training tokens D."""
        return self.ends[-1][0]

    @property
    def final_loss(self) -> float:
        """Held-out loss at the annealed end."""
        return self.ends[-1][1]

    @property
    def fractions(self) -> Floats:
        """Ends of the segments as shares of the run, starting with 0."""
        return np.array([0, *(tokens for tokens, _ in self.ends)]) / self.n_tokens

    def mean_log(self, start: float, end: float) -> float:
        """Return the mean log training loss of the steps in [start, end), shares of the run; NaN if there are none."""
        share = self.positions / self.n_tokens
        within = (share >= start) & (share < end)
        return float(np.log(self.train_loss[within]).mean()) if within.any() else float("nan")


def read_curves(ledger: Ledger, keys: Sequence[str]) -> list[RunCurve]:
    """Return the curves of those of the runs whose every step is recorded in the study's directory."""
    return [curve for curve in (_read(ledger, key) for key in keys) if curve]


def _read(ledger: Ledger, key: str) -> RunCurve | None:
    """Read one run from its last segment's key and its parents."""
    chain: list[dict[str, Any]] = []
    parent: str | None = key
    while parent:
        row = ledger.segment(parent)
        if row is None or row["loss"] is None:
            return None
        chain.insert(0, row)
        parent = row["parent"]
    tables = [_segment_table(ledger, row) for row in chain]
    there = [table for table in tables if table is not None]
    if len(there) < len(tables):
        return None
    steps = pd.concat(there)
    steps = steps.assign(position=np.array([0.0, *steps["tokens"].iloc[:-1]]))
    steps = steps[steps["train_loss"] != 0]  # 0: no token of the batch counted
    if steps.empty or not bool((steps["train_loss"] > 0).all()):
        return None
    positions = steps["position"].to_numpy(dtype=float)
    return RunCurve(
        stem=chain[0]["line"],
        warmup_tokens=int(chain[0]["segment"]["recipe"]["warmup_tokens"]),
        ends=tuple((int(row["tokens"]), float(row["loss"])) for row in chain),
        positions=positions,
        train_loss=steps["train_loss"].to_numpy(dtype=float),
        rates=rates_of([Segment.from_dict(row["segment"]) for row in chain], positions),
    )


def rates_of(segments: Sequence[Segment], positions: Floats) -> Floats:
    """Return the rate at the base shape of each step that starts after so many tokens, shape (steps,)."""
    found = np.zeros(len(positions))
    for segment in segments:
        within = (positions >= segment.start) & (positions < segment.end)
        factors = [segment.rate_factor(int(tokens)) for tokens in positions[within]]
        found[within] = segment.recipe.learning_rate * np.array(factors)
    return found


def _segment_table(ledger: Ledger, row: dict[str, Any]) -> pd.DataFrame | None:
    """Return every step of a segment; steps that other rows of its line have trained come from their files."""
    rows = ledger.line(row["line"])
    cuts, parts = [int(row["tokens"])], []
    while cuts[-1] > row["segment"]["start"]:
        covering = [r for r in rows if r["trained_from"] < cuts[-1] <= r["tokens"]]
        paths = [(r, ledger.directory / CURVES / f"{r['key']}.parquet") for r in covering]
        there = [(r, path) for r, path in paths if path.exists()]
        if not there:
            return None
        source, path = min(there, key=lambda found: found[0]["trained_from"])
        if (table := _curve(path)) is None:
            return None
        cuts.append(int(source["trained_from"]))
        parts.append(table)
    whole = [
        table[(table["tokens"] > start) & (table["tokens"] <= end)]
        for table, (end, start) in zip(parts, pairwise(cuts), strict=True)
    ]
    return pd.concat(whole[::-1], ignore_index=True)


def _curve(path: Path) -> pd.DataFrame | None:
    """Read tokens and training loss of every step from a file; return None if the file is damaged."""
    try:
        return pd.read_parquet(path, columns=["tokens", "train_loss"], page_checksum_verification=True)
    except Exception as error:  # each layer of Arrow and pandas raises different errors for a damaged file
        if isinstance(error, OSError) and error.filename is not None:
            raise
        logging.getLogger(__name__).warning("%s is damaged, so its run is left out: %s", path, first_line(error))
        return None
