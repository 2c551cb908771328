"""The planted laws by which plans are made, and a corpus for them."""

from __future__ import annotations

import pytest

from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from scaling import HorizonLaw, ScalingFit
from tests.muscale.planted import planted_fit, planted_horizon


@pytest.fixture(scope="module")
def law() -> ScalingFit:
    return planted_fit()


@pytest.fixture(scope="module")
def horizon() -> HorizonLaw:
    return planted_horizon()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """45,000 training tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number in range(10):
        (folder / "text" / f"{number}.txt").write_text(f"{number} " * 2500)
    return write_corpus(folder / "written", str(folder / "text"))
