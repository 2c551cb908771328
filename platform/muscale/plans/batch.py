"""The batch of the full run, and what is transferred to it: rate, beta2 and eps of a sweep and a ladder with the study's own batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from muscale.serialization import Recorded
from proxy_models.recipes.hyperparameters import OPTIMIZERS_THAT_READ, Hyperparameters
from scaling import BatchLaw
from scaling.optima.batch import CURVATURE, RATE_EXPONENT, published_batch

Source = Literal["the study's grids", "Step Law", "stated"]
BY_BATCH = ("batch_tokens", "learning_rate", "swap_learning_rate", "beta2", "eps")
"""What another batch may change."""
EPS_EXPONENT = -0.5
"""Of Adam's eps in the batch: gradients of a mean over κ times as many tokens have 1/√κ of the noise (2205.10287)."""
FAR = 4.0
"""Factor from the proxies' batch, or from the best by a law, up to which the gate lets a batch pass (assumed)."""
_MOST_OCTAVES = 20


@dataclass(frozen=True, kw_only=True)
class BatchChoice(Recorded):
    """The full run's batch, where it is not the one of the sweep and the ladder or a law has its best.

    Attributes:
        tokens: Of one optimizer step, after a ramp.
        first_tokens: Of the first step, before the ramp.
        tuned_tokens, tuned_first_tokens: The same of the sweep and the ladder.
        best_tokens: The best at the run's length by a law; None where none covers the length.
        source: What the batch is from.
        rate_exponent: r, the best rate at equal tokens being ∝ batch^r, with its standard error.
        curvature: Second derivative of log loss in log2 of the batch, the rate tuned.
    """

    tokens: int
    first_tokens: int
    tuned_tokens: int
    tuned_first_tokens: int
    best_tokens: float | None
    source: Source
    rate_exponent: tuple[float, float]
    curvature: float

    @property
    def ratio(self) -> float:
        """The batch, over the tuned one."""
        return self.tokens / self.tuned_tokens

    @property
    def furthest(self) -> float:
        """The ratio that is further from 1: of the batches after their ramps, or of the first ones."""
        return max(self.ratio, self.first_tokens / self.tuned_first_tokens, key=lambda ratio: _apart(ratio, 1.0))

    @property
    def is_far(self) -> bool:
        """Whether the batch, or the first of a ramp, is further from the proxies' than `FAR`."""
        return _apart(self.furthest, 1.0) > FAR

    @property
    def is_covered(self) -> bool:
        """Whether the batch and the first of a ramp are each within `FAR` of the proxies' or of the best by a law."""
        return all(
            min(_apart(tokens, known) for known in (tuned, self.best_tokens) if known) <= FAR
            for tokens, tuned in (
                (self.tokens, self.tuned_tokens),
                (self.first_tokens, self.tuned_first_tokens),
            )
        )

    @property
    def effect(self) -> float:
        """By how much log loss may differ from a run's at the tuned batch, whose policy the law and its forecast are of.

        The difference of both from the best batch's where a law has one, else what so many octaves cost on Step Law's grids.
        Far above the critical batch that is too little: 2.5 % at eight times the proxies' batch, where 128 steps were left and
        13.6 % were measured (tests/benchmarks/batch_transfer.py). Beyond `FAR`, and where no law has a best, the forecast is
        unsupported for that reason.
        """
        if self.best_tokens is None:
            return _cost(self.tokens, self.tuned_tokens, self.curvature)
        return abs(
            _cost(self.tokens, self.best_tokens, self.curvature)
            - _cost(self.tuned_tokens, self.best_tokens, self.curvature)
        )

    def transfer(self, tuned: Hyperparameters) -> Hyperparameters:
        """The hyperparameters with this batch: rate, beta2 and eps as good there as they were at the tuned one.

        Batches are those after their ramps, where most of a run is trained: a schedule's factor does not depend on the batch.
        At a smaller batch beta2 keeps its half-life in tokens (2507.07101). At a larger one it stays: .95^8 lost 10 % at eight times
        the batch, as .9^8 of beta1 lost 7.6 %, where .8 is better than .9 at both (tests/benchmarks/batch_transfer.py). So does beta1.
        """
        factor = self.ratio ** self.rate_exponent[0]
        reads = {name for name, readers in OPTIMIZERS_THAT_READ.items() if tuned.optimizer in readers}
        return replace(
            tuned,
            batch_tokens=self.tokens,
            learning_rate=tuned.learning_rate * factor,
            swap_learning_rate=tuned.swap_learning_rate * factor,
            beta2=tuned.beta2 ** min(self.ratio, 1.0) if "beta2" in reads else tuned.beta2,
            eps=tuned.eps * self.ratio**EPS_EXPONENT if "eps" in reads else tuned.eps,
        )

    def __str__(self) -> str:
        best = f"; best by law {self.best_tokens:,.0f}" if self.best_tokens else "; no law of the batch covers this run"
        ramp = f" from {self.first_tokens:,}" if self.first_tokens != self.tokens else ""
        source = self.source if self.source == "stated" else f"by {self.source}"
        return f"{self.tokens:,} tokens a step{ramp}, {self.ratio:g}× the proxies', {source}{best}"


