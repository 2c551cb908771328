from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxy_models.architecture.config import Activation, ModelConfig
from proxy_models.architecture.cross_entropy import sequence_loss
from proxy_models.architecture.decoder import (
    Block,
    Decoder,
    Positions,
    alibi_bias,
    next_token_loss,
    rotary_angles,
    rotate,
    training_loss,
)
from proxy_models.architecture.mlp import MLP
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.training.optimizer import set_multipliers

CONFIG = ModelConfig(d_model=32, n_layers=2, vocab_size=11, context_length=12)
MULTIPLIERS = ForwardMultipliers(embedding=1.3, branch=0.6, readout=0.4, attention=0.35)
Array = NDArray[np.float64]


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIG).double()
    set_multipliers(model, MULTIPLIERS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # gains of 1 would hide a gain that is not applied
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, CONFIG.context_length), generator=torch.Generator().manual_seed(1))


def test_a_position_sees_its_past_and_itself_and_nothing_after(model: Decoder, tokens: Tensor) -> None:
    logits = model(tokens)
    for position in range(CONFIG.context_length):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % CONFIG.vocab_size
        moved = (model(changed) - logits).abs().amax(dim=(0, 2))
        assert (moved[:position] == 0).all()
        assert (moved[position:] > 0).all()


def test_rotary_logits_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=generator, dtype=torch.float64)
    angles = rotary_angles(ModelConfig(d_model=16, n_layers=1, context_length=64)).double()

    def logit(at_query: int, at_key: int) -> float:
        turned_query = rotate(query, angles[at_query].cos(), angles[at_query].sin())
        return float((turned_query * rotate(key, angles[at_key].cos(), angles[at_key].sin())).sum())

    for distance in (0, 1, 7, 30):
        same = [logit(start + distance, start) for start in (0, 5, 33)]
        assert same == pytest.approx([same[0]] * 3, abs=1e-5)
    assert abs(logit(9, 8) - logit(9, 2)) > 1e-2


def plain_logits(weights: dict[str, Array], tokens: list[int]) -> Array:
    """The forward pass of one sequence, position by position and head by head, rotation as a complex product."""
    half = CONFIG.head_dim // 2
    frequencies = np.float32(10_000.0) ** (-np.arange(0, CONFIG.head_dim, 2, dtype=np.float32) / CONFIG.head_dim)

    def normed(x: Array, gain: Array) -> Array:
        return np.asarray(x / np.sqrt(np.mean(x * x) + 1e-6) * gain)

    def turned(head: Array, position: int) -> NDArray[np.complex128]:
        # Angles, cosines and sines are float32 in the model, also in a model of doubles.
        angles = np.float32(position) * frequencies
        return (head[:half] + 1j * head[half:]) * (np.cos(angles) + 1j * np.sin(angles))

    stream = [weights["embedding.weight"][token] * MULTIPLIERS.embedding for token in tokens]
    for layer in range(CONFIG.n_layers):
        block = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        inputs = [normed(x, block["attention_norm.weight"]) for x in stream]
        for now in reversed(range(len(tokens))):
            heads = []
            for number in range(CONFIG.n_heads):
                rows = slice(number * CONFIG.head_dim, (number + 1) * CONFIG.head_dim)
                query = turned(block["attention.query.weight"][rows] @ inputs[now], now)
                keys = [turned(block["attention.key.weight"][rows] @ inputs[then], then) for then in range(now + 1)]
                scores = np.exp([MULTIPLIERS.attention * np.vdot(key, query).real for key in keys])
                values = [block["attention.value.weight"][rows] @ inputs[then] for then in range(now + 1)]
                heads.append(sum(s * v for s, v in zip(scores, values, strict=True)) / scores.sum())
            x = stream[now] + MULTIPLIERS.branch * (block["attention.output.weight"] @ np.concatenate(heads))
            y = normed(x, block["mlp_norm.weight"])
            gate = block["mlp.gate.weight"] @ y
            hidden = gate / (1 + np.exp(-gate)) * (block["mlp.up.weight"] @ y)
            stream[now] = x + MULTIPLIERS.branch * (block["mlp.down.weight"] @ hidden)
    final = [normed(x, weights["final_norm.weight"]) for x in stream]
    return np.stack([weights["readout.weight"] @ x * MULTIPLIERS.readout for x in final])


