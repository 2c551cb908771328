from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Decoder, training_loss
from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.memory import Precision
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.precision import DTYPES
from proxy_models.training.step import Stepper, step_seed

MODEL = ModelConfig(d_model=32, n_layers=2, context_length=16, label_smoothing=0.1, z_loss=1e-3)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="none", seed=0, evaluation_tokens=0)
MIXTURE = replace(MODEL, n_experts=4, expert_ratio=1.0, balance_rate=0.05)
MODELS = pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "experts"])
RECIPE = Hyperparameters(learning_rate=0.01, batch_tokens=7 * 16).resolve(100 * 7 * 16)


def batch(number: int = 0) -> Tensor:
    return torch.randint(256, (7, 17), generator=torch.Generator().manual_seed(number))


def stepper(numerics: Numerics = NUMERICS, **options: Any) -> Stepper:
    module = Decoder(as_decoder(numerics.model))
    module.compute_dtype = DTYPES[numerics.precision]
    initialize(module, numerics.parametrization(RECIPE.optimizer), RECIPE, seed=numerics.seed)
    return Stepper(
        module, make_optimizer(module, numerics.parametrization(RECIPE.optimizer), RECIPE), numerics, RECIPE, **options
    )


def take(one: Stepper, number: int = 0, sequences: Tensor | None = None) -> tuple[float, float]:
    chosen = batch(number) if sequences is None else sequences
    loss, norm = one.step(chosen, number=number, tokens=number * 112, rate_factor=1.0)
    one.settle()
    return float(loss), float(norm)


def weights(one: Stepper) -> dict[str, Tensor]:
    return one.capture()


@pytest.mark.parametrize("changes", [True, False])
def test_a_model_with_state_in_its_buffers_is_refused_at_its_first_step(changes: bool) -> None:
    one, mean = stepper(), torch.zeros(())
    one.module.register_buffer("mean", mean)

    def count(*_: Any) -> None:
        mean.add_(float(changes))

    one.module.register_forward_pre_hook(count)
    with pytest.raises(FamilyError) if changes else nullcontext():
        take(one)


def test_a_model_whose_buffers_change_later_is_refused_before_its_state_is_kept() -> None:
    one, steps = stepper(), 0
    one.module.register_buffer("mean", torch.zeros(()))

    def count(module: Any, _: Any) -> None:
        nonlocal steps
        steps += 1
        module.mean = module.mean + float(steps == 3)  # another tensor, which no version counts

    one.module.register_forward_pre_hook(count)
    for number in range(2):
        take(one, number)
    one.memory()
    take(one, 2)
    with pytest.raises(FamilyError):
        one.memory()


def test_another_optimizer_continues_with_the_weights_and_without_moments() -> None:
    guard = GuardSettings(action="rewind", window=8, snapshot_every=2)
    one = stepper(replace(NUMERICS, guard=guard))
    for number in range(4):
        take(one, number)
    before, remembered = weights(one), one.memory()
    recipe = RECIPE.swapped("muon", 0.02)
    table = NUMERICS.parametrization("muon")
    one.go_on_under(recipe, make_optimizer(one.module, table, recipe))
    assert one.parametrization == table
    assert weights(one).keys() == {name for name in before if name.startswith("weight/")}
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(one).items())
    kept = {name for name in remembered if name == "guard" or name.startswith("good/weight/")}
    assert one.memory().keys() == kept < remembered.keys()


@pytest.mark.parametrize("micro_batch", [1, 3, 6, 7, 50])
def test_micro_batches_sum_to_the_whole_batch_also_where_the_last_is_shorter(micro_batch: int) -> None:
    whole, parts = stepper(), stepper(micro_batch=micro_batch)
    assert take(parts) == pytest.approx(take(whole), rel=1e-5)
    for name, tensor in weights(whole).items():
        if name.startswith("exp_avg/"):
            torch.testing.assert_close(weights(parts)[name], tensor, rtol=1e-3, atol=1e-7)


def test_random_numbers_are_a_function_of_seed_tokens_and_rank() -> None:
    assert (
        len({step_seed(*place) for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11))}) == 6
    )
    random = replace(NUMERICS, model=replace(MODEL, mlp_dropout=0.5), base=replace(MODEL, mlp_dropout=0.5))
    torch.manual_seed(1)
    first = take(stepper(random))
    torch.manual_seed(2)
    assert take(stepper(random)) == first
    sequences = batch()
    assert take(stepper(random), 1, sequences) != first
    assert take(stepper(random, rank=1)) != first
    with_other_seed = stepper(random)
    with_other_seed._numerics = replace(random, seed=5)
    assert take(with_other_seed) != first


class Faulty:
    """The training loss, times `scale`: 1000 makes a spike of the next step, NaN breaks it."""

    scale = 1.0

    def __call__(self, module: Decoder, sequences: Tensor) -> Tensor:
        return training_loss(module, sequences) * self.scale


def guarded(model: ModelConfig = MODEL, precision: Precision = "fp32", **settings: Any) -> tuple[Stepper, Faulty]:
    """A stepper that has taken 12 quiet steps."""
    fault = Faulty()
    guard = GuardSettings(**{"window": 8, "threshold": 30.0, "max_spikes": 1, "snapshot_every": 5, **settings})
    one = stepper(replace(NUMERICS, model=model, base=model, guard=guard, precision=precision), loss=fault)
    for number in range(12):
        take(one, number)
    assert not one.spikes
    return one, fault


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@MODELS
def test_a_spike_is_left_out_as_if_it_had_not_been(model: ModelConfig) -> None:
    one, fault = guarded(model)
    before = weights(one)
    fault.scale = 1000.0
    loss, _ = take(one, 12)
    assert [(spike.step, spike.quantity, spike.value) for spike in one.spikes] == [(12, "loss", loss)]
    assert one.divergence is None
    assert same(weights(one), before)
    assert all(parameter.grad is None for parameter in one.parameters)
    fault.scale = 1.0
    take(one, 13)
    untroubled, _ = guarded(model)
    take(untroubled, 13)
    assert same(weights(one), weights(untroubled))