def choose_batch(
    tuned: Hyperparameters,
    law: BatchLaw | None,
    n_tokens: float,
    explicit: Mapping[str, Any],
    *,
    sequence_tokens: int,
    ranks: int,
) -> BatchChoice | None:
    """The full run's batch, or None where it is the proxies' and no law has another to compare.

    The batch that is stated, else that of the law of the study's grids, else Step Law's inside the range that it was fitted on:
    the power of two times the proxies' that is nearest. Elsewhere the proxies' own.

    Args:
        law: Of the study's own grids.
        explicit: Hyperparameters that are stated for the full run.
        sequence_tokens: Of a sequence; every batch, the first of a ramp too, is whole sequences.
        ranks: That must have a sequence each of a batch that is smaller than the proxies'.
    """
    known = law if law is not None and law.supports(n_tokens) else None
    best = float(known.batch_tokens(n_tokens)) if known else published_batch(n_tokens)
    doublings = explicit.get("batch_doublings", tuned.batch_doublings)
    source: Source = "the study's grids" if known else "Step Law"
    tokens = tuned.batch_tokens
    if "batch_tokens" in explicit:
        tokens, source = explicit["batch_tokens"], "stated"
    elif best is not None:
        unit = sequence_tokens << doublings
        tokens = _nearest(tokens, best, least=min(tokens, ranks * unit), unit=unit)
    first, tuned_first = tokens >> doublings, tuned.batch_tokens >> tuned.batch_doublings
    if best is None and (tokens, first) == (tuned.batch_tokens, tuned_first):
        return None
    return BatchChoice(
        tokens=tokens,
        first_tokens=first,
        tuned_tokens=tuned.batch_tokens,
        tuned_first_tokens=tuned_first,
        best_tokens=best,
        source=source,
        rate_exponent=law.rate_exponent if law is not None else RATE_EXPONENT,
        curvature=law.curvature if law is not None else CURVATURE,
    )


def _nearest(tokens: int, best: float, *, least: int, unit: int) -> int:
    """The power of two times a batch nearest to the best, of those that hold the least and are whole units."""
    scaled = [tokens * 2.0**octaves for octaves in range(-_MOST_OCTAVES, _MOST_OCTAVES + 1)]
    fitting = [round(batch) for batch in scaled if batch >= least and batch % unit == 0]
    return min(fitting, key=lambda batch: _apart(batch, best), default=tokens)


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def _cost(tokens: float, best_tokens: float, curvature: float) -> float:
    """Log loss above the best batch's."""
    return curvature / 2 * math.log2(tokens / best_tokens) ** 2