def test_the_forward_pass_equals_its_formula(model: Decoder, tokens: Tensor) -> None:
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    expected = np.stack([plain_logits(weights, row) for row in tokens.tolist()])
    # Float32 cosines and sines of torch and numpy differ in their last bit; all else is double.
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=0, atol=1e-6)


def variant_of(variant: dict[str, Any], **changes: Any) -> Decoder:
    """A decoder of doubles whose gains, biases and multipliers are not 1 and 0."""
    torch.manual_seed(0)
    shape = {"d_model": 64, "n_layers": 2, "vocab_size": 11, "context_length": 12}
    model = Decoder(ModelConfig(**{**shape, **variant, **changes})).double().eval()
    set_multipliers(model, MULTIPLIERS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def blocks(model: Decoder) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def test_a_shorter_input_gives_the_same_first_logits_in_every_variant(variant: dict[str, Any], tokens: Tensor) -> None:
    model = variant_of(variant)
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


def test_a_group_for_each_head_is_multi_head_attention(tokens: Tensor) -> None:
    """Grouped queries equal multi-head attention whose key and value heads are copies within a group."""
    grouped, full = variant_of({"queries_per_kv": 2}), variant_of({})
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if ".key." in name or ".value." in name:
            heads = weight.unflatten(0, (-1, CONFIG.head_dim))
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_without_positions_the_order_of_the_past_does_not_matter_and_with_any_it_does(tokens: Tensor) -> None:
    shuffled = tokens.clone()
    shuffled[:, :-1] = tokens[:, :-1].flip(1)
    for positions, matters in (("none", False), ("rotary", True), ("learned", True), ("alibi", True)):
        # One layer: in a second one the past would be seen through states that depend on their own past.
        model = variant_of({"positions": positions}, n_layers=1)
        same = torch.allclose(model(tokens)[:, -1], model(shuffled)[:, -1])
        assert same != matters, positions


def test_the_longest_wavelength_is_nearly_rope_theta_turns() -> None:
    angles = rotary_angles(ModelConfig(d_model=128, n_layers=1, head_dim=128, rope_theta=5e5, context_length=2))
    assert float(angles[1, 0]) == 1.0
    # arXiv 2104.09864, section 3.2.2: theta^(-2i/d)
    assert float(1 / angles[1, -1]) == pytest.approx(5e5 ** (126 / 128))


def test_what_lies_beyond_the_rotated_share_of_a_head_stays() -> None:
    x = torch.randn(1, 12, 2, 16, generator=torch.Generator().manual_seed(0))
    angles = rotary_angles(ModelConfig(d_model=16, n_layers=1, rotary_fraction=0.25, context_length=12))[:, None]
    rotated = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    torch.testing.assert_close(rotated[..., :4], rotate(x[..., :4], angles.cos(), angles.sin()))


def test_alibi_is_a_penalty_on_distance_that_halves_its_slope_from_head_to_head() -> None:
    bias = alibi_bias(5, 8)
    assert bias[0, 4].tolist() == [-2.0, -1.5, -1.0, -0.5, 0.0]  # 8 heads: slopes 1/2, 1/4, …, 1/256
    torch.testing.assert_close(bias[1:, 4, 0], bias[:-1, 4, 0] / 2)
    assert torch.isinf(bias[:, 0, 1:]).all()


def test_activations_are_what_their_names_say() -> None:
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain_activations: dict[Activation, Callable[[Tensor], Tensor]] = {
        "relu": lambda h: h.clamp(min=0),
        "relu2": lambda h: h.clamp(min=0) ** 2,
        "gelu": lambda h: h * 0.5 * (1 + torch.erf(h / 2**0.5)),
        # Hendrycks and Gimpel, arXiv 1606.08415, section 2
        "gelu_tanh": lambda h: h * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3))),
    }
    for activation, plain in plain_activations.items():
        config = ModelConfig(d_model=64, n_layers=1, activation=activation)
        mlp = MLP(config, config.d_ff, bias=False).double()
        torch.testing.assert_close(mlp(x), plain(x @ mlp.up.weight.T) @ mlp.down.weight.T, msg=activation)


