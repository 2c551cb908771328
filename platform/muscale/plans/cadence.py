"""Intervals at which a full run saves and evaluates: plain numbers that change neither the run's key nor its forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from muscale.settings.promote import PromoteSettings
from proxy_models.architecture.member import Member

DEVICE_HOURS_PER_FAULT = 50_700.0
"""Device-hours per unexpected interruption: 419 in 54 days of 16,384 H100s (Grattafiori et al., arXiv 2407.21783,
section 3.3.4)."""
SAVE_SECONDS, SAVE_BYTES_PER_SECOND = 2.0, 1e9
"""Fixed time of a checkpoint, and the rate at which each worker writes its part of the bytes (assumed)."""
SAVE_SHARE = 0.01
"""Largest share of the run's time that saving takes by default."""
MAX_MINUTES = 60.0
"""Longest default interval; preemptions and job time limits come more often than device faults (assumed)."""
MIN_CHECKPOINTS, MIN_EVALUATIONS, MAX_EVALUATIONS = 20, 20, 100
"""Default counts over a run: a short run is saved 20 times and evaluated up to 20 times, and no band needs more than 100 points."""
EVALUATION_SHARE, MOST_EVALUATION_SHARE = 0.02, 0.1
"""Default shares of a run's FLOPs for evaluations: the first if it allows `MIN_EVALUATIONS`, the second in a shorter run."""
_TRAINING_PER_FORWARD = 3  # FLOPs of a training step per FLOP of its forward pass


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The intervals of one run.

    Attributes:
        checkpoint_every_tokens: Save at the first step that passes a multiple.
        checkpoint_every_minutes: Also save this long after the start of the last checkpoint; None: not by time.
        evaluate_every_tokens: Evaluate at the first step that passes a multiple; None: at the end only.
        evaluation_tokens: Held-out tokens of one evaluation.
        save_seconds: Estimated time of one checkpoint.
    """

    n_tokens: int
    checkpoint_every_tokens: int
    checkpoint_every_minutes: float | None
    evaluate_every_tokens: int | None
    evaluation_tokens: int
    save_seconds: float

    @classmethod
    def of(
        cls, settings: PromoteSettings, model: Member, *, optimizer: str, n_tokens: int, evaluation_tokens: int
    ) -> Self:
        """Return the intervals of [promote]; intervals that it leaves open depend on the run.

        Checkpoints are then Young's interval apart, √(2 · save time · time between faults) (CACM 17(9), 1974), and evaluations
        take at most 2 % of the FLOPs. A run too short for that is saved 20 times, and evaluated as often if that takes at most 10 %.
        """
        from proxy_models.training.traced_memory import checkpoint_bytes  # imports torch

        save_seconds = SAVE_SECONDS + checkpoint_bytes(model, optimizer) / settings.workers / SAVE_BYTES_PER_SECOND
        minutes = settings.checkpoint_every_minutes
        if minutes is None and settings.checkpoint_every_tokens is None:
            minutes = _minutes_between_saves(save_seconds, settings.workers)
        evaluations = _evaluations(n_tokens / evaluation_tokens)
        evaluates = settings.evaluate_every_tokens or -(-n_tokens // evaluations)
        return cls(
            n_tokens=n_tokens,
            checkpoint_every_tokens=settings.checkpoint_every_tokens or -(-n_tokens // MIN_CHECKPOINTS),
            checkpoint_every_minutes=minutes,
            evaluate_every_tokens=evaluates if settings.evaluation == "sync" else None,
            evaluation_tokens=evaluation_tokens,
            save_seconds=save_seconds,
        )

    @property
    def evaluations(self) -> int:
        """Evaluations of the run, including the one at its end."""
        return -(-self.n_tokens // (self.evaluate_every_tokens or self.n_tokens))

    @property
    def checkpoints(self) -> int:
        """Checkpoints of the run by tokens; the run writes more if the minutes come first."""
        return -(-self.n_tokens // self.checkpoint_every_tokens)

    @property
    def evaluation_share(self) -> float:
        """Ratio of the evaluations' FLOPs to the training's: a forward pass is a third of a step."""
        return self.evaluations * self.evaluation_tokens / (_TRAINING_PER_FORWARD * self.n_tokens)

    def save_share(self, run_seconds: float | None) -> float | None:
        """Share of the run's time that saves take; None if its duration is unknown and no interval in minutes bounds the share."""
        by_time = self.save_seconds / 60 / self.checkpoint_every_minutes if self.checkpoint_every_minutes else 0.0
        if run_seconds is None:
            return by_time or None
        return max(by_time, self.checkpoints * self.save_seconds / run_seconds)

    def __str__(self) -> str:
        """Return a line with both intervals and their counts."""
        saves = f"saves every {self.checkpoint_every_tokens:,} tokens ({self.checkpoints})"
        if self.checkpoint_every_minutes:
            saves += f" or {self.checkpoint_every_minutes:.3g} minutes"
        if self.evaluate_every_tokens is None:
            return f"{saves}, evaluates only at the end"
        return f"{saves}, evaluates every {self.evaluate_every_tokens:,} tokens ({self.evaluations})"


def _minutes_between_saves(save_seconds: float, workers: int) -> float:
    """Return Young's interval, at most an hour, or longer if saves would otherwise take more than `SAVE_SHARE` of the time."""
    young = math.sqrt(2 * save_seconds * DEVICE_HOURS_PER_FAULT * 3600 / workers) / 60
    return max(min(young, MAX_MINUTES), save_seconds / 60 / SAVE_SHARE)


def _evaluations(ratio: float) -> int:
    """Return the default number of evaluations of a run with `ratio` times the tokens of one evaluation."""
    affordable, most = (_TRAINING_PER_FORWARD * share * ratio for share in (EVALUATION_SHARE, MOST_EVALUATION_SHARE))
    return max(1, int(min(MAX_EVALUATIONS, max(affordable, min(MIN_EVALUATIONS, most)))))
