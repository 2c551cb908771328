"""A pass on fake tensors takes the memory that a real one takes, of any family, and the decoder's own estimate agrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.families import build, family_of, load
from proxy_models.architecture.family import Family
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.adafactor import Adafactor
from proxy_models.training.optimizer import make_optimizer
from proxy_models.training.traced_memory import checkpoint_bytes, traced_evaluation, traced_memory
from tests.proxy_models.families import TRANSFORMERS, Block, Network, Recurrent, Stacked
from tests.proxy_models.peak_memory import peak_bytes
from tests.quick import quick_and_soak

SEQUENCES, SIZES = 8, {"vocab_size": 256, "context_length": 16}


@pytest.mark.parametrize("name", ["recurrent", "Qwen3Config", "GPT2Config"])
def test_a_trace_is_what_a_real_pass_has_at_its_peak(name: str) -> None:
    family: Family
    if name == "recurrent":
        family = Recurrent(**SIZES)
    else:
        pytest.importorskip("transformers")
        family = load(f"transformers:{name}")(**TRANSFORMERS[name], **SIZES)
    member = family.member(64, 5)
    model = build(member)
    tokens = torch.zeros(SEQUENCES, 17, dtype=torch.int64)

    def one_pass() -> None:
        family.training_loss(model, tokens).backward()  # type: ignore[no-untyped-call]

    one_pass()  # from here on there are gradients to add to
    traced = traced_memory(member, micro_batch=SEQUENCES)
    assert 1.0 <= traced.activations / peak_bytes(one_pass) < 1.15
    assert (traced.gathered, traced.reduced) == (0, 0)
    assert traced.parameters == traced.gradients == sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        evaluated = peak_bytes(lambda: family.evaluation_loss(model, tokens))
    pass_bytes = traced_evaluation(member, SEQUENCES, traced, "fp32") - traced.parameters - traced.optimizer
    assert 1.0 <= pass_bytes / evaluated < 1.15


@pytest.mark.parametrize("family", [Recurrent(**SIZES), Stacked(**SIZES)])
def test_adafactor_s_state_is_what_it_keeps(family: Family) -> None:
    member = family.member(32, 2)
    model = build(member)
    optimizer = Adafactor([{"params": list(model.parameters()), "lr": 0.01, "weight_decay": 0.0}])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for kind, value in state.items() if kind != "step")
    assert traced_memory(member, micro_batch=1, optimizer="adafactor").optimizer == kept


@pytest.mark.parametrize("family", [Recurrent(**SIZES), Stacked(**SIZES)])
def test_soap_s_state_is_what_it_keeps(family: Family) -> None:
    member = family.member(32, 2)
    model, table = build(member), family.parametrization(member, member, optimizer="soap")
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=16, optimizer="soap").resolve(1600)
    optimizer = make_optimizer(model, table, recipe)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = sum(value.nbytes for state in optimizer.state.values() for kind, value in state.items() if kind != "step")
    assert traced_memory(member, micro_batch=1, optimizer="soap").optimizer == kept
    assert checkpoint_bytes(member, "soap") == 4 * member.n_params_total + kept


@pytest.mark.parametrize(
    "layout",
    quick_and_soak(
        [
            {},
            {"checkpointing": "full"},
            {"sharding": "full", "world_size": 4},
            {"sharding": "full", "world_size": 4, "precision": "bf16"},
            {"sharding": "zero2", "world_size": 4},
            {"sharding": "none", "world_size": 4},
        ],
        {"checkpointing": "full"},
        {"sharding": "full", "world_size": 4, "precision": "bf16"},
        {"sharding": "none", "world_size": 4},
    ),
)
def test_the_decoders_estimate_and_its_trace_agree(layout: dict[str, Any]) -> None:
    config = ModelConfig(d_model=512, n_layers=6, context_length=128)
    estimated, traced = (memory(config, micro_batch=8, **layout) for memory in (training_memory, traced_memory))
    assert traced.optimizer == estimated.optimizer
    assert 0.95 < traced.total / estimated.total < 1.35


class AttendingBlock(Block):
    """A recurrent layer, and causal attention whose scores are kept."""

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        stream = super().forward(stream, branch)
        scores = stream @ stream.mT
        mixed: Tensor = scores.tril().softmax(-1) @ stream
        return stream + branch * mixed


@dataclass(frozen=True, kw_only=True)
class Attending(Recurrent):
    """Networks of recurrent layers and attention."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.layers = nn.ModuleList(AttendingBlock(width) for _ in range(depth))
        return network


@pytest.mark.parametrize(("kind", "is_shortened"), [(Recurrent, True), (Attending, False)])
def test_a_long_recurrence_takes_what_shorter_sequences_take_and_attention_beside_it_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: type[Recurrent], *, is_shortened: bool
) -> None:
    member = kind(vocab_size=16, context_length=96).member(64, 1)
    contexts: set[int] = set()
    forward = Network.forward

    def seen(self: Network, tokens: Tensor) -> Tensor:
        contexts.add(tokens.shape[1])
        return forward(self, tokens)

    monkeypatch.setattr(Network, "forward", seen)
    found = []
    for many in (100, 1_000_000):
        contexts.clear()
        monkeypatch.setattr("proxy_models.training.traced_memory._MANY_OPERATORS", many)
        traced_memory.cache_clear()
        found.append((traced_memory(member, micro_batch=2), 96 in contexts))
    (short, whole_for_short), (whole, _) = found
    assert short == whole
    assert whole_for_short is not is_shortened


class Sampled(Network):
    """A network whose pass depends on the value of its output."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits if logits.sum().item() > 0 else -logits


@dataclass(frozen=True, kw_only=True)
class DependsOnValues(Family):
    """A family that has no trace."""

    readout = "head"
    blocks = "layers"

    def build(self, width: int, depth: int) -> Network:
        return Sampled(self.vocab_size, width, depth)


def test_a_pass_that_depends_on_values_has_no_trace() -> None:
    member = DependsOnValues(**SIZES).member(8, 1)
    assert family_of(member)
    with pytest.raises(ValueError, match="width 8, depth 1 of .*DependsOnValues can't be traced.*DataDependent"):
        traced_memory(member, micro_batch=1)
