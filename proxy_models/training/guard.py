"""The stability guard: a step whose loss or gradient norm is far out of the ordinary is not taken.

The reference is the median and the median absolute deviation of the accepted steps before it, which one spike
can't move. Skipping the batch, and going back before skipping, are what PaLM's training did by hand (Chowdhery et al., arXiv
2204.02311, section 5.1).

The guard is off unless a run asks for it. A search wants to know which configurations are unstable, and one whose spikes are
skipped would be ranked as if it were stable; and a decision needs the numbers of each step at once, which makes an accelerator
wait. A loss that is not finite ends a run as diverged, guard or none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_MAD_TO_SD = 1.4826  # of a normal distribution
_LEAST_DEVIATION = 0.01  # of the median: in a window with less noise than this, small steps would be spikes

Action = Literal["skip", "rewind"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Definition of a spike and the action taken on one; they determine the numbers of a run.

    Attributes:
        action: "skip" leaves the step out; "rewind" also puts the weights and moments of the last snapshot back. The
            position goes on in both: the batches between snapshot and spike are not seen again.
        window: Accepted steps that a step is compared with; nothing is judged before half of them are there.
        threshold: Robust standard deviations above the median that make a spike.
        max_spikes: More than so many within `window` steps end the run as diverged.
        snapshot_every: Steps between snapshots, kept in memory and in the training state; for "rewind" only.
    """

    action: Action = "skip"
    window: int = 128
    threshold: float = 10.0
    max_spikes: int = 3
    snapshot_every: int = 64

    def __post_init__(self) -> None:
        if self.action not in ("skip", "rewind"):
            raise ValueError(f'action must be "skip" or "rewind", got {self.action!r}')
        if self.window < 8:
            raise ValueError(f"window must be at least 8 steps for a median to mean anything, got {self.window}")
        if not self.threshold > 0:
            raise ValueError(f"threshold must be positive, got {self.threshold}")
        if self.max_spikes < 0 or self.snapshot_every < 1:
            raise ValueError(
                f"max_spikes must not be negative and snapshot_every be positive, got {self.max_spikes} and "
                f"{self.snapshot_every}"
            )


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Step and reason of a training that ended without a loss."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step that was not taken."""

    step: int
    quantity: Literal["loss", "gradient norm"]
    value: float
    limit: float
    action: Action

    def __str__(self) -> str:
        return f"step {self.step}: {self.quantity} {self.value:.4g} above {self.limit:.4g}, {self.action}"


class Guard:
    """Judges one step after the other; `memory` is all the state that it needs to go on."""

    def __init__(self, settings: GuardSettings, memory: NDArray[np.float64] | None = None) -> None:
        self.settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._norms: deque[float] = deque(maxlen=settings.window)
        self._spikes: deque[int] = deque(maxlen=settings.max_spikes + 1)
        if memory is not None:
            kept = memory[:, ~np.isnan(memory[0])]
            self._losses.extend(kept[0].tolist())
            self._norms.extend(kept[1].tolist())
            self._spikes.extend(int(step) for step in memory[2][~np.isnan(memory[2])])

    @property
    def memory(self) -> NDArray[np.float64]:
        """Losses, norms and steps of spikes, newest last, NaN where there are none yet; shape (3, n) fixed by the settings."""
        rows = np.full((3, max(self.settings.window, self.settings.max_spikes + 1)), np.nan)
        remembered: tuple[Sequence[float], ...] = (self._losses, self._norms, self._spikes)
        for row, values in zip(rows, remembered, strict=True):
            if values:
                row[-len(values) :] = values
        return rows

    def judge(self, step: int, loss: float, norm: float) -> Spike | Divergence | None:
        """Return None if the step may be taken, else the spike or the divergence."""
        for name, value in (("training loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return Divergence(step=step, reason=f"the {name} is {value} at step {step}")
        spike = self._spike(step, "loss", loss, self._losses) or self._spike(step, "gradient norm", norm, self._norms)
        if spike is None:
            self._losses.append(loss)
            self._norms.append(norm)
            return None
        self._spikes.append(step)
        recent = sum(step - earlier < self.settings.window for earlier in self._spikes)
        if recent > self.settings.max_spikes:
            return Divergence(
                step=step, reason=f"{recent} spikes within {self.settings.window} steps, the last at {spike}"
            )
        return spike

    def _spike(
        self, step: int, quantity: Literal["loss", "gradient norm"], value: float, window: deque[float]
    ) -> Spike | None:
        if len(window) < self.settings.window // 2:
            return None
        limit = robust_limit(np.array(window), self.settings.threshold)
        if value <= limit:
            return None
        return Spike(step=step, quantity=quantity, value=value, limit=limit, action=self.settings.action)


def robust_limit(values: NDArray[np.float64], threshold: float) -> float:
    """Median plus `threshold` robust standard deviations."""
    median = float(np.median(values))
    deviation = _MAD_TO_SD * float(np.median(np.abs(values - median)))
    return median + threshold * max(deviation, _LEAST_DEVIATION * abs(median))
