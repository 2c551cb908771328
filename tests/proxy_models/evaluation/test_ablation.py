"""Ablation: each increase is that of a model without the component, and the model stays as it was."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import build, load
from proxy_models.architecture.family import FamilyError
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.ablation import Ablation
from proxy_models.evaluation.held_out_loss import HeldOutLoss, HeldOutLosses, HeldOutSequences
from proxy_models.evaluation.measure import Score, Subject
from tests.proxy_models.evaluation.conftest import GROUPED, assert_unchanged, numerics_of, snapshot
from tests.proxy_models.families import TRANSFORMERS, Network, Recurrent

LAYERS, HEADS = Ablation(), Ablation(parts="heads")


def loss_of(subject: Subject) -> float:
    return HeldOutLoss().measure(subject).scores[0].value


def increases(measure: Ablation, subject: Subject) -> dict[str, Score]:
    before = snapshot(subject.model)
    whole, *scores = measure.measure(subject).scores
    assert_unchanged(subject.model, before)
    assert (whole.name, whole.metric, whole.value) == ("", "loss", loss_of(subject))
    assert {score.metric for score in scores} == {"loss_increase"}
    return {score.name: score for score in scores}


def test_a_layer_s_increase_is_that_of_the_model_without_it(subject: Subject) -> None:
    found, whole = increases(LAYERS, subject), loss_of(subject)
    assert list(found) == ["layer 0", "layer 1", "layer 2"]
    decoder = cast(Decoder, subject.model)
    blocks = list(decoder.blocks)
    for layer in range(3):
        decoder.blocks = nn.ModuleList(block for number, block in enumerate(blocks) if number != layer)
        assert found[f"layer {layer}"].value == pytest.approx(loss_of(subject) - whole, abs=1e-6)
        assert found[f"layer {layer}"].standard_error
    assert found["layer 0"].value > 0


def test_a_head_s_increase_is_that_of_an_output_without_its_columns(subject: Subject) -> None:
    found, whole = increases(HEADS, subject), loss_of(subject)
    assert len(found) == 3 * 4
    weight = subject.model.get_parameter("blocks.1.attention.output.weight")
    kept = weight.detach().clone()
    for head in range(4):
        with torch.no_grad():
            weight.copy_(kept)
            weight[:, 8 * head : 8 * (head + 1)] = 0
        assert found[f"layer 1, head {head}"].value == pytest.approx(loss_of(subject) - whole, abs=1e-6)


def test_components_that_add_nothing_can_go(subject: Subject) -> None:
    with torch.no_grad():
        for name in ("attention.output", "mlp.down"):
            subject.model.get_parameter(f"blocks.1.{name}.weight").zero_()
    layer = increases(LAYERS, subject)["layer 1"]
    assert (layer.value, layer.standard_error) == (0.0, 0.0)
    heads = increases(HEADS, subject)
    assert {heads[f"layer 1, head {head}"].value for head in range(4)} == {0.0}


def test_a_custom_family_s_layers_are_ablated_and_its_heads_are_not_known(corpus: Corpus) -> None:
    member = Recurrent(vocab_size=256, context_length=16).member(16, 2)
    subject = Subject(model=build(member), numerics=numerics_of(member, corpus), text=corpus, tokens=0)
    assert list(increases(LAYERS, subject)) == ["layer 0", "layer 1"]
    with pytest.raises(ValueError, match="heads"):
        HEADS.measure(subject)


def test_a_model_of_transformers_is_ablated_by_layers(corpus: Corpus) -> None:
    pytest.importorskip("transformers")
    family = load("transformers:LlamaConfig")(vocab_size=256, context_length=16, **TRANSFORMERS["LlamaConfig"])
    member = family.member(32, 2)
    torch.manual_seed(0)
    subject = Subject(model=build(member), numerics=numerics_of(member, corpus), text=corpus, tokens=0)
    before = [len(module._forward_hooks) for module in subject.model.modules()]
    scores = LAYERS.measure(subject).scores
    assert [score.name for score in scores] == ["", "layer 0", "layer 1"]
    assert all(score.value for score in scores)
    assert [len(module._forward_hooks) for module in subject.model.modules()] == before


class Swapped(nn.Module):
    """A block whose first input is not the stream."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        return cast(Tensor, self.block(stream, branch))


class SwappedNetwork(Network):
    """A network of such blocks."""

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.layers = nn.ModuleList(map(Swapped, self.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.symbols(tokens)
        for layer in self.layers:
            stream = layer(self.branch_multiplier, stream)
        return cast(Tensor, self.head(self.norm(stream)))


def test_a_block_of_another_signature_is_refused_and_an_error_leaves_no_hook(corpus: Corpus) -> None:
    member = Recurrent(vocab_size=256, context_length=16).member(16, 1)
    model = SwappedNetwork(256, 16, 1)
    subject = Subject(model=model, numerics=numerics_of(member, corpus), text=corpus, tokens=0)
    before = snapshot(model)
    with pytest.raises(FamilyError):
        LAYERS.measure(subject)
    assert_unchanged(model, before)


def test_after_an_interruption_only_the_rest_is_measured(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = HEADS.measure(subject)
    kept, measure_losses, calls = replace(subject, progress=tmp_path), HeldOutSequences.losses, []

    def stop_at_the_sixth(held_out: HeldOutSequences) -> HeldOutLosses:
        calls.append(held_out)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return measure_losses(held_out)

    monkeypatch.setattr(HeldOutSequences, "losses", stop_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        HEADS.measure(kept)
    (file,) = tmp_path.iterdir()
    assert file.stem == HEADS.key
    with file.open("a") as torn:
        torn.write('{"name": "layer 1, he')
    assert HEADS.measure(kept) == expected
    assert len(calls) == 6 + 1 + 12 - 4
    assert HEADS.measure(kept) == expected
    assert len(calls) == 6 + 1 + 12 - 4 + 1


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="parts"):
        Ablation(parts="neurons")  # type: ignore[arg-type]


def test_the_measure_is_picklable_and_its_key_holds_its_parts() -> None:
    assert GROUPED.n_kv_heads == 2
    assert pickle.loads(pickle.dumps(HEADS)) == HEADS
    assert HEADS.key != LAYERS.key
