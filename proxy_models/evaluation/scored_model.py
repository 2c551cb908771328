"""Log-likelihoods of continuations under a model of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxy_models.architecture.model_ranks import Ranks
from proxy_models.training.device import EVALUATION_BATCH

Ids = NDArray[np.integer[Any]]


class LogLikelihood(NamedTuple):
    """A continuation under a model.

    Attributes:
        nats: Natural logarithm of its probability.
        is_greedy: Whether every token is the model's most likely one.
        n_tokens: Tokens of the continuation.
    """

    nats: float
    is_greedy: bool
    n_tokens: int


@torch.no_grad()
def log_likelihoods(
    model: nn.Module,
    pairs: Sequence[tuple[Ids, Ids]],
    *,
    context_length: int,
    on_batch: Callable[[Sequence[int], Sequence[LogLikelihood]], None] | None = None,
) -> list[LogLikelihood]:
    """Return the log-likelihood of each continuation after its context, in the order of the pairs.

    Texts of like length share a forward pass, the longest first, padded at the right, which a causal model does not see. Of a text
    longer than the context the last tokens count, as in training a token sees at most `context_length` tokens. The ranks of a sharded
    model call this together; each rank makes a part of the passes, and gets all results.

    Args:
        pairs: Ids of (context, continuation); both have at least one id.
        context_length: Of the model.
        on_batch: Called after each forward pass with the numbers of its pairs and their results, so that a caller can keep them.

    Raises:
        ValueError: If a context or a continuation is empty, or a continuation is longer than the context length.
    """
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"pair {number}: context and continuation must have at least one id")
        if len(continuation) > context_length:
            raise ValueError(
                f"pair {number}: a continuation of {len(continuation)} tokens does not fit the context of {context_length}"
            )
    texts = [np.concatenate(pair).astype(np.int64)[-(context_length + 1) :] for pair in pairs]
    order = sorted(range(len(texts)), key=lambda number: (-len(texts[number]), number))
    batches = [order[first : first + EVALUATION_BATCH] for first in range(0, len(order), EVALUATION_BATCH)]
    found: dict[int, LogLikelihood] = {}
    device, was_training = next(model.parameters()).device, model.training

    def score(numbers: Sequence[int]) -> list[LogLikelihood]:
        ids = torch.zeros(len(numbers), len(texts[numbers[0]]), dtype=torch.int64)
        for row, number in enumerate(numbers):
            ids[row, : len(texts[number])] = torch.from_numpy(texts[number])
        logits = model(ids[:, :-1].to(device))
        return [
            _of_continuation(logits[row], texts[number], len(pairs[number][1])) for row, number in enumerate(numbers)
        ]

    model.eval()
    try:
        for numbers, results in zip(batches, Ranks.of(model).map(score, batches), strict=True):
            found.update(zip(numbers, results, strict=True))
            if on_batch:
                on_batch(numbers, results)
    finally:
        model.train(was_training)
    return [found[number] for number in range(len(pairs))]


def _of_continuation(logits: Tensor, text: Ids, n_tokens: int) -> LogLikelihood:
    """Result for the last `n_tokens` of a text from the logits (time, vocab_size) of its padded row."""
    predicted = logits[len(text) - 1 - n_tokens : len(text) - 1].float().cpu()
    wanted = torch.from_numpy(text[-n_tokens:])
    chosen = torch.log_softmax(predicted, dim=-1).gather(1, wanted[:, None])
    greedy = bool((predicted.argmax(dim=-1) == wanted).all())
    return LogLikelihood(nats=float(chosen.double().sum()), is_greedy=greedy, n_tokens=n_tokens)
