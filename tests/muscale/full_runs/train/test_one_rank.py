"""One FSDP2 rank in this process: what it can't train is refused by name, and all else has the losses of the lean loop."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muscale.full_runs.train.one_rank import require_shardable
from proxy_models.architecture.family import Family, FamilyError
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from tests.proxy_models.families import Network, Recurrent


@dataclass(frozen=True, kw_only=True)
class WithScalar(Recurrent):
    """A gain without a dimension in the last block."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.layers[-1].scale = nn.Parameter(torch.tensor(0.0))
        return network

    def tensor_classes(self, width: int, depth: int) -> dict[str, str]:
        return {f"layers.{depth - 1}.scale": "block_bias"}


@dataclass(frozen=True, kw_only=True)
class WithSharedLayer(Recurrent):
    """One recurrent layer in all blocks."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        for block in network.layers:
            block.layer = network.layers[0].layer
        return network


class PositionsByWeight(Network):
    """The weight of a table is read, and the table is not called."""

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.positions = nn.Embedding(32, width)
        self.symbols.register_forward_hook(
            lambda _module, _inputs, output: self.positions.weight[: output.shape[1]] + output
        )


@dataclass(frozen=True, kw_only=True)
class ByWeight(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        return PositionsByWeight(self.vocab_size, width, depth)


class Multiplied(Network):
    """Logits are multiplied by a buffer of the width."""

    factor: Tensor

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.register_buffer("factor", torch.tensor(width / 32))
        self.head.register_forward_hook(lambda _module, _inputs, output: self.factor * output)


@dataclass(frozen=True, kw_only=True)
class OfTheLeastWidth(Recurrent):
    """A full run has the constants of another width."""

    def build(self, width: int, depth: int) -> Network:
        return Multiplied(self.vocab_size, width, depth)

    def constants(self, width: int, depth: int) -> dict[str, Tensor]:
        return super().constants(self.width_step, depth)


@dataclass(frozen=True, kw_only=True)
class WithPlainTensor(Recurrent):
    """A tensor that is no buffer stays on the meta device, on which a full run builds it."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.norm.shift = shift = torch.ones(width)
        network.norm.register_forward_hook(lambda _module, _inputs, output: output + shift)
        return network


def require(of: type[Family], corpus: Corpus) -> None:
    family = of(vocab_size=256, context_length=32)
    numerics = Numerics(
        model=family.member(64, 2), base=family.member(32, 2), corpus_key=corpus.key, seed=0, evaluation_tokens=512
    )
    require_shardable(numerics, Hyperparameters(learning_rate=0.01, batch_tokens=128), corpus)


@pytest.mark.parametrize("of", [Recurrent, WithSharedLayer])
def test_a_family_with_the_losses_of_the_lean_loop_passes_and_leaves_no_trace(of: type[Family], corpus: Corpus) -> None:
    before = torch.random.get_rng_state()
    require(of, corpus)
    assert not dist.is_initialized()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (WithScalar, "layers.1.scale"),
        (ByWeight, "positions"),
        (WithPlainTensor, "norm.shift"),
        (OfTheLeastWidth, "OfTheLeastWidth"),
    ],
)
def test_what_a_full_run_can_t_train_is_refused_by_name(of: type[Family], name: str, corpus: Corpus) -> None:
    with pytest.raises(FamilyError) as refused:
        require(of, corpus)
    assert name in str(refused.value)
    assert not dist.is_initialized()
