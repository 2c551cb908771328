from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proxy_models.architecture.config import ExpertScheme, ModelConfig, RouterScores
from proxy_models.architecture.decoder import Block, Decoder, training_loss
from proxy_models.architecture.experts import RoutedMLP, balance
from proxy_models.architecture.parametrization import TensorClass, parametrize
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import initialize

CONFIG = ModelConfig(
    d_model=32, n_layers=2, vocab_size=64, context_length=16, n_experts=6, experts_per_token=2, expert_ratio=0.5
)
RECIPE = Hyperparameters(learning_rate=0.01, batch_tokens=64).resolve(6400)


def mixture(config: ModelConfig = CONFIG, seed: int = 0) -> RoutedMLP:
    torch.manual_seed(seed)
    return RoutedMLP(config)


def tokens(config: ModelConfig = CONFIG) -> Tensor:
    return torch.randn(3, 7, config.d_model, generator=torch.Generator().manual_seed(1))


def one_by_one(module: RoutedMLP, x: Tensor) -> Tensor:
    """The mixture as its definition has it: a token after the other, an expert after the other."""
    config, experts = module.config, module.experts
    mixed = torch.zeros_like(x)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:2])).tolist():
        token = x[tuple(place)]
        logits = module.router.weight @ token
        scores = logits.sigmoid() if config.router_scores == "sigmoid" else logits.softmax(0)
        chosen = (scores + module.router.balance_bias).sort(descending=True).indices[: config.experts_per_token]
        gates = scores[chosen] / scores[chosen].sum()
        for expert, gate in zip(chosen.tolist(), gates, strict=True):
            hidden = F.silu(experts.gate[expert] @ token) * (experts.up[expert] @ token)
            mixed[tuple(place)] += (gate.sqrt() if config.expert_scheme == "sqrt_gate" else gate) * (
                experts.down[expert] @ hidden
            )
    if config.n_shared_experts:
        mixed = cast(Tensor, mixed + module.shared(x))
        return mixed * 0.5**0.5 if config.expert_scheme == "sqrt_gate" else mixed
    return mixed


@pytest.mark.parametrize("n_shared", [0, 2])
@pytest.mark.parametrize("scheme", ["fan_in", "sqrt_gate"])
@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_a_token_passes_the_experts_of_its_best_scores_and_all_shared_ones(
    scores: RouterScores, scheme: ExpertScheme, n_shared: int
) -> None:
    module = mixture(replace(CONFIG, router_scores=scores, expert_scheme=scheme, n_shared_experts=n_shared))
    module.router.balance_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    x = tokens().requires_grad_()
    results = []
    for function in (lambda: module(x)[0], lambda: one_by_one(module, x)):
        mixed = function()
        results.append((mixed, *torch.autograd.grad(mixed.square().sum(), [x, *module.parameters()])))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_a_bias_changes_who_is_chosen_and_no_gate() -> None:
    module = mixture(replace(CONFIG, experts_per_token=6))
    before = module.router(tokens().flatten(0, 1))
    module.router.balance_bias.copy_(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]))
    after = module.router(tokens().flatten(0, 1))
    assert after.chosen.eq(torch.arange(6)).all()
    torch.testing.assert_close(after.gates, before.gates.gather(1, before.chosen.argsort(dim=1)))
    torch.testing.assert_close(after.gates.sum(1), torch.ones(21))
    assert after.load.tolist() == [21] * 6


def decoder(config: ModelConfig = CONFIG) -> Decoder:
    model = Decoder(config)
    initialize(model, parametrize(config, config), RECIPE, seed=0)
    return model


def sequences(number: int = 0, n: int = 16) -> Tensor:
    """Sequences in which few of the symbols are frequent."""
    generator = torch.Generator().manual_seed(number)
    return (64 * torch.rand(n, 17, generator=generator) ** 3).long()


def routed(model: Decoder) -> Tensor:
    return torch.stack([cast(Any, block).mlp.router.routed for block in model.blocks])


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_each_pass_of_a_step_is_counted_once_and_evaluations_are_not(checkpointing: Any) -> None:
    model = decoder()
    for block in model.blocks:
        cast(Block, block).checkpointing = checkpointing
    for part in torch.split(sequences(), 4):
        training_loss(model, part).backward()  # type: ignore[no-untyped-call]
    model.eval()
    training_loss(model, sequences())
    assert routed(model)[:, :-1].sum(1).tolist() == [16 * 16 * 2] * 2