def test_a_parallel_block_adds_both_branches_of_one_norm(tokens: Tensor) -> None:
    model = variant_of({"parallel": True}, n_layers=1)
    (block,), x = blocks(model), model.embedding(tokens) * model.embedding_multiplier
    positions = model.positions(tokens)
    normed = block.attention_norm(x)
    added = block.attention(normed, positions, model.attention_scale) + block.mlp(normed)
    expected = x + MULTIPLIERS.branch * added
    torch.testing.assert_close(block(x, positions, model.attention_scale, model.branch_multiplier), expected)


def test_qk_norm_bounds_the_logits_whatever_the_size_of_queries_and_keys(tokens: Tensor) -> None:
    model = variant_of({"qk_norm": True})
    before = model(tokens)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("query.weight"):
                parameter.mul_(100)
    torch.testing.assert_close(model(tokens), before, atol=1e-3, rtol=1e-3)


def test_a_tied_table_is_one_tensor_that_embeds_and_reads_out(tokens: Tensor) -> None:
    model = variant_of({"tied": True})
    assert model.readout.weight is model.embedding.weight
    assert "readout.weight" not in dict(model.named_parameters())
    before = model(tokens)
    with torch.no_grad():
        model.embedding.weight[3] += 1.0
    assert (model(tokens) - before)[..., 3].abs().min() > 0


@pytest.mark.parametrize("option", ["attention_dropout", "mlp_dropout", "embedding_dropout", "stochastic_depth"])
def test_what_is_dropped_is_dropped_in_training_only(option: str, tokens: Tensor) -> None:
    model, plain = variant_of({option: 0.4}), variant_of({})
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens), plain(tokens))
    model.train()
    torch.manual_seed(0)
    first = model(tokens)
    assert not torch.allclose(first, plain(tokens))
    assert not torch.equal(model(tokens), first)
    torch.manual_seed(0)
    assert torch.equal(model(tokens), first)


def test_stochastic_depth_leaves_whole_sequences_as_they_are_and_keeps_the_mean() -> None:
    config = ModelConfig(d_model=16, n_layers=2, context_length=4, positions="none", stochastic_depth=0.5)
    torch.manual_seed(0)
    model = Decoder(config).double()
    first, last = blocks(model)
    assert (first.drop, last.drop) == (0.0, 0.5)
    x = torch.randn(4000, 4, 16, dtype=torch.float64)[:1].expand(4000, -1, -1)
    scale, branch = model.attention_scale, model.branch_multiplier
    dropped = last(x, Positions(), scale, branch)
    untouched = (dropped == x).all(dim=(1, 2))
    assert 0.45 < untouched.double().mean() < 0.55
    whole = last.eval()(x[:1], Positions(), scale, branch)
    # The two branches are dropped together, so the second sees a first of twice its size: the mean is kept at first order.
    torch.testing.assert_close(dropped.mean(0), whole[0], atol=0.15, rtol=0)


def test_label_smoothing_and_z_loss_equal_their_formulas(tokens: Tensor) -> None:
    model = variant_of({"label_smoothing": 0.1, "z_loss": 1e-2})
    logits = model(tokens[:, :-1]).detach().float().flatten(0, 1)
    target = nn.functional.one_hot(tokens[:, 1:].flatten(), 11) * 0.9 + 0.1 / 11
    log_z = logits.logsumexp(-1)
    expected = -(target * (logits - log_z[:, None])).sum(-1).mean() + 1e-2 * (log_z**2).mean()
    torch.testing.assert_close(training_loss(model, tokens).detach(), expected)
    plain = variant_of({})
    assert torch.equal(training_loss(plain, tokens), next_token_loss(plain, tokens))


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(model: Decoder, tokens: Tensor) -> None:
    nn.init.zeros_(model.readout.weight)
    assert next_token_loss(model, tokens).item() == pytest.approx(math.log(CONFIG.vocab_size), abs=1e-6)


def test_the_loss_is_about_the_next_token() -> None:
    class Successor(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return 100.0 * nn.functional.one_hot(tokens + 1, num_classes=20).float()

    ascending = torch.arange(3, 12).unsqueeze(0)
    assert float(sequence_loss(Successor(), ascending)) == pytest.approx(0, abs=1e-6)
    assert float(sequence_loss(Successor(), ascending.flip(1))) == pytest.approx(100, abs=1e-4)


def test_weights_are_saved_without_multipliers(model: Decoder) -> None:
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
