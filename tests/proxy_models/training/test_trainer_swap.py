"""Another optimizer takes over on the way: the weights stay, the moments are fresh, and resuming is bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.batches import TokenStream
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import clip, initialize, make_optimizer, set_rates
from proxy_models.training.state import TrainState
from proxy_models.training.trainer import SegmentResult, Trainer

BATCH = 4 * 32
N_TOKENS = 40 * BATCH
AssertSame = Callable[[SegmentResult, SegmentResult], None]
SWAPS: list[tuple[OptimizerName, str]] = [("muon", "momentum_buffer"), ("lion", "exp_avg")]


def swapped_chain(hyperparameters: Hyperparameters, optimizer: OptimizerName) -> tuple[Segment, ...]:
    values = replace(
        hyperparameters,
        warmup_fraction=0.1,
        swap_optimizer=optimizer,
        swap_fraction=0.5,
        swap_learning_rate=0.003,
    )
    return chain(values, N_TOKENS)


@pytest.mark.parametrize(("optimizer", "moment"), SWAPS)
def test_a_swap_keeps_the_weights_and_begins_with_fresh_moments(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, optimizer: OptimizerName, moment: str
) -> None:
    before, after, _ = swapped_chain(hyperparameters, optimizer)
    state = trainer.train(numerics, before).state
    assert state is not None
    recipe = after.recipe
    expected = Decoder(as_decoder(numerics.model))
    table = numerics.parametrization(optimizer)
    initialize(expected, table, recipe, seed=0)
    expected.load_state_dict(
        {n.removeprefix("weight/"): t for n, t in state.tensors.items() if n.startswith("weight/")}
    )
    step = make_optimizer(expected, table, recipe)
    loss = next_token_loss(
        expected, TokenStream(tokens=trainer.corpus.train, context_length=32, seed=0).batch(after.start, BATCH)
    )
    loss.backward()  # type: ignore[no-untyped-call]
    clip(expected.parameters(), recipe.clip_norm)
    set_rates(step, 0.25)  # the first of four steps of warmup
    step.step()
    result = trainer.train(numerics, replace(after, end=after.start + BATCH), state)
    assert result.curve.train_loss.tolist() == [loss.item()]
    assert result.curve.rate_factor.tolist() == [0.25]
    assert result.state is not None
    assert result.state.parametrization == table
    for name, parameter in expected.named_parameters():
        assert torch.equal(result.state.tensors[f"weight/{name}"], parameter.detach()), name
    assert f"{moment}/blocks.0.mlp.up.weight" in result.state.tensors
    assert "exp_avg_sq/blocks.0.mlp.up.weight" not in result.state.tensors


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("optimizer", "moment"), SWAPS)
def test_a_swapped_run_learns_and_resumes_bit_for_bit(
    trainer: Trainer,
    numerics: Numerics,
    hyperparameters: Hyperparameters,
    optimizer: OptimizerName,
    moment: str,
    precision: Any,
    tmp_path: Path,
    assert_same: AssertSame,
) -> None:
    # So high a rate, and so touchy a guard, that steps are left out on both sides of the swap.
    guard = GuardSettings(action="rewind", window=8, threshold=0.01, max_spikes=20, snapshot_every=7)
    numerics = replace(numerics, precision=precision, guard=guard)
    segments = swapped_chain(replace(hyperparameters, learning_rate=0.03), optimizer)
    results: list[SegmentResult] = []
    for segment in segments:
        results.append(trainer.train(numerics, segment, results[-1].state if results else None))
    assert results[-1].curve.train_loss.mean() < results[0].curve.train_loss[:5].mean() - 0.3
    assert results[0].spikes
    assert results[1].spikes
    _, after, cooldown = segments
    state = results[0].state
    for start, end in pairwise((after.start, after.start + 3 * BATCH, after.end)):
        assert state is not None
        state.save(tmp_path / "state.pt")
        part = trainer.train(numerics, replace(after, start=start, end=end), TrainState.load(tmp_path / "state.pt"))
        state = part.state
    assert_same(part, results[1])
    assert_same(trainer.train(numerics, cooldown, state), results[2])


def test_only_where_a_swap_is_planned_may_a_state_be_another_optimizer_s(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, family: ModelFamily
) -> None:
    before, after, _ = swapped_chain(hyperparameters, "muon")
    first = replace(before, end=4 * BATCH)
    state = trainer.train(numerics, first).state
    late = replace(after, start=4 * BATCH)
    with pytest.raises(ValueError, match="optimizer.*adamw.*muon"):
        trainer.train(numerics, late, state)
    rebased = replace(numerics, base=family.at(width=16))
    at_swap = trainer.train(numerics, before).state
    with pytest.raises(
        ValueError, match=r"another parametrization: embedding.weight's width_mult is 1.0 there and 2.0"
    ):
        trainer.train(rebased, after, at_swap)
