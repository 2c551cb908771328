"""Memorisation: the share of training text that a model continues verbatim, by the number of times that it has read the text.

The definition is that of Carlini et al. (arXiv 2202.07646, section 3): the model is given the first part of a text and continues it
greedily. A greedy continuation equals the text exactly if, given the text, each next token is the most likely one. One forward pass
over the text therefore decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from proxy_models.data.batches import training_stream
from proxy_models.evaluation.measure import Measured, Score, Subject
from proxy_models.evaluation.repeated_windows import (
    CONTINUATION_TOKENS,
    MEMORISATION,
    PREFIX_TOKENS,
    ReadTokens,
    Windows,
    repeated_windows,
    times_read,
)
from proxy_models.evaluation.scored_model import LogLikelihood, log_likelihoods
from proxy_models.evaluation.smooth_scores import share_error
from proxy_models.hashing import content_key

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Memorisation:
    """Share of windows of training text that a model continues verbatim, by the times that the model has read them.

    Scores have names "1 time", "2–3 times", "4–7 times" and so on, and "held out". Metrics:

    - "memorised": the share. Its standard error (`share_error`) is not 0 at a share of 0 or 1.
    - "loss": nats per token of the continuations, which shows memorisation before the first window is verbatim.
    - "repetitions": geometric mean of the times that the windows were read, without "held out".

    Attributes:
        prefix_tokens: Tokens that the model is given.
        continuation_tokens: Tokens that it must continue with.
        n_sequences: Largest number of windows under each name.
        seed: Seed of the choice of windows.
    """

    prefix_tokens: int = PREFIX_TOKENS
    continuation_tokens: int = CONTINUATION_TOKENS
    n_sequences: int = 256
    seed: int = 0

    name: ClassVar[str] = MEMORISATION

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "continuation_tokens", "n_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return content_key([self.name, asdict(self)])

    def measure(self, subject: Subject) -> Measured:
        """Measure the shares.

        Raises:
            ValueError: If a window does not fit in a sequence, or the data depend on the run's length, which is not known.
        """
        numerics, corpus = subject.numerics, subject.corpus
        length, context = self.prefix_tokens + self.continuation_tokens, numerics.model.context_length
        if length > context + 1:
            raise ValueError(
                f"prefix_tokens + continuation_tokens must be at most context_length + 1 = {context + 1}, got {length}"
            )
        if not corpus.all_count:
            raise ValueError(
                "memorisation is measured on text that counts as a whole, but a source of the corpus has prompts"
            )
        stream = training_stream(corpus, context, numerics.seed, run_tokens=numerics.run_tokens)
        read = stream.starts_before(subject.position + subject.tokens)
        held_out = (corpus.held_out or corpus).sources.values()
        ranges = subject.ranks.from_first(
            lambda: repeated_windows(
                [
                    *(ReadTokens(files.train, read.get(name, _NONE)) for name, files in corpus.sources.items()),
                    *(ReadTokens(files.validation, None) for files in held_out),
                ],
                self.prefix_tokens,
                self.continuation_tokens,
                vocab_size=corpus.vocab_size,
                context_length=context,
                end_of_document=corpus.end_of_document,
                n_each=self.n_sequences,
                seed=self.seed,
            )
        )
        at = self.prefix_tokens
        pairs = [(text[:at], text[at:]) for windows in ranges for text in windows.tokens]
        results = iter(log_likelihoods(subject.model, pairs, context_length=context))
        return Measured(
            scores=tuple(
                score for windows in ranges for score in self._scores(windows, [next(results) for _ in windows.tokens])
            )
        )

    def _scores(self, windows: Windows, results: Sequence[LogLikelihood]) -> list[Score]:
        n, name = len(results), times_read(windows.least)
        if not n:
            return []
        losses = np.array([-result.nats / result.n_tokens for result in results])
        share = sum(result.is_greedy for result in results) / n
        found: list[tuple[str, float, float | None]] = [
            ("memorised", share, share_error(share, n)),
            ("loss", float(losses.mean()), float(losses.std(ddof=1)) / math.sqrt(n) if n > 1 else None),
        ]
        if windows.least:
            found.append(("repetitions", float(np.exp(np.log(windows.times).mean())), None))
        return [
            Score(measure=self.name, name=name, metric=metric, value=value, standard_error=standard_error, n=n)
            for metric, value, standard_error in found
        ]
