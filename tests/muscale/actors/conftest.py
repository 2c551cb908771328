"""A worker of a micro-study, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muscale.actors.worker import Worker
from muscale.layout import CORPUS, LEDGER
from muscale.store.ledger import Ledger
from proxy_models.data.corpus_writing import write_corpus


@pytest.fixture
def worker(make_study: Callable[..., Path]) -> Worker:
    torch.set_num_threads(1)
    directory = make_study().parent
    write_corpus(directory / CORPUS, str(directory / "text"))
    return Worker(Ledger(directory / LEDGER), compiled=False)
