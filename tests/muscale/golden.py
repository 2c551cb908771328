"""A small study's numbers, from its corpus to its law: what may change only together with `proxy_models.training.numerics.SEMANTICS`.

    python -m tests.muscale.golden    # writes golden.json anew

Nothing here depends on what a library draws: losses are those of fixed seeds on one thread.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.batches import TokenStream
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch, stem
from proxy_models.training.numerics import SEMANTICS, Numerics
from proxy_models.training.optimizer import clip, initialize, make_optimizer, set_rates
from proxy_models.training.trainer import Trainer
from tests.muscale.planted import planted_fit, planted_horizon
from tests.proxy_models.conftest import VARIANTS, write_text_files

GOLDEN = Path(__file__).with_suffix(".json")
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adam", "lion", "adafactor", "muon")
BATCH = 4 * 32
STEPS = 40


def golden() -> dict[str, Any]:
    """All of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_text_files(Path(folder) / "text")
            corpus = write_corpus(Path(folder) / "tokens", str(Path(folder) / "text"), validation_fraction=0.25)
            return {
                "semantics": SEMANTICS,
                "corpus": corpus.key,
                "batches": _batches(corpus),
                "variants": {name: _variant(corpus, options) for name, options in VARIANTS.items()},
                "optimizers": {name: _optimizer(corpus, name) for name in OPTIMIZERS},
                "law": _law(),
            }
    finally:
        torch.set_num_threads(threads)


def _batches(corpus: Corpus) -> str:
    """Hash of the first tokens that a run sees, and of some from its second epoch."""
    stream = TokenStream(tokens=corpus.train, context_length=32, seed=1)
    seen = hashlib.sha256()
    for position in (0, BATCH, 2 * BATCH, 900 * BATCH):
        seen.update(stream.batch(position, BATCH).numpy().astype("<i8").tobytes())
    return seen.hexdigest()[:16]


def _numerics(corpus: Corpus, options: dict[str, Any]) -> Numerics:
    family = ModelFamily(base=ModelConfig(d_model=32, n_layers=2, context_length=32, **options))
    return Numerics(
        model=family.at(width=64), base=family.base, corpus_key=corpus.key, seed=2, evaluation_tokens=16 * 32
    )


def _variant(corpus: Corpus, options: dict[str, Any]) -> dict[str, Any]:
    numerics = _numerics(corpus, options)
    return {
        "n_params": numerics.model.n_params,
        "numerics": numerics.key,
        "losses": _losses_in_float64(corpus, numerics, Hyperparameters(learning_rate=0.01, batch_tokens=BATCH)),
    }


def _optimizer(corpus: Corpus, name: OptimizerName) -> dict[str, Any]:
    """Rules, keys and the losses of a stem and its branch, trained as everybody trains."""
    numerics = _numerics(corpus, {})
    h = Hyperparameters(learning_rate=0.002, batch_tokens=BATCH, optimizer=name, schedule="wsd")
    recipe, end = h.resolve(STEPS * BATCH), STEPS * BATCH
    chain = Chain(numerics=numerics, segments=branch(recipe, h.stable_tokens(end), end, h.schedule))
    table = json.dumps(numerics.parametrization(name).to_dict(), sort_keys=True)
    trainer, state = Trainer(corpus, compile=False), None
    losses = []
    for segment in chain.segments:
        result = trainer.train(numerics, segment, state)
        state = result.state
        losses.append(result.loss)
    return {
        "rules": hashlib.sha256(table.encode()).hexdigest()[:16],
        "recipe": asdict(recipe),
        "line": chain.line,
        "key": chain.key,
        "losses": losses,
    }


def _losses_in_float64(corpus: Corpus, numerics: Numerics, h: Hyperparameters) -> list[float]:
    """Of the first steps, written out, in double precision up to the loss itself: no kernel's rounding adds up."""
    recipe = h.resolve(STEPS * BATCH)
    segment = stem(recipe, STEPS * BATCH)
    model = Decoder(as_decoder(numerics.model))
    table = numerics.parametrization("adamw")
    initialize(model, table, recipe, seed=numerics.seed)
    model.double()
    optimizer = make_optimizer(model, table, recipe)
    stream = TokenStream(tokens=corpus.train, context_length=32, seed=numerics.seed)
    losses = []
    for step in range(5):
        loss = next_token_loss(model, stream.batch(step * BATCH, BATCH))
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), recipe.clip_norm)
        set_rates(optimizer, segment.rate_factor(step * BATCH))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _law() -> dict[str, Any]:
    """A law, its forecast, and a law of the rate, of planted losses."""
    law = planted_fit()
    forecast = law.forecast(1e6, 2e7)
    return {
        "estimates": [float(law.law.loss(n, d)) for n, d in ((1e4, 1e5), (1e6, 2e7), (1e9, 2e10))],
        "forecast": [forecast.loss, forecast.low, forecast.high],
        "rate": [float(rate) for rate in np.atleast_1d(planted_horizon().rate([16_384, 65_536]))],
    }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n")
