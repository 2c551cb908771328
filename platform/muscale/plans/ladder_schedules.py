"""The law of the loss along a schedule, of the ladder's runs: what a changed schedule is worth to a full run.

Steps are tokens, which the law counts as shares of the tokens of a run before cooldown (a stem), so that branches of short stems show
what a cooldown is worth to a long run. Rates are those at the base shape, as shares of the peak. A loss is the mean of the training
loss over a window, times the ratio of held-out to training loss on the ladder. Its noise is the spread of the steps' losses over the
root of their number, by differences of neighbouring steps, so that a trend does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from muscale.errors import refusing
from muscale.plans.band import held_out_offset
from muscale.proxies.ladder_curves import Floats, rates_of, read_curves
from muscale.store.ledger import Ledger
from proxy_models.recipes.segments import Segment
from scaling import ScalingError, ScheduleFit, fit_schedules

_WINDOWS = 50
"""Windows of a run: a fiftieth is short compared with a cooldown, and averages many steps."""
_NORMAL_MEDIAN = 0.6745  # median of the absolute value of a standard normal draw
_EARLY = 1 / 3  # first evaluations, between which the loss falls too steeply to show their noise
_AHEAD = 200  # rows of a schedule that is not trained yet


@dataclass(frozen=True, kw_only=True)
class LadderSchedules:
    """The law of the ladder's schedules.

    Attributes:
        warmup: Longest warmup of the ladder's runs, as a share of the stem's tokens.
        offset: Log of held-out over training loss of the same weights.
    """

    law: ScheduleFit
    warmup: float
    offset: float

    @classmethod
    def of(cls, ledger: Ledger, ladder: pd.DataFrame, *, max_regret: float) -> LadderSchedules:
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
        offset, error = held_out_offset(
            [curve for _, curve in sizes], max(c.warmup_tokens / c.n_tokens for _, c in sizes)
        )
        offset, error = (0.0, 0.0) if math.isnan(offset) else (offset, error)
        lengths = dict[str, int]()
        for _, curve in sizes:
            lengths[curve.stem] = max(curve.n_tokens, lengths.get(curve.stem, 0))
        warmup = max(curve.warmup_tokens / lengths[curve.stem] for _, curve in sizes)
        tables = []
        for number, (n_params, curve) in enumerate(sizes):
            length = lengths[curve.stem]
            warm = curve.positions >= warmup * length
            rows = measured(curve.positions[warm], curve.rates[warm], curve.train_loss[warm], offset)
            end = pd.DataFrame([{"tokens": curve.n_tokens, "lr": 0.0, "loss": curve.final_loss, "noise": error}])
            of_run = {"run": f"run {number}", "schedule": f"to {curve.n_tokens / length:.0%}"}
            tables.append(pd.concat([rows, end]).assign(n_params=float(n_params), length=float(length), **of_run))
        table = pd.concat(tables, ignore_index=True).rename(columns={"tokens": "step"})
        with refusing("the ladder's curves", raising=ScalingError):
            law = fit_schedules(table, warmup_share=warmup)
        return cls(law=law, warmup=warmup, offset=offset)

    def path(
        self, so_far: pd.DataFrame, ahead: Sequence[Segment] = (), begins: int = 0, *, length: float
    ) -> pd.DataFrame:
        """A run for `ScheduleFit.forecast`: its measured rows after the warmup, then the rates of segments.

        Args:
            so_far: Columns tokens, lr, loss and noise, as of `measured` or `evaluated`.
            ahead: Segments, counted from `begins` tokens of the run.
            length: Tokens that the run was to have before any change.
        """
        parts = [so_far]
        if ahead:
            points = np.linspace(0, ahead[-1].end, _AHEAD + 1)[1:]
            rates = rates_of(ahead, np.minimum(points, ahead[-1].end - 1.0))
            rates[-1] = _end_rate(ahead[-1])
            parts.append(pd.DataFrame({"tokens": points + begins, "lr": rates, "loss": math.nan}))
        whole = pd.concat(parts, ignore_index=True).rename(columns={"tokens": "step"})
        return whole[(whole["step"] > 0) & (whole["step"] >= self.warmup * length)]


def _end_rate(segment: Segment) -> float:
    """The rate that a schedule reaches at its end, where no step begins any more."""
    return max(0.0, segment.recipe.learning_rate * segment.phase.factor(segment.end, segment.recipe.batch_tokens))


def measured(positions: Floats, rates: Floats, train_loss: Floats, offset: float) -> pd.DataFrame:
    """Columns tokens, lr and loss, means over windows of equally many steps, and noise, the standard error of the log loss.

    Args:
        positions: Tokens before each step, shape (steps,).
        rates: Rate of each step at the base shape, shape (steps,).
        train_loss: Training loss of each step, nats per token, shape (steps,).
        offset: Log of held-out over training loss.
    """
    parts = np.array_split(np.arange(len(positions)), min(_WINDOWS, max(1, len(positions))))
    of_step = _spread(np.diff(np.log(train_loss)), 2)
    return pd.DataFrame(
        {
            "tokens": [float(positions[part].mean()) for part in parts],
            "lr": [float(rates[part].mean()) for part in parts],
            "loss": [math.exp(float(np.log(train_loss[part]).mean()) + offset) for part in parts],
            "noise": [of_step / math.sqrt(max(1, len(part))) for part in parts],
        }
    )


def evaluated(losses: pd.DataFrame) -> pd.DataFrame:
    """Add the column noise to held-out losses, columns tokens, lr and loss: their spread around a line through both neighbours."""
    logs = np.log(losses["loss"].to_numpy(np.float64))
    bends = np.diff(logs[int(_EARLY * len(logs)) :], 2)
    return losses[["tokens", "lr", "loss"]].assign(noise=_spread(bends, 6))


def _spread(differences: Floats, variances: int) -> float:
    """Standard deviation of values by differences, each with the variance of so many; 0 without differences.

    The median gives it, since spikes and the steep loss of the first steps do not move it.
    """
    return float(np.median(np.abs(differences))) / (_NORMAL_MEDIAN * math.sqrt(variances)) if len(differences) else 0.0
