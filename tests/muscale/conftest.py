"""A micro-study: every stage for real, in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MICRO = """
name = "micro"

[corpus]
source = "text"
evaluation_tokens = 2048

[model]
d_model = 32
n_layers = 1
context_length = 32

[hyperparameters]
learning_rate = 0.008
batch_tokens = 256

[check]
widths = [16, 32, 64, 128]

[sweep]
trials = 4
n_tokens = 16384
searcher = "random"
scheduler = "none"
rungs = 2

[sweep.space]
learning_rate = { distribution = "log_uniform", low = 0.004, high = 0.03 }
init_scale = { distribution = "log_uniform", low = 0.5, high = 2.0 }

[transfer]
widths = [16, 32, 64]
n_tokens = 16384
rates = 5
horizons = [0.5, 1.0]

[ladder]
stems = [
    { width = 16, n_tokens = 16384 },
    { width = 32, n_tokens = 16384 },
    { width = 48, n_tokens = 16384 },
    { width = 64, n_tokens = 32768 },
    { width = 80, n_tokens = 32768 },
]

[fit]
max_regret = 0.05

[plan]
compute_flops = 2.5e10

[promote]
checkpoint_every_tokens = 20480
evaluate_every_tokens = 102400
"""


def write_text(folder: Path, *, documents: int = 40, words: int = 600) -> None:
    """Text with something to learn: words from a small vocabulary, some far likelier than others."""
    generator = random.Random(0)
    vocabulary = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 7))) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    folder.mkdir(parents=True)
    for number in range(documents):
        chosen = generator.choices(vocabulary, weights, k=words)
        (folder / f"{number:03}.txt").write_text(" ".join(chosen))


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a micro-study into a folder of its own and returns its study file."""

    def make(name: str = "study") -> Path:
        directory = tmp_path / name
        write_text(directory / "text")
        path = directory / "study.toml"
        path.write_text(MICRO)
        return path

    return make


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray on this machine for all tests that need one."""
    from muscale.config import ResourceSettings
    from muscale.jobs import cluster

    with cluster(ResourceSettings()):
        yield
