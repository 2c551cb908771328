"""The batch of the full run, and the transfer of rate, beta2 and eps to it from the batch of the sweep and the ladder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from muscale.serialization import Recorded
from proxy_models.recipes.hyperparameters import OPTIMIZERS_THAT_READ, Hyperparameters
from scaling import BatchLaw
from scaling.optima.batch_law import CURVATURE, RATE_EXPONENT, published_batch

Source = Literal["the study's grids", "Step Law", "stated"]
BY_BATCH = ("batch_tokens", "learning_rate", "beta2", "eps")
"""Hyperparameters that a different batch may change."""
EPS_EXPONENT = -0.5
"""Exponent of Adam's eps in the batch: gradients of a mean over κ times as many tokens have 1/√κ of the noise (2205.10287)."""
FAR = 4.0
"""Largest factor from the proxies' batch, or from a law's best batch, that the gate lets pass (assumed)."""
_MOST_OCTAVES = 20


@dataclass(frozen=True, kw_only=True)
class BatchChoice(Recorded):
    """The full run's batch, if it differs from the batch of the sweep and the ladder, or if a law gives a best batch.

    Attributes:
        tokens: Batch of one optimizer step, after a ramp.
        first_tokens: Batch of the first step, before the ramp.
        tuned_tokens, tuned_first_tokens: The same for the sweep and the ladder.
        best_tokens: Best batch at the run's length by a law; None if no law covers the length.
        rate_exponent: r, where the best rate at equal tokens is ∝ batch^r, with its standard error.
        curvature: Second derivative of log loss in log2 of the batch, with the rate tuned.
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
        """Ratio of the batch to the tuned batch."""
        return self.tokens / self.tuned_tokens

    @property
    def extreme_ratio(self) -> float:
        """The ratio that is further from 1: that of the batches after their ramps, or that of the first batches."""
        return max(self.ratio, self.first_tokens / self.tuned_first_tokens, key=lambda ratio: _apart(ratio, 1.0))

    @property
    def is_far(self) -> bool:
        """Whether the ratio of the batch to the proxies', or of the ramps' first batches, is beyond `FAR`."""
        return _apart(self.extreme_ratio, 1.0) > FAR

    @property
    def is_covered(self) -> bool:
        """Whether the batch and the first batch of a ramp are each within `FAR` of the proxies' or of a law's best batch."""
        return all(
            min(_apart(tokens, known) for known in (tuned, self.best_tokens) if known) <= FAR
            for tokens, tuned in ((self.tokens, self.tuned_tokens), (self.first_tokens, self.tuned_first_tokens))
        )

    @property
    def effect(self) -> float:
        """Difference that log loss may have from a run at the tuned batch, for which the law and its forecast hold.

        If a law has a best batch, the estimate is the difference between the costs of both batches above it. Otherwise it is the
        cost of as many octaves on Step Law's grids. Far above the critical batch the estimate is too low: at eight times the
        proxies' batch it gives 2.5 %, but 13.6 % were measured with 128 steps left (tests/benchmarks/batch_transfer.py). The
        forecast is therefore unsupported beyond `FAR`, and if no law gives a best batch.
        """
        if self.best_tokens is None:
            return _cost(self.tokens, self.tuned_tokens, self.curvature)
        return abs(
            _cost(self.tokens, self.best_tokens, self.curvature)
            - _cost(self.tuned_tokens, self.best_tokens, self.curvature)
        )

    def transfer(self, tuned: Hyperparameters) -> Hyperparameters:
        """Return the hyperparameters at this batch, with rate, beta2 and eps as good as they were at the tuned batch.

        The batches compared are those after their ramps, where most of a run is trained: a schedule's factor does not depend on the
        batch. At a smaller batch beta2 keeps its half-life in tokens (2507.07101). At a larger one beta1 and beta2 stay. At eight
        times the batch .95^8 lost 10 %, and .9^8 for beta1 lost 7.6 %, while .8 is better than .9 at both
        (tests/benchmarks/batch_transfer.py).
        """
        factor = self.ratio ** self.rate_exponent[0]
        reads = {name for name, readers in OPTIMIZERS_THAT_READ.items() if tuned.optimizer in readers}
        return replace(
            tuned,
            batch_tokens=self.tokens,
            learning_rate=tuned.learning_rate * factor,
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
    least_sequences: int,
) -> BatchChoice | None:
    """Choose the full run's batch; return None if it is the proxies' batch and no law has a batch to compare.

    A stated batch comes first, then the law of the study's grids, then Step Law inside the range that it was fitted on. A law's
    batch is rounded to the nearest power of two times the proxies' batch. Otherwise the proxies' batch stays.

    Args:
        law: Law of the study's own grids.
        explicit: Hyperparameters stated for the full run.
        sequence_tokens: Tokens of a sequence; every batch, including the first of a ramp, is whole sequences.
        least_sequences: Sequences that a batch smaller than the proxies' must have, so that the workers can share it.
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
        tokens = _nearest(tokens, best, least=min(tokens, least_sequences * unit), unit=unit)
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
    """Return the power of two times a batch that is nearest to the best, has at least `least` tokens and is whole units."""
    scaled = [tokens * 2.0**octaves for octaves in range(-_MOST_OCTAVES, _MOST_OCTAVES + 1)]
    fitting = [round(batch) for batch in scaled if batch >= least and batch % unit == 0]
    return min(fitting, key=lambda batch: _apart(batch, best), default=tokens)


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def _cost(tokens: float, best_tokens: float, curvature: float) -> float:
    """Log loss above the loss at the best batch."""
    return curvature / 2 * math.log2(tokens / best_tokens) ** 2
