from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import SegmentResult, Trainer


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "grouped": {"queries_per_kv": 2, "qk_norm": True},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "biases": True, "tied": True},
    "neox": {"norm": "layernorm", "activation": "gelu", "rotary_fraction": 0.25, "biases": True, "parallel": True},
    "alibi": {"positions": "alibi", "activation": "relu2", "mlp_ratio": 4.0},
    "palm": {"parallel": True, "tied": True, "queries_per_kv": 2, "norm": "layernorm", "qk_norm": True},
    "blind": {"positions": "none", "activation": "relu", "norm": "layernorm", "biases": True},
}
"""Sets of options in which every value of every option stands at least once."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `variant` is run with each of them."""
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))


def write_text_files(folder: Path, *, n_files: int = 24, n_words: int = 500) -> None:
    """Files of words that follow each other by a rule, so that there is something to learn."""
    generator = np.random.default_rng(0)
    words = ["loss", "width", "depth", "token", "batch", "rate", "scale", "step", "norm", "head"]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n_files):
        jumps = generator.integers(1, 3, size=n_words).cumsum()
        text = " ".join(words[jump % len(words)] for jump in jumps)
        (folder / f"{number:02}.txt").write_text(text + "\n")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("corpus")
    write_text_files(root / "text")
    return write_corpus(root / "tokens", str(root / "text"), validation_fraction=0.25)


@pytest.fixture(scope="session")
def family() -> ModelFamily:
    return ModelFamily(base=ModelConfig(d_model=32, n_layers=2, context_length=32))


@pytest.fixture
def trainer(corpus: Corpus) -> Trainer:
    return Trainer(corpus, compile=False)


@pytest.fixture
def numerics(family: ModelFamily, corpus: Corpus) -> Numerics:
    return Numerics(model=family.base, base=family.base, corpus_key=corpus.key, seed=0, evaluation_tokens=16 * 32)


@pytest.fixture
def hyperparameters() -> Hyperparameters:
    return Hyperparameters(learning_rate=0.01, batch_tokens=4 * 32)


@pytest.fixture
def assert_same() -> Callable[[SegmentResult, SegmentResult], None]:
    """Compares states and losses bit for bit."""

    def assert_same(one: SegmentResult, other: SegmentResult) -> None:
        assert one.state is not None
        assert other.state is not None
        assert one.state.tokens == other.state.tokens
        assert one.state.tensors.keys() == other.state.tensors.keys()
        for name, tensor in one.state.tensors.items():
            # a guard's gaps are NaN
            actual, expected = (t.nan_to_num(nan=-1.0) for t in (tensor, other.state.tensors[name]))
            assert torch.equal(actual, expected), name
        assert (one.loss, one.averaged_loss) == (other.loss, other.averaged_loss)

    return assert_same
