"""Held-out loss by source, in nats per token and in bits per byte, with standard errors.

The loss is measured as in training (`proxy_models.training.held_out_passes`), in up to `PASSES` passes of consecutive sequences of a
source. The standard error comes from the means of these passes. Neighbouring sequences may belong to one document, and tokens of one
document have related losses, so the errors of single tokens or sequences would be too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from proxy_models.architecture.families import family_of
from proxy_models.architecture.family import weighted
from proxy_models.architecture.member import NATS
from proxy_models.data.batches import EvaluationSet, evaluation_sets
from proxy_models.data.bits_per_byte import bits_per_byte, held_out_bytes
from proxy_models.evaluation.measure import Measured, Score, Subject
from proxy_models.hashing import content_key
from proxy_models.training.fsdp import settle
from proxy_models.training.held_out_passes import pass_losses, unsharded_batch

PASSES = 32
"""Most passes over a source, unless memory needs more; a standard error from 32 means is off by 1/sqrt(2 · 31) = 13 %."""


@dataclass(frozen=True, kw_only=True)
class HeldOutLosses:
    """Mean losses of passes over held-out sequences, or differences of such losses between two models.

    Attributes:
        weights: Weight of each source in the corpus's loss.
        sizes: Sequences of each pass, by source, or its tokens that count where others don't.
        means: Mean loss of each pass, by source, nats per token.
    """

    weights: Mapping[str, float]
    sizes: Mapping[str, NDArray[np.float64]]
    means: Mapping[str, NDArray[np.float64]]

    def __sub__(self, other: Self) -> Self:
        """Return the difference of each pass, whose standard error is that of a paired comparison."""
        return replace(self, means={name: means - other.means[name] for name, means in self.means.items()})

    def score(self, measure: str, name: str, metric: str, weights: Mapping[str, float] | None = None) -> Score:
        """Return the mean over the sequences of each source, summed with `weights`, by default the corpus's.

        The standard error is None if a source has a single pass.
        """
        value, variance, n, is_known = 0.0, 0.0, 0, True
        for source, weight in (self.weights if weights is None else weights).items():
            if not weight:
                continue
            means, shares = self.means[source], self.sizes[source] / self.sizes[source].sum()
            mean, k = float(shares @ means), len(means)
            value += weight * mean
            n += int(self.sizes[source].sum())
            is_known &= k > 1
            variance += weight**2 * k / max(1, k - 1) * float(shares**2 @ (means - mean) ** 2)
        error = math.sqrt(variance) if is_known else None
        return Score(measure=measure, name=name, metric=metric, value=value, standard_error=error, n=n)


class HeldOutSequences:
    """The held-out sequences of a subject, on its device."""

    def __init__(self, subject: Subject) -> None:
        """Read the sequences; raise ValueError if the corpus has fewer held-out tokens than the run evaluates."""
        numerics = subject.numerics
        self._subject, self._loss = subject, family_of(numerics.model).evaluation_loss
        # ranks need equally many passes
        self._batch = min(subject.ranks.gather(unsharded_batch(numerics, subject.device)))
        self._sets = evaluation_sets(subject.corpus, numerics.model.context_length, numerics.evaluation_tokens)

    def losses(self) -> HeldOutLosses:
        """Measure the losses of the model as it is now."""
        model, device, sizes, means = self._subject.model, self._subject.device, {}, {}
        for name, held_out in self._sets.items():
            batch = min(self._batch, -(-len(held_out.sequences) // PASSES))
            passes = [replace(held_out, sequences=part) for part in torch.split(held_out.sequences, batch)]

            def mean_loss(part: EvaluationSet) -> float:
                loss, n = weighted(self._loss, part.scale), len(part.sequences)
                ((mean, _),) = pass_losses(model, loss, part.sequences, device=device, batch=n)
                return float(mean)

            sizes[name] = np.array([part.size for part in passes], dtype=np.float64)
            means[name] = np.array([*self._subject.ranks.map(mean_loss, passes)])
        settle(model)  # the next pass gathers the weights again, as a measure may change them
        return HeldOutLosses(
            weights={name: held_out.weight for name, held_out in self._sets.items()}, sizes=sizes, means=means
        )


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Held-out loss of the corpus (name "") and of each source of a mixture (its name).

    Metrics are "loss", in the unit of the model's losses, and "bits_per_byte" if the bytes of the held-out text are known.
    """

    name: ClassVar[str] = "loss"

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return content_key([self.name, asdict(self)])

    def measure(self, subject: Subject) -> Measured:
        """Measure the losses; raise ValueError if the corpus has fewer held-out tokens than the run evaluates."""
        losses = HeldOutSequences(subject).losses()
        corpus = subject.corpus.held_out or subject.corpus
        named = list(corpus.sources) if corpus.mixture else []
        scores = [losses.score(self.name, "", "loss")]
        scores += [losses.score(self.name, name, "loss", {name: 1.0}) for name in named]
        n_bytes = held_out_bytes(corpus)
        if n_bytes.keys() == corpus.sources.keys() and subject.numerics.model.loss_unit == NATS:
            only = {source: {name: float(name == source) for name in n_bytes} for source in n_bytes}
            of_corpus = {source: bits_per_byte(only[source], corpus, corpus, n_bytes) for source in n_bytes}
            scores.append(losses.score(self.name, "", "bits_per_byte", of_corpus))
            for name in named:
                bits = corpus.sources[name].n_validation_counted / (math.log(2) * n_bytes[name])
                scores.append(losses.score(self.name, name, "bits_per_byte", {name: bits}))
        return Measured(scores=tuple(scores))