@MODELS
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_no_number_is_divergence_and_changes_nothing(model: ModelConfig, precision: Precision) -> None:
    one, fault = guarded(model, precision)
    before = weights(one)
    fault.scale = float("nan")
    take(one, 12)
    assert one.divergence is not None
    assert one.divergence.reason == "the training loss is nan at step 12"
    assert same(weights(one), before)


@MODELS
def test_rewinding_puts_the_last_snapshot_back(model: ModelConfig) -> None:
    one, fault = guarded(model, action="rewind")
    fault.scale = 1000.0
    take(one, 12)
    assert [spike.action for spike in one.spikes] == ["rewind"]
    at_snapshot = stepper(replace(NUMERICS, model=model, base=model))
    for number in range(10):
        take(at_snapshot, number)
    assert same(weights(one), weights(at_snapshot))


@MODELS
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_guarded_stepper_resumes_from_its_state(model: ModelConfig, action: str) -> None:
    one, fault = guarded(model, action=action)
    other, other_fault = guarded(model, action=action)
    for number in range(3):  # what the other must forget
        take(other, 12 + number)
    other.restore(weights(one))
    other.remember(one.memory())
    for number, scale in ((12, 1000.0), (13, 1.0), (14, 1000.0)):
        fault.scale = other_fault.scale = scale
        assert take(one, number) == take(other, number)
    assert one.spikes == other.spikes
    assert one.divergence == other.divergence is not None
    assert same(weights(one), weights(other))


def test_fp16_that_overflows_at_every_scale_is_divergence() -> None:
    def overflowing(module: Decoder, sequences: Tensor) -> Tensor:
        return training_loss(module, sequences) * 1e38

    one = stepper(replace(NUMERICS, precision="fp16"), loss=overflowing)
    before = weights(one)
    numbers = iter(range(100))
    while one.divergence is None:
        take(one, next(numbers))
    assert "overflow fp16 at every loss scale" in one.divergence.reason
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(one).items() if name in before)


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_shares_that_differ_by_a_sequence_sum_to_the_whole_batch_in_equally_many_passes(
    micro_batch: int | None,
) -> None:
    passes = 0

    def counted(module: Decoder, sequences: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return training_loss(module, sequences)

    whole = stepper()
    expected = float(whole.step(batch(), number=0, tokens=0, rate_factor=1.0)[0])
    parts, counts = [], set()
    for rank, share in enumerate(torch.tensor_split(batch(), 3)):  # 3, 2 and 2 sequences
        one, passes = stepper(micro_batch=micro_batch, rank=rank, ranks=3, loss=counted), 0
        parts.append(float(one.step(share, number=0, tokens=0, rate_factor=1.0, of=7)[0]))
        counts.add(passes)
    assert sum(parts) / 3 == pytest.approx(expected, rel=1e-6)
    assert len(counts) == 1, "all gather weights in each pass"


def masked(number: int = 0) -> Tensor:
    """A batch of sequences of which between none and all of the tokens count."""
    counts = torch.rand(7, 17, generator=torch.Generator().manual_seed(number)) < torch.arange(7)[:, None] / 6
    return torch.where(counts, batch(number), ~batch(number))


@MODELS
@pytest.mark.parametrize(("micro_batch", "ranks"), [(None, 1), (1, 1), (2, 1), (3, 1), (None, 3), (2, 3)])
def test_the_loss_is_the_mean_over_the_counted_tokens_of_the_global_batch(
    model: ModelConfig, micro_batch: int | None, ranks: int
) -> None:
    """Micro-batches and ranks have very different shares of them, so a mean of means would be far off."""
    numerics, sequences = replace(NUMERICS, model=model, base=model), masked()
    counts = (sequences[:, 1:] >= 0).flatten()
    n_counted = counts.sum().double()

    def mean(value: Tensor) -> Tensor:
        is_count = value.dtype == torch.float64 and value.ndim == 0
        return n_counted / ranks if is_count else value  # of the loss, this rank's part

    losses, moments = [], []
    for rank, share in enumerate(torch.tensor_split(sequences, ranks)):
        one = stepper(numerics, micro_batch=micro_batch, rank=rank, ranks=ranks, mean=mean, all_count=False)
        one.recipe = replace(RECIPE, clip_norm=1e9)
        losses.append(float(one.step(share, number=0, tokens=0, rate_factor=1.0, of=7)[0]))
        moments.append(weights(one))
    module, plain = stepper(numerics).module, batch()
    logits = module(plain[:, :-1]).flatten(0, 1)[counts]
    targets = plain[:, 1:].flatten()[counts]
    loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=model.label_smoothing)
    loss = loss + model.z_loss * logits.logsumexp(-1).square().mean()
    assert sum(losses) / ranks == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    for name, parameter in module.named_parameters():
        gradient = sum(each[f"exp_avg/{name}"] for each in moments) / ranks / (1 - RECIPE.beta1)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-7)


def test_a_batch_without_a_counted_token_has_no_loss_and_moves_nothing_but_decay() -> None:
    one = stepper(all_count=False)
    loss, norm = take(one, 0, ~batch())
    assert (loss, norm) == (0.0, 0.0)
