from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.families import ModelFamily, build
from proxy_models.architecture.parametrization import (
    RATE_EXPONENT,
    Parametrization,
    TensorClass,
    parametrize,
)
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.optimizer import clip, initialize, make_optimizer, set_rates
from tests.proxy_models.families import Stacked

FAMILY = ModelFamily(base=ModelConfig(d_model=32, n_layers=2, context_length=16))
WIDE = FAMILY.at(width=64)
OPTIMIZERS = list(RATE_EXPONENT)


@pytest.fixture
def recipe() -> Recipe:
    return Hyperparameters(
        learning_rate=0.01, batch_tokens=64, init_scale=0.5, embedding_multiplier=3.0, eps=1e-9
    ).resolve(6400)


@pytest.fixture
def table() -> Parametrization:
    return parametrize(WIDE, FAMILY.base)


class Backwards(nn.Module):
    """The decoder's parameters, registered in the opposite order."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        for name, child in reversed(list(model.named_children())):
            self.add_module(name, child)
        for name, multiplier in model.named_buffers(recurse=False):
            self.register_buffer(name, multiplier, persistent=False)
        block = model.blocks[0]
        block._modules = dict(reversed(block._modules.items()))


def test_initial_values_do_not_depend_on_the_order_of_parameters(recipe: Recipe, table: Parametrization) -> None:
    model, backwards = Decoder(WIDE), Backwards(Decoder(WIDE))
    assert list(dict(backwards.named_parameters())) != list(dict(model.named_parameters()))
    torch.manual_seed(1)
    initialize(model, table, recipe, seed=5)
    torch.manual_seed(2)
    initialize(backwards, table, recipe, seed=5)
    other = dict(backwards.named_parameters())
    assert all(torch.equal(parameter, other[name]) for name, parameter in model.named_parameters())


def test_initial_values_have_the_table_s_deviation_times_the_tuned_scale(
    recipe: Recipe, table: Parametrization
) -> None:
    model = Decoder(WIDE)
    initialize(model, table, recipe, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            error = 4 / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(0.5 * table.rules[name].init_std, rel=error), name
    assert model.embedding_multiplier == 3
    assert model.readout_multiplier == 0.5


def test_a_readout_may_start_at_zero_and_all_else_starts_as_before(recipe: Recipe, table: Parametrization) -> None:
    usual, zero = Decoder(WIDE), Decoder(WIDE)
    initialize(usual, table, recipe, seed=0)
    initialize(zero, table, replace(recipe, zero_readout=True), seed=0)
    for name, parameter in zero.named_parameters():
        expected = usual.get_parameter(name)
        assert torch.equal(parameter, torch.zeros_like(expected) if name == "readout.weight" else expected), name


def test_a_readout_that_is_tied_to_the_embedding_can_not_start_at_zero(recipe: Recipe) -> None:
    tied = replace(WIDE, tied=True)
    with pytest.raises(ValueError, match="zero_readout: .* got true"):
        initialize(Decoder(tied), parametrize(tied, tied), replace(recipe, zero_readout=True), seed=0)


def test_a_rate_of_embeddings_is_refused_where_it_would_move_none(recipe: Recipe) -> None:
    slower, tied = replace(recipe, embedding_rate=0.5), replace(WIDE, tied=True)
    with pytest.raises(ValueError, match="embedding_rate: .* got 0.5"):
        initialize(Decoder(tied), parametrize(tied, tied), slower, seed=0)
    with_positions = replace(tied, positions="learned")
    initialize(Decoder(with_positions), parametrize(with_positions, with_positions), slower, seed=0)


def test_no_two_tensors_and_no_two_seeds_start_alike(recipe: Recipe, table: Parametrization) -> None:
    draws = []
    for seed in (0, 1):
        model = Decoder(WIDE)
        initialize(model, table, recipe, seed=seed)
        draws += [model.get_parameter(f"blocks.0.attention.{name}.weight") for name in ("query", "key")]
    correlations = torch.corrcoef(torch.stack([draw.detach().flatten() for draw in draws]))
    assert (correlations - torch.eye(4)).abs().max() < 5 / math.sqrt(draws[0].numel())


def test_a_table_of_another_model_is_refused(recipe: Recipe) -> None:
    with pytest.raises(ValueError, match=r"blocks.1.attention.key.weight"):
        initialize(Decoder(FAMILY.at(depth=1)), parametrize(FAMILY.base, FAMILY.base), recipe, seed=0)


def test_each_parameter_is_in_one_group_with_its_own_rate_decay_and_eps(recipe: Recipe, table: Parametrization) -> None:
    model = Decoder(WIDE)
    optimizer = make_optimizer(model, table, recipe)
    found = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)
    for name, parameter in model.named_parameters():
        group, rule = found[parameter], table.rules[name]
        assert group["lr"] == group["peak_lr"] == pytest.approx(0.01 * rule.lr_factor)
        assert group["weight_decay"] == pytest.approx(recipe.weight_decay * rule.weight_decay_factor)
        assert group["eps"] == pytest.approx(1e-9 * rule.eps_factor)
        assert group["betas"] == (recipe.beta1, recipe.beta2)


@pytest.mark.parametrize(("tied", "moved"), [(False, {"embedding": 0.25, "readout": 8.0}), (True, {"tied": 8.0})])
def test_the_tables_of_tokens_have_factors_of_their_own_on_the_rate(
    tied: bool, moved: dict[str, float], recipe: Recipe
) -> None:
    wide = replace(WIDE, tied=tied)
    table, model = parametrize(wide, replace(FAMILY.base, tied=tied)), Decoder(wide)
    recipe = replace(recipe, output_rate=8.0, embedding_rate=1.0 if tied else 0.25)
    rate_of = {p: group["lr"] for group in make_optimizer(model, table, recipe).param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        rule = table.rules[name]
        assert rate_of[parameter] == pytest.approx(0.01 * rule.lr_factor * moved.get(rule.tensor_class, 1.0)), name


def test_only_what_adam_trains_has_the_table_s_eps_and_its_kernel_is_the_fused_one(recipe: Recipe) -> None:
    groups = {
        name: make_optimizer(Decoder(WIDE), parametrize(WIDE, FAMILY.base, optimizer=name), recipe).param_groups
        for name in OPTIMIZERS
    }
    assert {group["eps"] for group in groups["muon"] if group["orthogonal"]} == {1e-7}  # torch's own for Muon
    assert {group["eps"] for group in groups["muon"] if not group["orthogonal"]} == {5e-10}
    assert not [group for name in ("lion", "adafactor") for group in groups[name] if group.get("eps") == 5e-10]
    of_adam = [*groups["adamw"], *groups["adam"], *(group for group in groups["muon"] if not group["orthogonal"])]
    assert all(group["fused"] for group in of_adam)
    assert {group["weight_decay"] for group in groups["adam"]} == {0.0}


def test_rates_multiply_the_peak_and_do_not_compound(recipe: Recipe, table: Parametrization) -> None:
    optimizer = make_optimizer(Decoder(WIDE), table, recipe)
    for factor in (0.5, 0.5, 0.25):
        set_rates(optimizer, factor)
        assert {group["lr"] / group["peak_lr"] for group in optimizer.param_groups} == {factor}
    assert len({group["lr"] for group in optimizer.param_groups}) == 2


def test_one_step_is_adamw_s_own(recipe: Recipe) -> None:
    # First step of AdamW: p ← p·(1 - lr·wd) - lr·g / (|g| + eps), written out with each parameter's own values.
    recipe = replace(recipe, weight_decay=2.0)
    table = parametrize(WIDE, FAMILY.base)
    model = Decoder(WIDE)
    initialize(model, table, recipe, seed=0)
    optimizer = make_optimizer(model, table, recipe)
    set_rates(optimizer, 0.5)
    next_token_loss(model, torch.arange(17).unsqueeze(0)).backward()  # type: ignore[no-untyped-call]
    expected = {}
    for name, p in model.named_parameters():
        rule = table.rules[name]
        assert p.grad is not None
        lr, decay = 0.005 * rule.lr_factor, 2.0 * rule.weight_decay_factor
        expected[name] = (p * (1 - lr * decay) - lr * p.grad / (p.grad.abs() + 1e-9 * rule.eps_factor)).detach()
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-7)


def few_steps(
    optimizer: torch.optim.Optimizer, model: Decoder, n_steps: int, *, start: int = 0
) -> torch.optim.Optimizer:
    for step in range(start, start + n_steps):
        next_token_loss(model, (torch.arange(17) * (step + 3) % 256).unsqueeze(0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_muon_trains_the_hidden_matrices_and_adamw_the_rest(recipe: Recipe) -> None:
    table = parametrize(WIDE, FAMILY.base, optimizer="muon")
    model, apart = Decoder(WIDE), Decoder(WIDE)
    for each in (model, apart):
        initialize(each, table, recipe, seed=0)
    few_steps(make_optimizer(model, table, recipe), model, 3)
    hidden = [p for n, p in apart.named_parameters() if table.rules[n].tensor_class is TensorClass.HIDDEN]
    others = [p for p in apart.parameters() if not any(p is matrix for matrix in hidden)]
    assert len(hidden) == 2 * 7
    decayed = [p for p in others if p.ndim == 2]
    gains = [p for p in others if p.ndim == 1]
    both: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            hidden,
            lr=0.01 / 2**0.5,
            weight_decay=recipe.weight_decay * 2**0.5,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=0.01,
            betas=(recipe.beta1, recipe.beta2),
            eps=5e-10,
            fused=True,
        ),
    ]
    for step in range(3):
        next_token_loss(apart, (torch.arange(17) * (step + 3) % 256).unsqueeze(0)).backward()  # type: ignore[no-untyped-call]
        for optimizer in both:
            optimizer.step()
        apart.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_muon_takes_a_convolution_as_one_matrix_and_each_matrix_of_a_stack_by_itself(recipe: Recipe) -> None:
    family = Stacked(vocab_size=256, context_length=16)
    member = family.member(32, 2)
    table, model = family.parametrization(member, family.member(16, 2), optimizer="muon"), build(member)
    optimizer, generator = make_optimizer(model, table, recipe), torch.Generator().manual_seed(0)
    kernel, stack = (model.get_parameter(f"layers.0.{name}") for name in ("convolution.weight", "experts"))
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in (kernel.flatten(1), *stack)]
    decay = recipe.weight_decay * 2**0.5
    expected: torch.optim.Optimizer = torch.optim.Muon(
        apart, lr=0.01 / 2**0.5, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        kernel.grad, stack.grad = (torch.randn(each.shape, generator=generator) for each in (kernel, stack))
        for matrix, gradient in zip(apart, (kernel.grad.flatten(1), *stack.grad), strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
        expected.step()
    assert torch.equal(kernel.flatten(1), apart[0])
    # Equal here; elsewhere products of many matrices may round otherwise. An entry moves by 1e-3 a step.
    for matrix, theirs in zip(stack.detach(), apart[1:], strict=True):
        torch.testing.assert_close(matrix, theirs.detach(), rtol=0, atol=2e-5)


def test_an_optimizer_without_rules_can_not_transfer() -> None:
    with pytest.raises(ValueError, match="'sgd'"):
        parametrize(WIDE, FAMILY.base, optimizer="sgd")  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_norm", "left"), [(2.5, 2.5), (50.0, 5.0)])
def test_clipping_returns_the_norm_before_and_leaves_at_most_the_bound(max_norm: float, left: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(clip(parameters, max_norm)) == 5
    after = math.hypot(*(float(value) for p in parameters if p.grad is not None for value in p.grad))
    assert after == pytest.approx(left, rel=1e-5)
