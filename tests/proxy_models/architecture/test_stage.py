"""Stages of a model, one after the other, are the model: for the decoder's variants and for families that know nothing of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import build, family_of, load
from proxy_models.architecture.family import Family, FamilyError
from proxy_models.architecture.member import Member
from proxy_models.architecture.stage import Edges, Stage, edges_of, joined
from tests.proxy_models.families import TRANSFORMERS, Network, Recurrent, Stacked

CPU = torch.device("cpu")
DECODER = ModelConfig(d_model=32, n_layers=4, head_dim=8, context_length=32, z_loss=1e-3)
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {"queries_per_kv": 2, "qk_norm": True},
    "learned": {"positions": "learned", "biases": True, "norm": "layernorm"},
    "alibi": {"positions": "alibi", "parallel": True},
    "documents": {"document_separator": 3},
}


def of_transformers(name: str) -> Member:
    arguments = {**TRANSFORMERS[name], "tie_word_embeddings": False}
    return load(f"transformers:{name}")(vocab_size=256, context_length=32, **arguments).member(32, 4)


MEMBERS: dict[str, Any] = {
    **{name: lambda variant=variant: replace(DECODER, **variant) for name, variant in VARIANTS.items()},
    "recurrent": lambda: Recurrent(vocab_size=256, context_length=32).member(32, 4),
    "convolutions": lambda: Stacked(vocab_size=256, context_length=32).member(32, 4),
    **{name: lambda name=name: of_transformers(name) for name in TRANSFORMERS},
}


def cut(member: Member) -> tuple[nn.Module, Edges, list[Stage]]:
    """A model with values, and stages of blocks 0, 1 to 2 and 3 with the same values."""
    family, whole = family_of(member), build(member)
    edges = edges_of(member)
    with torch.device("meta"):
        stages = [
            Stage(build(member), family, blocks, edges, device=CPU) for blocks in (range(1), range(1, 3), range(3, 4))
        ]
    for stage in stages:
        stage.model.to_empty(device=CPU)
        for name, buffer in stage.model.named_buffers():
            buffer.copy_(whole.get_buffer(name))
        loaded = stage.model.load_state_dict(whole.state_dict(), strict=False)
        assert not loaded.missing_keys
    return whole, edges, stages


@pytest.mark.parametrize("name", MEMBERS)
def test_stages_one_after_the_other_have_the_loss_and_gradients_of_the_model(name: str) -> None:
    member: Member = MEMBERS[name]()
    whole, edges, stages = cut(member)
    family, sequences = family_of(member), torch.randint(0, 256, (2, 33))
    expected = family.training_loss(whole, sequences)
    expected.backward()  # type: ignore[no-untyped-call]
    stream: Tensor = sequences
    for stage in stages:
        stream = stage(stream, sequences)
    torch.testing.assert_close(stream, expected[None])
    assert edges.stream.shape == (1, 32, 32)
    stream.backward()  # type: ignore[no-untyped-call]
    of_stages = dict(joined(stages).named_parameters())
    assert of_stages.keys() == dict(whole.named_parameters()).keys()
    for parameter, value in whole.named_parameters():
        torch.testing.assert_close(of_stages[parameter].grad, value.grad)


def test_a_stage_has_its_blocks_and_the_edge_that_it_is_at() -> None:
    _, _, (first, middle, last) = cut(replace(DECODER, positions="learned"))
    names = [{name.split(".")[0] for name, _ in stage.model.named_parameters()} for stage in (first, middle, last)]
    assert names == [{"embedding", "position", "blocks"}, {"blocks"}, {"blocks", "final_norm", "readout"}]
    assert {name.split(".")[1] for name, _ in middle.model.named_parameters()} == {"1", "2"}


class PositionsForEveryBlock(Recurrent):
    """Networks whose blocks all read a parameter that lies outside of them."""

    def build(self, width: int, depth: int) -> Network:
        class Reading(Network):
            def forward(self, tokens: Tensor) -> Tensor:
                stream = self.symbols(tokens)
                for layer in self.layers:
                    stream = layer(stream, self.symbols.weight.mean())
                return cast(Tensor, self.head(self.norm(stream)))

        return Reading(self.vocab_size, width, depth)


class BetweenBlocks(Recurrent):
    """Networks that scale the stream between their blocks, by a parameter outside of them."""

    def build(self, width: int, depth: int) -> Network:
        class Scaling(Network):
            def forward(self, tokens: Tensor) -> Tensor:
                stream = self.symbols(tokens)
                for layer in self.layers:
                    stream = layer(1.5 * stream, self.branch_multiplier)
                return cast(Tensor, self.head(self.norm(stream)))

        return Scaling(self.vocab_size, width, depth)


class Skipping(Recurrent):
    """Networks whose last block also reads what the first returned."""

    def build(self, width: int, depth: int) -> Network:
        class Skip(Network):
            def forward(self, tokens: Tensor) -> Tensor:
                first = stream = self.layers[0](self.symbols(tokens), self.branch_multiplier)
                for layer in self.layers[1:]:
                    stream = layer(stream, self.branch_multiplier)
                return cast(Tensor, self.head(self.norm(stream + first)))

        return Skip(self.vocab_size, width, depth)


class Tied(Recurrent):
    """Networks whose readout is the table."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.head.weight = network.symbols.weight
        return network


@pytest.mark.parametrize("kind", [PositionsForEveryBlock, BetweenBlocks, Skipping, Tied])
def test_a_model_that_can_not_be_cut_between_blocks_is_refused(kind: type[Family]) -> None:
    family = kind(vocab_size=256, context_length=32)
    with pytest.raises(FamilyError, match=kind.__name__):
        edges_of(family.member(32, 2))
