"""A small full run, its corpus written once for each module."""

from __future__ import annotations

from pathlib import Path

import pytest

from muscale.full_runs.full_run import FullRun
from proxy_models.data.corpus import Corpus
from tests.muscale.forked_ranks import small_corpus, small_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> FullRun:
    return small_run(corpus, tmp_path / "run")
