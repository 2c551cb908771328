from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proxy_models.config import ModelConfig
from proxy_models.decoder import Decoder, next_token_loss, rotary_angles, rotate
from proxy_models.parametrization import ForwardMultipliers

CONFIG = ModelConfig(d_model=32, n_layers=2, vocab_size=11, context_length=12)
MULTIPLIERS = ForwardMultipliers(embedding=1.3, branch=0.6, readout=0.4, attention=0.35)
Array = NDArray[np.float64]


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIG).double()
    model.set_multipliers(MULTIPLIERS)
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
    angles = rotary_angles(64, 16).double()

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


def test_the_forward_pass_is_the_plain_statement_of_it(model: Decoder, tokens: Tensor) -> None:
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    expected = np.stack([plain_logits(weights, row) for row in tokens.tolist()])
    # Float32 cosines and sines of torch and numpy differ in their last bit; all else is double.
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=0, atol=1e-6)


def test_a_shorter_input_gives_the_same_first_logits(model: Decoder, tokens: Tensor) -> None:
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(model: Decoder, tokens: Tensor) -> None:
    nn.init.zeros_(model.readout.weight)
    assert next_token_loss(model, tokens).item() == pytest.approx(math.log(CONFIG.vocab_size), abs=1e-6)


def test_the_loss_is_about_the_next_token() -> None:
    class Successor(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return 100.0 * nn.functional.one_hot(tokens + 1, num_classes=20).float()

    ascending = torch.arange(3, 12).unsqueeze(0)
    assert float(next_token_loss(Successor(), ascending)) == pytest.approx(0, abs=1e-6)
    assert float(next_token_loss(Successor(), ascending.flip(1))) == pytest.approx(100, abs=1e-4)


def test_weights_are_saved_without_multipliers(model: Decoder) -> None:
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