def test_biases_move_towards_equal_loads_and_only_after_a_step_that_was_taken() -> None:
    config = replace(CONFIG, first_dense_layers=1, n_layers=3, balance_rate=0.1, experts_per_token=3)
    model = Decoder(config)
    routers = [cast(Any, model.blocks[layer]).mlp.router for layer in (1, 2)]

    def step(taken: bool | Tensor) -> Any:
        routers[0].routed.copy_(torch.tensor([9.0, 3.0, 0.0, 6.0, 6.0, 6.0, 10.0]))
        routers[1].routed.copy_(torch.tensor([5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]))
        return balance(model, config, taken=taken, mean=lambda of_rank: of_rank / 2)

    for refused in (False, torch.tensor(False)):
        step(refused)
        assert not any(router.balance_bias.any() or router.routed.any() for router in routers)
    figures = step(torch.tensor(True))
    torch.testing.assert_close(routers[0].balance_bias, torch.tensor([-0.1, 0.1, 0.1, -0.1, -0.1, -0.1]))
    assert not routers[1].balance_bias.any()
    loads = figures.pop("expert_loads")
    torch.testing.assert_close(
        loads, torch.tensor([[9.0, 3.0, 0.0, 6.0, 6.0, 6.0], [5.0] * 6]).double() / loads.new([[5.0], [5.0]])
    )
    assert {name: float(value) for name, value in figures.items()} == {
        "router_entropy": pytest.approx(15 / (60 / 3)),
        "largest_load": pytest.approx(9 / 5),
        "dead_experts": 1,
    }


