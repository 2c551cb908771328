"""The losses of a lineage of full runs up to a checkpoint, or up to now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from muscale import json_lines
from muscale.full_runs.amend.parent import run_segments
from muscale.layout import EVALUATIONS, FULL_RUNS, METRICS
from muscale.plans.ladder_schedules import evaluated, measured
from muscale.proxies.ladder_curves import rates_of
from muscale.store.ledger import Ledger
from scaling.schedules.schedule_fit import MIN_OWN_ROWS, OWN_SHARE


@dataclass(frozen=True, kw_only=True)
class SoFar:
    """Losses that a lineage has measured; tokens count from the lineage's beginning.

    Attributes:
        losses: Held-out losses: tokens, loss, lr, and `sources` of a mixture. If the second half has none, these are means of the
            training loss over windows of that half, times the ratio of held-out to training loss on the ladder.
        curve: The losses for the law of schedules: columns tokens, lr (at the base shape), loss, noise (standard error of the log
            loss). They are the held-out losses if there are enough of them: training losses differ by the text of their batches.
            Otherwise they are the windows' means, times the ratio of the run's own held-out losses to its training losses, or the
            ladder's if it has none. The last row is the last step's, with a loss if one was measured there.
    """

    losses: list[dict[str, Any]]
    curve: pd.DataFrame

    @classmethod
    def of(
        cls,
        lineage: Sequence[tuple[str, int]],
        directory: Path,
        ledger: Ledger,
        offset: float,
        *,
        last_stage_begins: int = 0,
    ) -> Self:
        """Read the metrics of a lineage's runs.

        Args:
            lineage: Key of each run, and its tokens at the next run's start, or now.
            directory: The study's directory.
            offset: Log of held-out over training loss on the ladder.
            last_stage_begins: Tokens of the lineage before which training losses are of data in other proportions than the held-out
                loss, and are left out.
        """
        found: list[dict[str, Any]] = []
        parts, before, rate = [pd.DataFrame(columns=["tokens", "lr", "loss", "noise"], dtype=float)], 0, math.nan
        for run, upto in lineage:
            segments = run_segments(run, ledger)
            read = json_lines.read(directory / FULL_RUNS / run / METRICS)
            rows = [row for row in read if row["tokens"] <= upto]
            beside = json_lines.read(directory / FULL_RUNS / run / EVALUATIONS)
            of_tokens = {row["tokens"]: row for row in (*beside, *rows) if row.get("val_loss") is not None}
            known = sorted(tokens for tokens in of_tokens if tokens <= upto)
            *rates, rate = rates_of(segments, np.maximum(np.array([*known, upto]) - 1.0, 0.0))
            for tokens, lr in zip(known, rates, strict=True):
                if found and found[-1]["tokens"] == before + tokens:
                    continue  # the run before has measured it, at its rate
                row = of_tokens[tokens]
                at = {"tokens": before + tokens, "loss": row["val_loss"], "lr": float(lr)}
                found.append({**at, "sources": row.get("source_losses") or {}})
            steps = [(row["tokens"], row["train_loss"]) for row in rows if row.get("train_loss")]
            if steps:
                ends, losses = np.array(steps, dtype=float).T
                positions = np.array([0.0, *ends[:-1]])
                part = measured(positions, rates_of(segments, positions), losses, offset)
                parts.append(part.assign(tokens=part["tokens"] + before))
            before += upto
        windows = pd.concat(parts, ignore_index=True)
        windows = windows[windows["tokens"] >= last_stage_begins]
        curve = _curve(pd.DataFrame(found, columns=["tokens", "lr", "loss"], dtype=float), windows, before)
        if curve["tokens"].max() != before:
            now = pd.DataFrame([{"tokens": float(before), "lr": float(rate), "loss": math.nan, "noise": 0.0}])
            curve = pd.concat([curve, now], ignore_index=True)
        if not any(row["tokens"] > before / 2 for row in found):
            late = windows[windows["tokens"] > before / 2]
            found += [{**row, "sources": {}} for row in late[["tokens", "loss", "lr"]].to_dict("records")]
        return cls(losses=found, curve=curve)


def _curve(held_out: pd.DataFrame, windows: pd.DataFrame, now: int) -> pd.DataFrame:
    """Rows of `SoFar.curve`, by the held-out losses if enough are recent, else by windows of the training loss."""
    if (held_out["tokens"] > (1 - OWN_SHARE) * now).sum() >= MIN_OWN_ROWS:
        return evaluated(held_out)
    late = held_out[held_out["tokens"] > now / 2]
    if late.empty or windows.empty:
        return windows
    ratio = np.log(late["loss"]) - np.interp(late["tokens"], windows["tokens"], np.log(windows["loss"]))
    return windows.assign(loss=windows["loss"] * math.exp(ratio.mean()))
