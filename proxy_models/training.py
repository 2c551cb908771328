"""The lean loop that trains proxies: one warm process, one compiled model for each shape, segments in, results out.

The definitions it is made of (loss, groups, schedule, clipping, data order) are the ones that the full-size Lightning
module uses; this file only walks over them without a trainer's overhead.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxy_models import compilation
from proxy_models.batches import TokenStream, evaluation_sequences
from proxy_models.config import ModelConfig
from proxy_models.corpus import Corpus
from proxy_models.decoder import Decoder, next_token_loss, training_loss
from proxy_models.hyperparameters import Recipe, Segment
from proxy_models.numerics import Numerics
from proxy_models.optimizer import clip, initialize, make_optimizer, set_rates

AVERAGED_SHARE = (
    0.15  # of the tokens so far: the stretch whose averaged weights a rung ranks by (Hägele et al., section 4.2)
)
_WARM_MODELS = 4
_EVALUATION_BATCH = 64  # sequences
_CHECK_EVERY = 32  # steps between looks at whether the loss is still finite


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Weights and the optimizer's moments after `tokens` tokens; all that is needed to go on exactly."""

    tokens: int
    tensors: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write to `path`, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        torch.save({"tokens": self.tokens, "tensors": self.tensors}, unfinished)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls(**torch.load(path, weights_only=True, map_location="cpu"))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where and why a training ended without a loss."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """What training one segment gave.

    Attributes:
        state: The state at its end; None after a divergence.
        loss: Validation loss of the last weights, nats per token; None after a divergence.
        averaged_loss: Validation loss of the weights averaged over the last `AVERAGED_SHARE` of all tokens so far.
        train_losses: Loss of each step's batch before the step, nats per token.
        divergence: None if all went well.
        seconds: Wall time of the steps, evaluation not counted.
    """

    state: TrainState | None = field(repr=False)
    loss: float | None
    averaged_loss: float | None
    train_losses: NDArray[np.float32] = field(repr=False)
    divergence: Divergence | None
    seconds: float


class WarmModel:
    """One decoder of one shape, kept between trainings; compiled or eager."""

    def __init__(self, config: ModelConfig, *, compiled: bool) -> None:
        self.module = Decoder(config)
        self.parameters: list[Tensor] = list(self.module.parameters())
        self.loss: Callable[[Decoder, Tensor], Tensor] = training_loss
        if compiled:
            self.loss = torch.compile(training_loss, dynamic=False)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """Mean loss over the sequences, nats per token: nothing dropped, in fp32, and eager, whatever the training is."""
        self.module.eval()
        losses = [
            next_token_loss(self.module, batch) * len(batch) for batch in torch.split(sequences, _EVALUATION_BATCH)
        ]
        self.module.train()
        return float(torch.stack(losses).sum() / len(sequences))


class Trainer:
    """Trains segments of any shape on one corpus; reusing it for another run changes no bit of that run."""

    def __init__(self, corpus: Corpus, *, compiled: bool = True) -> None:
        self.corpus = corpus
        self.compiled = compiled and compilation.missing_compiler() is None
        if self.compiled:
            compilation.configure()
        self._warm: OrderedDict[ModelConfig, WarmModel] = OrderedDict()
        self._evaluation: dict[tuple[int, int], Tensor] = {}

    def train(
        self,
        numerics: Numerics,
        segment: Segment,
        state: TrainState | None = None,
        *,
        averaged: bool = False,
        on_step: Callable[[int, float], None] | None = None,
    ) -> SegmentResult:
        """Train one segment from `state` (None: from the initial values) and evaluate at its end.

        Args:
            numerics: Model, data, seed.
            segment: What to train; starts where `state` ends.
            state: Where to go on.
            averaged: Also evaluate the weights averaged over the last stretch.
            on_step: Called now and then with (tokens seen, training loss).

        Raises:
            ValueError: If the state does not end where the segment starts, or the averaged stretch begins before it,
                or `numerics` is of another corpus.
        """
        self._validate(numerics, segment, state, averaged)
        warm, recipe = self._model(numerics.model), segment.recipe
        optimizer = _restore(warm.module, numerics, recipe, state)
        stream = TokenStream(tokens=self.corpus.train, context_length=numerics.model.context_length, seed=numerics.seed)
        average_from = _averaged_from(segment.end, recipe.batch_tokens)
        average = [torch.zeros_like(p) for p in warm.parameters] if averaged else []
        losses: list[Tensor] = []
        divergence, started = None, time.perf_counter()
        low_precision = torch.autocast("cpu", torch.bfloat16, enabled=numerics.precision == "bf16")
        for tokens in range(segment.start, segment.end, recipe.batch_tokens):
            seed_step(numerics, tokens)
            with low_precision:
                loss = warm.loss(warm.module, stream.batch(tokens, recipe.batch_tokens))
            loss.backward()  # type: ignore[no-untyped-call]
            clip(warm.parameters, recipe.clip_norm)
            set_rates(optimizer, segment.rate_factor(tokens))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if averaged and tokens >= average_from:
                with torch.no_grad():
                    torch._foreach_add_(average, warm.parameters)
            if len(losses) % _CHECK_EVERY == 0 or tokens + recipe.batch_tokens == segment.end:
                if divergence := _divergence(losses, segment):
                    break
                if on_step:
                    on_step(tokens + recipe.batch_tokens, float(losses[-1]))
        seconds = time.perf_counter() - started
        train_losses = torch.stack(losses).numpy().astype(np.float32)
        if not divergence:
            loss_at_end = self._evaluate(warm, numerics)
            if not math.isfinite(loss_at_end):
                divergence = Divergence(
                    step=segment.end // recipe.batch_tokens, reason="the validation loss is not finite"
                )
        if divergence:
            return SegmentResult(
                state=None,
                loss=None,
                averaged_loss=None,
                train_losses=train_losses,
                divergence=divergence,
                seconds=seconds,
            )
        state = _capture(warm.module, optimizer, segment.end)
        averaged_loss = None
        if averaged:
            n_averaged = (segment.end - average_from) // recipe.batch_tokens
            with torch.no_grad():
                for parameter, total in zip(warm.parameters, average, strict=True):
                    parameter.copy_(total / n_averaged)
            averaged_loss = self._evaluate(warm, numerics)
        return SegmentResult(
            state=state,
            loss=loss_at_end,
            averaged_loss=averaged_loss,
            train_losses=train_losses,
            divergence=None,
            seconds=seconds,
        )

    def _validate(self, numerics: Numerics, segment: Segment, state: TrainState | None, averaged: bool) -> None:
        at = state.tokens if state else 0
        if at != segment.start:
            raise ValueError(f"the segment starts at {segment.start} tokens but the state ends at {at}")
        if averaged and (first := _averaged_from(segment.end, segment.recipe.batch_tokens)) < segment.start:
            raise ValueError(
                f"the averaged stretch before {segment.end} begins at {first} tokens, before the segment's start at "
                f"{segment.start}: rungs must lie at least a factor {1 / (1 - AVERAGED_SHARE):.2f} apart"
            )
        if numerics.corpus_key != self.corpus.key:
            raise ValueError(f"the run is of corpus {numerics.corpus_key}, this trainer holds {self.corpus.key}")
        if segment.recipe.batch_tokens % numerics.model.context_length:
            raise ValueError(
                f"batch_tokens must be a multiple of context_length={numerics.model.context_length}, "
                f"got {segment.recipe.batch_tokens}"
            )

    def _model(self, config: ModelConfig) -> WarmModel:
        if config not in self._warm:
            self._warm[config] = WarmModel(config, compiled=self.compiled)
            if len(self._warm) > _WARM_MODELS:
                self._warm.popitem(last=False)
        self._warm.move_to_end(config)
        return self._warm[config]

    def _evaluate(self, warm: WarmModel, numerics: Numerics) -> float:
        size = (numerics.model.context_length, numerics.evaluation_tokens)
        if size not in self._evaluation:
            self._evaluation[size] = evaluation_sequences(self.corpus.validation, *size)
        return warm.evaluate(self._evaluation[size])


def seed_step(numerics: Numerics, tokens: int, rank: int = 0) -> None:
    """Make the random numbers of the step after `tokens` tokens a function of the run, the position and the rank."""
    if numerics.model.is_random:
        digest = hashlib.sha256(f"{numerics.seed}/{tokens}/{rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _averaged_from(end: int, batch_tokens: int) -> int:
    """Position of the first step whose weights are averaged at `end`."""
    return int(end * (1 - AVERAGED_SHARE)) // batch_tokens * batch_tokens


def _divergence(losses: list[Tensor], segment: Segment) -> Divergence | None:
    finite = torch.isfinite(torch.stack(losses[-_CHECK_EVERY:]))
    if bool(finite.all()):
        return None
    within = len(losses) - len(finite) + int((~finite).nonzero()[0])
    step = segment.start // segment.recipe.batch_tokens + within
    return Divergence(step=step, reason=f"the training loss is {float(losses[within])} at step {step}")


def _restore(module: Decoder, numerics: Numerics, recipe: Recipe, state: TrainState | None) -> torch.optim.Optimizer:
    """Write the initial values or the state into the model, and give it an optimizer in the same state."""
    table = numerics.parametrization(recipe.optimizer)
    initialize(module, table, recipe, seed=numerics.seed)
    module.zero_grad()  # what a training that an error ended has left behind
    optimizer = make_optimizer(module, table, recipe)
    if state is None:
        return optimizer
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(state.tensors[f"weight/{name}"])
            optimizer.state[parameter] = {
                kind.removesuffix(f"/{name}"): tensor.clone()
                for kind, tensor in state.tensors.items()
                if kind.endswith(f"/{name}") and not kind.startswith("weight/")
            }
    return optimizer


def _capture(module: Decoder, optimizer: torch.optim.Optimizer, tokens: int) -> TrainState:
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().clone()
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{kind}/{name}"] = value.clone()
    return TrainState(tokens=tokens, tensors=tensors)
