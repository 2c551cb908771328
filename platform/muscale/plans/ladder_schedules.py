"""The law of the loss along a schedule, of the ladder's runs: what a changed schedule is worth to a full run.

Steps are tokens over the ladder's batch, so that runs of other batches compare. Rates are those at the base shape, which muP
transfers. A loss is the mean of the training loss over a window, times the ratio of held-out to training loss on the ladder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from muscale.plans.band import held_out_offset
from muscale.proxies.ladder_curves import Floats, rates_of, read_curves
from muscale.store.ledger import Ledger
from proxy_models.recipes.segments import Segment
from scaling import ScalingError, ScheduleFit, fit_schedules

_WINDOWS = 50
"""Windows of a run: a fiftieth is short compared with a cooldown, and averages many steps."""
_AHEAD = 200  # rows of a schedule that is not trained yet


@dataclass(frozen=True, kw_only=True)
class LadderSchedules:
    """The law of the ladder's schedules.

    Attributes:
        batch_tokens: Tokens of a step.
        offset: Log of held-out over training loss of the same weights.
    """

    law: ScheduleFit
    batch_tokens: int
    offset: float

    @classmethod
    def of(cls, ledger: Ledger, ladder: pd.DataFrame, *, batch_tokens: int, max_regret: float) -> LadderSchedules:
        """Fit the law to the runs of the ladder that are in the law of size and tokens.

        Args:
            ladder: Table of `ladder.law_rows`.
            max_regret: Value of [fit].

        Raises:
            ScalingError: If no curves are recorded, or no law can be fitted to them.
        """
        fitted = ladder[(ladder["purpose"] == "ladder") & (ladder["left_out"] == "") & (ladder["regret"] <= max_regret)]
        sizes = [
            (n, curve)
            for n, key in zip(fitted["n_params"], fitted["key"], strict=True)
            for curve in read_curves(ledger, [key])
        ]
        if not sizes:
            raise ScalingError("no run of the ladder has a recorded curve")
        warmup = max(curve.warmup_tokens / curve.n_tokens for _, curve in sizes)
        offset, _ = held_out_offset([curve for _, curve in sizes], warmup)
        offset = 0.0 if math.isnan(offset) else offset
        first = max(curve.warmup_tokens for _, curve in sizes)
        tables = []
        for number, (n_params, curve) in enumerate(sizes):
            warm = curve.positions >= first
            rows = measured(curve.positions[warm], curve.rates[warm], curve.train_loss[warm], offset)
            end = pd.DataFrame([{"tokens": curve.n_tokens, "lr": 0.0, "loss": curve.final_loss}])
            tables.append(pd.concat([rows, end]).assign(run=f"run {number}", n_params=float(n_params)))
        rows = pd.concat(tables, ignore_index=True)
        rows["step"] = rows["tokens"] / batch_tokens
        try:
            law = fit_schedules(rows.drop(columns="tokens"), warmup_steps=first / batch_tokens)
        except ValueError as error:
            raise ScalingError(f"the ladder's curves: {error}") from error
        return cls(law=law, batch_tokens=batch_tokens, offset=offset)

    def path(self, so_far: pd.DataFrame, ahead: Sequence[Segment] = (), begins: int = 0) -> pd.DataFrame:
        """A run for `ScheduleFit.forecast`: its measured rows after the warmup, then the rates of segments.

        Args:
            so_far: Columns tokens, lr and loss, as of `measured`.
            ahead: Segments, counted from `begins` tokens of the run.
        """
        parts = [so_far]
        if ahead:
            points = np.linspace(0, ahead[-1].end, _AHEAD + 1)[1:]
            rates = rates_of(ahead, np.minimum(points, ahead[-1].end - 1.0))
            rates[-1] = _end_rate(ahead[-1])
            parts.append(pd.DataFrame({"tokens": points + begins, "lr": rates, "loss": math.nan}))
        whole = pd.concat(parts, ignore_index=True)
        warm = max(law.warmup_steps for law in self.law.laws) * self.batch_tokens
        whole = whole[whole["tokens"] >= warm]
        return pd.DataFrame({"step": whole["tokens"] / self.batch_tokens, "lr": whole["lr"], "loss": whole["loss"]})


def _end_rate(segment: Segment) -> float:
    """The rate that a schedule reaches at its end, where no step begins any more."""
    return max(0.0, segment.recipe.learning_rate * segment.phase.factor(segment.end, segment.recipe.batch_tokens))


def measured(positions: Floats, rates: Floats, train_loss: Floats, offset: float) -> pd.DataFrame:
    """Columns tokens, lr and loss: means over windows of equally many steps.

    Args:
        positions: Tokens before each step, shape (steps,).
        rates: Rate of each step at the base shape, shape (steps,).
        train_loss: Training loss of each step, nats per token, shape (steps,).
        offset: Log of held-out over training loss.
    """
    parts = np.array_split(np.arange(len(positions)), min(_WINDOWS, max(1, len(positions))))
    return pd.DataFrame(
        {
            "tokens": [float(positions[part].mean()) for part in parts],
            "lr": [float(rates[part].mean()) for part in parts],
            "loss": [math.exp(float(np.log(train_loss[part]).mean()) + offset) for part in parts],
        }
    )
