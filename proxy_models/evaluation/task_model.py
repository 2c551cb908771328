"""A model as lm-eval's tasks use it: it gets texts, and returns log-likelihoods and texts.

In training, a document begins after the token that closes the previous document, so this token comes before every context, too. For an
exported model, lm-eval's own `hf` model does the same with `add_bos_token=True`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol, Self

import numpy as np

from proxy_models.architecture.generate import generate
from proxy_models.data.tokenizer import Tokens
from proxy_models.evaluation.measure import Subject
from proxy_models.evaluation.request_log import RequestLog
from proxy_models.evaluation.scored_model import LogLikelihood, log_likelihoods
from proxy_models.hashing import content_key

Pair = tuple[Tokens, Tokens]
"""Ids of a context and of its continuation."""
MAX_GENERATED = 256
"""Tokens to generate if a task states no limit, as in lm-eval's `hf` model."""
_SEEN_BEFORE = 8  # tokens of the context that a continuation is decoded with, as its first space may depend on them


class Request(Protocol):
    """A request of a task, as `lm_eval.api.instance.Instance`."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Context and continuation, context and `generation_kwargs`, or a whole text."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a task wants text generated.

    Attributes:
        until: The text ends before the first of these.
        max_gen_toks: Largest number of tokens.
        temperature: 0 takes the most likely token.
    """

    until: tuple[str, ...] = ()
    max_gen_toks: int = MAX_GENERATED
    temperature: float = 0.0
    top_p: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Read a task's `generation_kwargs`; raise ValueError for a key that is not supported."""
        known = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")
        if odd := set(given) - set(known):
            raise ValueError(f"generation_kwargs: keys must be among {', '.join(known)}, got {', '.join(sorted(odd))}")
        until = given.get("until") or ()
        is_sampled = given.get("do_sample", given.get("temperature", 0) > 0)
        return cls(
            until=(until,) if isinstance(until, str) else tuple(filter(None, until)),
            max_gen_toks=given.get("max_gen_toks", MAX_GENERATED),
            temperature=float(given.get("temperature", 1)) if is_sampled else 0.0,
            top_p=float(given.get("top_p", 1)),
        )


class TaskModel:
    """A model and its tokenizer, with the methods that tasks call of `lm_eval.api.model.LM`.

    Equal requests are computed once.
    """

    def __init__(self, subject: Subject, progress: RequestLog, *, seed: int = 0) -> None:
        """Prepare a model.

        Args:
            progress: Results that are known already; new ones are added.
            seed: Seed of sampled texts.
        """
        self._model = subject.model
        self._ranks = subject.ranks
        self._member = subject.numerics.model
        self._tokenizer = subject.tokenizer
        self._progress = progress
        self._seed = seed

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the greedy one."""
        found = self.continuations([(request.args[0], request.args[1]) for request in requests])
        return [(one.nats, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Return the log-likelihood of each whole text; every token is predicted once."""
        encoded = self._encoded([request.args[0] for request in requests])
        return [one.nats for one in self._scored([(self._start, ids) for ids in encoded])]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Return the text after each context; equal requests for sampled text get different texts."""
        keys, times, missing = [], Counter[str](), dict[str, tuple[str, Generation]]()
        for request in requests:
            wanted = Generation.of(request.args[1])
            key = content_key([request.args[0], astuple(wanted)])
            if wanted.temperature > 0:
                times[key] += 1
                key = content_key([key, self._seed, times[key]])
            keys.append(key)
            if key not in self._progress.found:
                missing[key] = request.args[0], wanted
        # a task's own functions may draw items at random
        keys, missing = self._ranks.from_first(lambda: (keys, missing))
        texts = self._ranks.map(lambda key: self._generated(*missing[key], seed=int(key, 16)), list(missing))
        for key, text in zip(missing, texts, strict=True):
            self._progress.keep({key: text})
        return [self._progress.found[key] for key in keys]

    def continuations(self, texts: Sequence[tuple[str, str]]) -> list[LogLikelihood]:
        """Return the log-likelihood of each continuation after its context.

        As in lm-eval, spaces at the end of the context belong to the continuation, and the ids of the whole text are cut at the number
        of the context's ids.

        Raises:
            ValueError: If a continuation has no token.
        """
        contexts = [context.rstrip() for context, _ in texts]
        before, whole = (self._encoded(each) for each in (contexts, ["".join(text) for text in texts]))
        pairs = []
        for (context, continuation), ids, all_ids in zip(texts, before, whole, strict=True):
            if len(all_ids) <= len(ids):
                raise ValueError(f"a continuation must have a token, got {continuation!r} after {context[-40:]!r}")
            pairs.append((np.concatenate([self._start, ids]), all_ids[len(ids) :]))
        return self._scored(pairs)

    @property
    def _start(self) -> Tokens:
        return np.array([self._tokenizer.end_of_document], dtype=np.uint32)

    def _encoded(self, texts: Sequence[str]) -> list[Tokens]:
        return [ids.astype(np.uint32) for ids in self._tokenizer.encode([text.encode() for text in texts])]

    def _scored(self, pairs: Sequence[Pair]) -> list[LogLikelihood]:
        """Results in the order of the pairs; a continuation longer than the context length is the sum of its windows."""
        length = self._member.context_length
        windows = [[(_key(window), window) for window in _windows(*pair, length)] for pair in pairs]
        known = self._progress.found
        windows, missing = self._ranks.from_first(
            lambda: (windows, {key: window for each in windows for key, window in each if key not in known})
        )
        keys = list(missing)
        log_likelihoods(
            self._model,
            list(missing.values()),
            context_length=length,
            on_batch=lambda numbers, results: self._progress.keep(
                {keys[number]: result for number, result in zip(numbers, results, strict=True)}
            ),
        )
        return [_sum(LogLikelihood(*known[key]) for key, _ in each) for each in windows]

    def _generated(self, context: str, wanted: Generation, *, seed: int) -> str:
        (ids,) = self._encoded([context])
        end = self._tokenizer.end_of_document
        before = ids[-_SEEN_BEFORE:]
        first = len(self._tokenizer.decode(before))

        def text(new: Tokens) -> str:
            return self._tokenizer.decode(np.concatenate([before, new[new != end]]))[first:]

        new = generate(
            self._model,
            np.concatenate([self._start, ids]),
            wanted.max_gen_toks,
            member=self._member,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=seed,
            stop=end,
            n_ids=self._tokenizer.vocab_size,
            until=lambda new: any(stop in text(new) for stop in wanted.until),
        )
        found = text(new)
        return found[: min((found.index(stop) for stop in wanted.until if stop in found), default=len(found))]


def _windows(context: Tokens, continuation: Tokens, length: int) -> list[Pair]:
    """Parts of a continuation that fit the context length, each after as many tokens as fit with it, at least one."""
    text = np.concatenate([context, continuation])
    spans = ((start, min(start + length, len(text))) for start in range(len(context), len(text), length))
    return [(text[max(0, end - length - 1) : start], text[start:end]) for start, end in spans]


def _key(pair: Pair) -> str:
    return content_key([ids.tolist() for ids in pair])


def _sum(parts: Iterable[LogLikelihood]) -> LogLikelihood:
    parts = list(parts)
    return LogLikelihood(
        nats=sum(part.nats for part in parts),
        is_greedy=all(part.is_greedy for part in parts),
        n_tokens=sum(part.n_tokens for part in parts),
    )
