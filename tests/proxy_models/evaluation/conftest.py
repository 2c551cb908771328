"""A small trained model, as measures see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import build
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_mixture
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import Source
from proxy_models.evaluation.measure import Subject
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize
from proxy_models.training.trainer import SegmentResult, Trainer

GROUPED = ModelConfig(d_model=32, n_layers=3, context_length=32, head_dim=8, queries_per_kv=2)


def numerics_of(model: Member, corpus: Corpus, *, sequences: int = 40) -> Numerics:
    return Numerics(
        model=model,
        base=model,
        corpus_key=corpus.key,
        seed=0,
        evaluation_tokens=sequences * model.context_length,
        stages_by_fraction=corpus.stages_by_fraction,
    )


def trained(
    numerics: Numerics, corpus: Corpus, n_steps: int, *, rate: float = 0.01, sequences: int = 4
) -> tuple[Subject, SegmentResult]:
    """Train a model of the built-in decoder or a custom family, with its multipliers."""
    batch = sequences * numerics.model.context_length
    hyperparameters = Hyperparameters(learning_rate=rate, batch_tokens=batch, schedule="linear")
    (segment,) = chain(hyperparameters, n_steps * batch)
    result = Trainer(corpus, compile=False).train(numerics, segment)
    assert result.state is not None
    model = build(numerics.model)
    initialize(model, numerics.parametrization("adamw"), segment.recipe, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(result.state.tensors[f"weight/{name}"])
    return Subject(model=model.eval(), numerics=numerics, text=corpus, tokens=segment.end), result


@pytest.fixture(scope="session")
def once_trained(corpus: Corpus) -> tuple[Subject, SegmentResult]:
    return trained(numerics_of(GROUPED, corpus), corpus, 40)


@pytest.fixture
def subject(once_trained: tuple[Subject, SegmentResult]) -> Subject:
    """A model with grouped-query heads, which a test may change."""
    kept, _ = once_trained
    model = build(kept.numerics.model)
    model.load_state_dict(kept.model.state_dict())
    for name, buffer in kept.model.named_buffers():
        model.get_buffer(name).copy_(buffer)
    return replace(kept, model=model.eval())


@pytest.fixture(scope="session")
def mixed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("mixed")
    (root / "digits").mkdir()
    for number in range(40):
        (root / "digits" / f"{number}.txt").write_text(" ".join(str(number * n) for n in range(200)))
    sources = {"words": Source(path=corpus.manifest["source"]["path"]), "digits": Source(path=str(root / "digits"))}
    return write_mixture(
        root / "tokens", sources, Mixture.constant({"words": 0.75, "digits": 0.25}), validation_fraction=0.25
    )


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights and buffers."""
    return {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def assert_unchanged(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in snapshot(model).items():
        assert torch.equal(tensor, before[name]), name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
