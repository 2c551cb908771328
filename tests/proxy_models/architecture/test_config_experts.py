"""Mixtures of experts among transformers' classes: classes of tensors, counts, the auxiliary loss, compiled and traced, refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from proxy_models.architecture.config_family import ConfigFamily
from proxy_models.architecture.experts import ROUTED
from proxy_models.architecture.families import ModelFamily, build, load
from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.member import ModuleConfig
from proxy_models.architecture.parametrization import TensorClass
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import stem
from proxy_models.training import compilation
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.traced_memory import traced_memory
from proxy_models.training.trainer import Trainer
from tests.proxy_models.families import TRANSFORMERS

VALUES = Hyperparameters(learning_rate=0.01, batch_tokens=4 * 32)
TOKENS = torch.arange(4 * 33).view(4, 33)

pytestmark = pytest.mark.usefixtures("transformers")


def family(name: str, **args: Any) -> ConfigFamily:
    made = load(f"transformers:{name}")(vocab_size=256, context_length=32, **{**TRANSFORMERS[name], **args})
    return cast(ConfigFamily, made)


@pytest.fixture(params=["Qwen3MoeConfig", "MixtralConfig"])
def each(request: pytest.FixtureRequest) -> ConfigFamily:
    return family(request.param)


def numerics_of(made: ConfigFamily, corpus: Corpus, width: int = 64) -> Numerics:
    found = ModelFamily(base=cast(ModuleConfig, made.member(32, 2)))
    return Numerics(model=found.at(width=width), base=found.base, corpus_key=corpus.key, seed=0, evaluation_tokens=512)


def test_stacks_and_routers_have_their_classes_with_the_fan_in_of_one_expert(each: ConfigFamily) -> None:
    rules = each.parametrization(each.member(128, 2), each.member(32, 2)).rules
    block = "network.model.layers.1.mlp."
    classes = {name.removeprefix(block): rule.tensor_class for name, rule in rules.items() if name.startswith(block)}
    stack = TensorClass.HIDDEN_STACK
    assert classes == {
        "experts.gate_up_proj": stack,
        "experts.down_proj": stack,
        "gate.weight": TensorClass.ROUTER,
    }
    assert rules[f"{block}experts.gate_up_proj"].init_std == pytest.approx(128**-0.5)
    assert rules[f"{block}experts.down_proj"].init_std == pytest.approx(128**-0.5)  # as wide as the stream
    assert rules[f"{block}gate.weight"].init_std == pytest.approx((128 * 4) ** -0.5)


def test_n_counts_the_experts_that_a_token_passes(each: ConfigFamily) -> None:
    member, config = each.member(64, 2), each.config(64, 2)
    experts = 2 * config.num_experts * 3 * 64 * 64
    active = experts * config.num_experts_per_tok / config.num_experts
    assert member.n_params_total - member.n_params - 256 * 64 == experts - active


def test_sizes_follow_the_width_and_rows_fill_sixteen_bytes() -> None:
    made = family("Qwen3MoeConfig", hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    made = family("Qwen3MoeConfig", **made.arguments | {"moe_intermediate_size": 768, "intermediate_size": 6144})
    config = made.config(512, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 1, 128)
    assert (config.moe_intermediate_size, config.num_experts) == (192, 8)
    narrow = family("MixtralConfig", hidden_size=64, intermediate_size=16)
    assert narrow.width_step == 32  # 8 / 64 of a hidden width of 16 is 2, a quarter of what a row needs


def test_dense_blocks_between_sparse_ones_keep_their_classes() -> None:
    made = family("Qwen3MoeConfig", decoder_sparse_step=2)
    classes = made.tensor_classes(64, 4)
    assert {name.split(".")[3] for name in classes} == {"1", "3"}
    rules = made.parametrization(made.member(64, 4), made.member(32, 4)).rules
    assert rules["network.model.layers.0.mlp.gate_proj.weight"].tensor_class is TensorClass.HIDDEN


@torch.no_grad()
def test_the_grouped_product_gives_the_logits_of_transformers_own_experts(
    each: ConfigFamily, transformers: Any
) -> None:
    model = build(each.member(32, 2))
    network = cast(Any, model).network
    tokens = TOKENS[:, :-1]
    ours = model(tokens)
    assert network.get_experts_implementation()[""] == "muscale"
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        network.set_experts_implementation(implementation)
        torch.testing.assert_close(model(tokens), ours)


def test_the_auxiliary_loss_is_transformers_own_and_only_trains(each: ConfigFamily) -> None:
    asked = replace(each, output_router_logits=True, router_aux_loss_coef=0.5)  # type: ignore[call-arg]
    model = asked.build(32, 2)
    plain = asked.evaluation_loss(model, TOKENS)
    penalized = asked.training_loss(model, TOKENS)
    theirs = cast(Any, model).network(input_ids=TOKENS[:, :-1], output_router_logits=True).aux_loss
    torch.testing.assert_close(penalized - plain, 0.5 * theirs)
    assert theirs > 1.5  # it counts each of the two choices: 2 at balance
    torch.autograd.backward(penalized)
    gradient = cast(Any, model).network.model.layers[0].mlp.gate.weight.grad
    assert gradient.abs().max() > 0
    torch.testing.assert_close(each.training_loss(model, TOKENS), plain)
    masked = torch.where(torch.arange(33) > 20, TOKENS, ~TOKENS)
    logits, targets = model(TOKENS[:, :-1])[:, 20:], TOKENS[:, 21:]
    over_counted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    weighted = asked.training_loss(model, masked, torch.tensor(32 / 12))
    torch.testing.assert_close(weighted, over_counted + 0.5 * theirs)
    torch.testing.assert_close(asked.evaluation_loss(model, masked, torch.tensor(32 / 12)), over_counted)


def test_a_step_is_one_graph_and_rounds_to_bf16(each: ConfigFamily) -> None:
    asked = replace(each, output_router_logits=True)  # type: ignore[call-arg]
    model, loss = asked.build(32, 2), asked.training_loss
    eager = loss(model, TOKENS)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)(model, TOKENS)
    torch.testing.assert_close(compiled, eager)
    torch.autograd.backward(compiled)
    assert all(parameter.grad is not None for parameter in model.parameters())
    asked.set_precision(model, torch.bfloat16)
    torch.testing.assert_close(loss(model, TOKENS), eager, rtol=2e-2, atol=0)


def routed(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith(f".{ROUTED}")]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_routers_count_each_training_pass_once_and_no_evaluation(each: ConfigFamily, checkpointing: Any) -> None:
    model, config = each.build(32, 3), each.config(32, 3)
    each.set_checkpointing(model, checkpointing)
    for part in torch.split(TOKENS, 2):
        torch.autograd.backward(each.training_loss(model, part))
    before = torch.stack(routed(model))
    model.eval()
    each.training_loss(model, TOKENS)
    torch.testing.assert_close(torch.stack(routed(model)), before)
    with torch.no_grad():
        logits = cast(Any, model).network(input_ids=TOKENS[:, :-1], output_router_logits=True).router_logits
    for counted, of_block in zip(before, logits, strict=True):
        chosen = of_block.topk(config.num_experts_per_tok).indices.flatten()
        assert counted[:-1].tolist() == chosen.bincount(minlength=config.num_experts).tolist()
        torch.testing.assert_close(counted[-1], -(of_block.softmax(-1) * of_block.log_softmax(-1)).sum())
        assert counted[:-1].sum() == 4 * 32 * config.num_experts_per_tok


def test_figures_of_routers_that_score_all_experts_alike(each: ConfigFamily) -> None:
    model, config = each.build(32, 2), each.config(32, 2)
    for block in cast(Any, model).network.model.layers:
        torch.nn.init.zeros_(block.mlp.gate.weight)
    each.training_loss(model, TOKENS)
    figures = dict(each.end_step(model, each.member(32, 2), taken=True, mean=lambda counted: counted))
    loads = figures.pop("expert_loads")
    n_experts, per_token = config.num_experts, config.num_experts_per_tok
    assert loads.shape == (2, n_experts)
    torch.testing.assert_close(loads.sum(1), torch.full((2,), n_experts).double())
    assert {name: float(figure) for name, figure in figures.items()} == {
        "router_entropy": pytest.approx(math.log(n_experts)),
        "largest_load": pytest.approx(n_experts / per_token),  # equal scores send all tokens to the same experts
        "dead_experts": 2 * (n_experts - per_token),
    }
    assert not torch.stack(routed(model)).any()


def test_only_blocks_with_experts_have_figures(corpus: Corpus) -> None:
    made = family("Qwen3MoeConfig", decoder_sparse_step=2)
    model = made.build(32, 4)
    made.training_loss(model, TOKENS)
    figures = made.end_step(model, made.member(32, 4), taken=True, mean=lambda counted: counted)
    assert figures["expert_loads"].shape == (2, 8)
    assert figures["expert_loads"].isfinite().all()
    for dense in (made, family("Qwen3Config")):
        model = dense.build(32, 1)
        assert not routed(model)
        assert not dense.end_step(model, dense.member(32, 1), taken=True, mean=lambda counted: counted)


def test_the_curve_of_a_proxy_has_the_figures_of_its_routers(each: ConfigFamily, corpus: Corpus) -> None:
    numerics, n_experts = numerics_of(each, corpus, width=32), each.config(32, 2).num_experts
    table = Trainer(corpus, compile=False).train(numerics, stem(VALUES.resolve(4 * 128), 4 * 128)).curve.table()
    assert table["router_entropy"].between(0.75 * math.log(n_experts), math.log(n_experts)).all()
    assert table["largest_load"].between(1, n_experts / 2).all()
    assert table["dead_experts"].between(0, 2 * n_experts).all()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.filterwarnings("ignore")  # dynamo warns about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_blocks_share_their_graphs_and_count_as_eager_ones(
    each: ConfigFamily, checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compilation.configure()
    made = replace(each, output_router_logits=True)  # type: ignore[call-arg]
    eager = made.build(32, 3)
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        made.set_checkpointing(model, checkpointing)
    for block in made.blocks_of(compiled):
        made.compile_block(block, outside_recomputing=False)
    counters.clear()
    for model in (eager, compiled):
        for part in torch.split(TOKENS, 2):
            torch.autograd.backward(made.training_loss(model, part))
    assert (counters["stats"]["unique_graphs"], counters["graph_break"]) == (3, {})  # the block and its two hooks
    torch.testing.assert_close(routed(compiled), routed(eager))
    assert all(int(counted[:-1].sum()) == 4 * 32 * 2 for counted in routed(compiled))


def test_muon_moves_stacks_and_adamw_routers(each: ConfigFamily, corpus: Corpus) -> None:
    numerics = numerics_of(each, corpus)
    recipe = replace(VALUES, optimizer="muon").resolve(24 * 128)
    model, table = build(numerics.model), numerics.parametrization("muon")
    initialize(model, table, recipe, seed=0)
    groups = make_optimizer(model, table, recipe).param_groups
    names = {name: (group.get("orthogonal"), group.get("stack")) for group in groups for name in group["param_names"]}
    block = "network.model.layers.0.mlp."
    assert names[f"{block}experts.gate_up_proj"] == names[f"{block}experts.down_proj"] == (True, True)
    assert not names[f"{block}gate.weight"][0]
    trained = Trainer(corpus, compile=False).train(numerics, stem(recipe, 24 * 128))
    assert trained.loss is not None
    assert trained.loss < float(trained.curve.train_loss[0]) - 0.5


def test_a_pass_is_traced_in_fp32(each: ConfigFamily) -> None:
    member = each.member(64, 2)
    few, many = (traced_memory(member, micro_batch=n) for n in (2, 4))
    assert few.parameters == 4 * member.n_params_total
    assert few.activations < many.activations < 2.5 * few.activations


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("Qwen3MoeConfig", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("MixtralConfig", {"num_experts_per_tok": 1}, "num_experts_per_tok"),  # gates sum to 1: it would be constant
        ("Qwen3MoeConfig", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok"),
    ],
)
def test_a_number_of_experts_that_no_token_can_pass_is_refused(name: str, args: dict[str, Any], key: str) -> None:
    with pytest.raises(FamilyError, match=key):
        family(name, **args)


@pytest.mark.parametrize("name", ["Qwen2MoeConfig", "OlmoeConfig"])
def test_other_classes_with_experts_are_refused_with_the_tensor(name: str) -> None:
    known = load(f"transformers:{name}")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    with pytest.raises(ValueError, match="experts"):
        known(vocab_size=256, context_length=32, **sizes).member(32, 2)
