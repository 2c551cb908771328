"""The stability guard: it leaves out a step whose loss or gradient norm is far above the usual values.

The reference is the median and the median absolute deviation of the previous accepted steps, which one spike can't
move. Skipping the batch, and going back before skipping, are what PaLM's training did by hand (Chowdhery et al., arXiv
2204.02311, section 5.1).

The guard is off unless a run asks for it. A search has to know which configurations are unstable, and would rank them as
stable if their spikes were skipped. With or without a guard, a run ends as diverged if a loss is not finite or
`judge_evaluation` finds a divergence.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from proxy_models.training.guard_settings import Action, GuardSettings

_MAD_TO_SD = 1.4826  # for a normal distribution
_LEAST_DEVIATION = 0.01  # relative to the median: in a window with less noise, small steps would count as spikes

MOST_UNIFORMS = 10.0
"""Validation loss after warmup, in units of ln V, above which a run has diverged. Measured here on 131 runs of 200 steps (five
optimizers and seven variants of the decoder, rates of 1e-3 to 1e4, initial scales of 1/4 to 16, readouts × 4 and 16). In the 71 runs
whose annealed loss is below ln V, the highest loss before the cooldown is 4.0 ln V; all runs above 10 ln V end at ln V or above.
Training losses of the 71 runs peak at 9 ln V in the warmup and 17 ln V after it, so this limit does not apply to training losses."""
VANISHED_NORM = 1e-6
"""Gradient norm below which a model no better than uniform has stopped learning. In the same runs the norm is exactly 0 if all logits
have become equal, and at least .098 after warmup in every run that ends below ln V."""
_UNIFORM = 0.999  # relative to ln V, which equal logits have up to rounding


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Step and reason of a training that ended without a loss."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step that the guard left out."""

    step: int
    quantity: Literal["loss", "gradient norm"]
    value: float
    limit: float
    action: Action

    def __str__(self) -> str:
        return f"step {self.step}: {self.quantity} {self.value:.4g} above {self.limit:.4g}, {self.action}"


Verdict = Spike | Divergence


def judge_evaluation(loss: float, norm: float, *, vocab_size: int, step: int, is_warm: bool) -> Divergence | None:
    """Return a divergence if a validation loss shows one, else None.

    Args:
        loss: Validation loss, nats per token.
        norm: Global gradient norm of the last step, before clipping.
        vocab_size: V; the uniform distribution has a loss of ln V.
        is_warm: Whether the warmup is over; before, only a loss that is not finite counts.
    """
    uniform = math.log(vocab_size)
    if not math.isfinite(loss):
        return Divergence(step=step, reason="the validation loss is not finite")
    if is_warm and loss > MOST_UNIFORMS * uniform:
        reason = f"the validation loss is {loss:.4g}, more than {MOST_UNIFORMS:g} ln V = {MOST_UNIFORMS * uniform:.4g}"
        return Divergence(step=step, reason=reason)
    if is_warm and loss > _UNIFORM * uniform and norm < VANISHED_NORM:
        reason = f"the validation loss is {loss:.4g}, no better than ln V = {uniform:.4g}, and the gradient norm is {norm:.2g}"
        return Divergence(step=step, reason=reason)
    return None


class Guard:
    """Judge of each step, with its window on the device; `read` returns the verdicts at any later time."""

    def __init__(self, settings: GuardSettings, device: torch.device, memory: Tensor | None = None) -> None:
        self.settings = settings
        self._window = torch.full((2, settings.window), math.nan, dtype=torch.float64, device=device)
        self._spikes: deque[int] = deque(maxlen=settings.max_spikes + 1)
        self._unread: list[tuple[int, Tensor]] = []
        if memory is not None:
            self._window.copy_(memory[:2, -settings.window :])
            self._spikes.extend(int(step) for step in memory[2].tolist() if not math.isnan(step))

    @property
    def memory(self) -> Tensor:
        """Losses, norms and steps of the spikes read, newest last and padded with NaN; float64 (3, n), n given by the settings."""
        rows = torch.full((3, max(self.settings.window, self.settings.max_spikes + 1)), math.nan, dtype=torch.float64)
        rows[:2, -self.settings.window :] = self._window.cpu()
        if self._spikes:
            rows[2, -len(self._spikes) :] = torch.tensor(self._spikes)
        return rows

    def forget(self) -> None:
        """Forget the accepted steps: the data change, so their losses are no measure for the next ones."""
        self._window = torch.full_like(self._window, math.nan)

    def judge(self, step: int, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether the step may be taken, as a bool on the device, so that the host need not wait."""
        values = torch.stack([loss, norm]).double()
        known = (~self._window[:1].isnan()).sum(dim=1)
        limits = torch.where(
            known >= self.settings.window // 2, robust_limit(self._window, self.settings.threshold), math.inf
        )
        passes = (values.isfinite() & (values <= limits)).all()
        self._window = torch.where(passes, torch.cat([self._window[:, 1:], values[:, None]], dim=1), self._window)
        self._unread.append((step, torch.cat([values, limits])))
        return passes

    def read(self) -> dict[int, Verdict]:
        """Return the refused steps since the last call with their reasons; wait for the device."""
        unread, self._unread = self._unread, []
        figures = torch.stack([of_step for _, of_step in unread]).tolist() if unread else []
        verdicts = {step: self._verdict(step, *values) for (step, _), values in zip(unread, figures, strict=True)}
        return {step: verdict for step, verdict in verdicts.items() if verdict}

    def _verdict(self, step: int, loss: float, norm: float, loss_limit: float, norm_limit: float) -> Verdict | None:
        for name, value in (("training loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return Divergence(step=step, reason=f"the {name} is {value} at step {step}")
        action = self.settings.action
        if loss > loss_limit:
            spike = Spike(step=step, quantity="loss", value=loss, limit=loss_limit, action=action)
        elif norm > norm_limit:
            spike = Spike(step=step, quantity="gradient norm", value=norm, limit=norm_limit, action=action)
        else:
            return None
        self._spikes.append(step)
        recent = sum(step - earlier < self.settings.window for earlier in self._spikes)
        if recent <= self.settings.max_spikes:
            return spike
        reason = f"{recent} spikes within {self.settings.window} steps, the last at {spike}"
        return Divergence(step=step, reason=reason)


def robust_limit(values: Tensor, threshold: float) -> Tensor:
    """Return median plus `threshold` robust standard deviations of each row, ignoring NaN."""
    median = _median(values)
    deviation = _MAD_TO_SD * _median((values - median[:, None]).abs())
    return median + threshold * torch.maximum(deviation, _LEAST_DEVIATION * median.abs())


def _median(values: Tensor) -> Tensor:
    """Return the median of each row, for an even number the mean of the middle two; ignores NaN, which sorts last."""
    known, ascending = (~values.isnan()).sum(dim=1, keepdim=True), values.sort(dim=1).values
    low, high = ((known - 1) // 2).clamp(min=0), (known // 2).clamp(max=values.shape[1] - 1)
    return ((ascending.gather(1, low) + ascending.gather(1, high)) / 2).squeeze(1)