def test_balancing_keeps_the_loads_of_experts_closer_together() -> None:
    largest = {}
    for rate in (0.0, 0.01):
        model, config = decoder(), replace(CONFIG, balance_rate=rate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        loads = []
        for number in range(60):
            training_loss(model, sequences(number)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loads.append(float(balance(model, config, taken=True, mean=lambda load: load)["largest_load"]))
        largest[rate] = sum(loads[-20:]) / 20
    assert largest[0.01] < 0.8 * largest[0.0]


def test_losses_of_the_router_are_in_the_loss_of_training_only() -> None:
    config = replace(CONFIG, balance_loss=0.5, router_z_loss=0.25, router_scores="softmax")
    model, x = decoder(config), sequences()
    plain = training_loss(with_config(model, CONFIG), x)
    penalised = training_loss(with_config(model, config), x)
    expected = torch.zeros(())
    for block in model.blocks:
        router = cast(Any, block).mlp.router
        seen: dict[str, Tensor] = {}
        router.register_forward_pre_hook(lambda _, given, seen=seen: seen.update(x=given[0]))
        training_loss(model, x)
        logits = seen["x"] @ router.weight.T
        load = logits.topk(2).indices.flatten().bincount(minlength=6) / (2 * logits.shape[0])
        expected += 0.5 * 6 * (load * logits.softmax(1).mean(0)).sum() + 0.25 * logits.logsumexp(1).square().mean()
    torch.testing.assert_close(penalised - plain, expected)
    with torch.no_grad():
        assert model(x[:, :-1], x[:, 1:]) == plain.detach()
    masked, scale = torch.where(torch.arange(x.shape[1]) % 3 > 0, x, ~x), torch.tensor(1.5)
    penalties = [
        training_loss(with_config(model, config), masked, weight)
        - training_loss(with_config(model, CONFIG), masked, weight)
        for weight in (scale, 2 * scale)
    ]
    torch.testing.assert_close(penalties, [expected, expected])  # routers see tokens that do not count, too


def with_config(model: Decoder, config: ModelConfig) -> Decoder:
    for module in model.modules():
        if isinstance(getattr(module, "config", None), ModelConfig):
            module.config = replace(config, router_scores="softmax")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(("scheme", "falls"), [("fan_in", True), ("mean_field", False), ("sqrt_gate", False)])
def test_schemes_differ_in_what_finer_experts_do_to_the_first_output(scheme: ExpertScheme, falls: bool) -> None:
    base = replace(CONFIG, expert_ratio=2.0, n_experts=8, experts_per_token=2, expert_scheme=scheme, d_model=128)
    sizes = []
    for granularity in (1, 4, 8):
        fine = base.along("granularity", granularity * base.granularity)
        model = Decoder(fine)
        initialize(model, parametrize(fine, base), RECIPE, seed=0)
        module = cast(RoutedMLP, cast(Any, model.blocks[0]).mlp)
        x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(3))
        sizes.append(float(module(x)[0].detach().square().mean().sqrt()))
    for size, granularity in zip(sizes[1:], (4, 8), strict=True):
        assert size / sizes[0] == pytest.approx(granularity**-0.5 if falls else 1, rel=0.12)


def test_rules_of_experts_carry_width_and_the_size_of_one_expert() -> None:
    member = replace(CONFIG, d_model=128, n_experts=24, experts_per_token=8, expert_ratio=0.125, n_layers=4)
    table = parametrize(member, CONFIG).rules
    name = "blocks.3.mlp."
    router, up, down = table[name + "router.weight"], table[name + "experts.up"], table[name + "experts.down"]
    assert (router.tensor_class, up.tensor_class) == (TensorClass.ROUTER, TensorClass.HIDDEN_STACK)
    assert (router.lr_factor, up.lr_factor, down.lr_factor) == (1 / 4, 1 / 4, 1)  # an expert's width stays 16
    assert (router.init_std, up.init_std, down.init_std) == pytest.approx(((4 * 128) ** -0.5, 128**-0.5, 0.25))
    # the gradient of `down` falls with the width of the stream, not with that of an expert
    assert (router.eps_factor, up.eps_factor, down.eps_factor) == pytest.approx((1 / 8, 1 / 32, 1 / 32))
    with pytest.raises(ValueError, match="shared experts"):
        parametrize(replace(member, n_shared_experts=1), CONFIG)
    with pytest.raises(ValueError, match="n_experts"):
        parametrize(member, replace(CONFIG, n_experts=None, expert_ratio=None))


def test_finer_experts_keep_the_computation_of_a_token_and_the_shape_of_shared_experts() -> None:
    base = replace(CONFIG, n_shared_experts=1)
    fine = base.along("granularity", 2 * base.granularity)
    assert (fine.n_experts, fine.experts_per_token, fine.expert_ratio, fine.n_shared_experts) == (12, 4, 0.25, 2)
    router = base.n_layers * base.d_model * 6  # rows of the router are as many more
    assert fine.n_params == base.n_params + router
    table = parametrize(fine, base).rules
    shared, routed = (table[f"blocks.0.mlp.{name}"] for name in ("shared.down.weight", "experts.down"))
    assert (shared.lr_factor, routed.lr_factor) == (1, 2)
    assert (shared.init_std, routed.init_std) == pytest.approx((16**-0.5, 8**-0.5))
    wider = parametrize(replace(base, expert_ratio=1.0), base).rules["blocks.0.mlp.shared.down.weight"]
    assert (wider.lr_factor, wider.eps_factor) == (0.5, 1)


def test_standard_parametrization_has_plain_fan_in_under_every_scheme() -> None:
    base = replace(CONFIG, expert_scheme="mean_field")
    rule = parametrize(base.along("granularity", 11.0), base, scheme="standard").rules["blocks.0.mlp.experts.down"]
    assert rule.init_std == pytest.approx(8**-0.5)


def test_parameters_count_once_for_the_law_if_a_token_passes_them() -> None:
    config = replace(CONFIG, first_dense_layers=1, n_shared_experts=1)
    one_expert, dense = 3 * 32 * 16, 3 * 32 * 88
    attention, norms, readout = 2 * 4 * 32 * 32, 5 * 32, 64 * 32
    assert config.n_params == attention + norms + readout + dense + 6 * 32 + (2 + 1) * one_expert
    assert config.n_params_total == config.n_params + readout + 4 * one_expert
    assert (config.granularity, config.active_share, config.n_inactive_params) == (5.5, 1 / 3, 4 * one_expert)


def test_weights_without_the_state_of_a_router_are_refused() -> None:
    model = decoder()
    cast(Any, model.blocks[1]).mlp.router.balance_bias.fill_(0.5)
    weights = dict(model.state_dict())
    again = Decoder.with_weights(CONFIG, weights)
    assert cast(Any, again.blocks[1]).mlp.router.balance_bias.eq(0.5).all()
    assert not routed(again).any()
    del weights["blocks.1.mlp.router.balance_bias"]
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.router\.balance_bias"):
        Decoder.with_weights(CONFIG, weights)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"experts_per_token": 7}, ["experts_per_token", "6", "7"]),
        ({"experts_per_token": 1}, ["experts_per_token", "1"]),
        ({"expert_ratio": 0.375}, ["expert_ratio", "8", "12"]),
        ({"expert_ratio": -1.0}, ["expert_ratio", "-32"]),
        ({"head_dim": 4, "d_model": 36, "mlp_ratio": 2.0}, ["d_model", "8", "36"]),
        ({"first_dense_layers": 2}, ["first_dense_layers", "2"]),
        ({"n_shared_experts": -1}, ["n_shared_experts", "-1"]),
        ({"router_scores": "tanh"}, ["router_scores", "tanh"]),
        ({"expert_scheme": "other"}, ["expert_scheme", "other"]),
        ({"balance_rate": float("nan")}, ["balance_rate", "nan"]),
        ({"router_z_loss": -0.1}, ["router_z_loss", "-0.1"]),
        ({"n_experts": None}, ["expert_ratio", "n_experts", "0.5"]),
    ],
)
def test_a_mixture_that_breaks_a_rule_is_refused(change: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(names)):
        replace(CONFIG, **change)


def test_keys_of_dense_models_do_not_name_experts() -> None:
    assert not [name for name in ModelConfig(d_model=32, n_layers=1).to_dict() if "expert" in name or "rout" in name]
    assert ModelConfig.from_dict(CONFIG.to_dict()) == CONFIG
