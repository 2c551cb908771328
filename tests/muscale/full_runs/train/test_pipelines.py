"""Every schedule of a pipeline trains to the losses and norms of one process, in every layout of its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.stage_layout import PipelineSchedule
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from tests.muscale.conftest import write_text
from tests.muscale.forked_ranks import BATCH, interrupt, rows
from tests.muscale.gloo_ranks import GlooRanks

STEPS = 4
MakeRun = Callable[..., FullRun]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", documents=30, words=200)
    return write_corpus(folder / "tokens", str(folder / "text"))


@pytest.fixture
def make_run(corpus: Corpus, tmp_path: Path) -> MakeRun:
    def make(values: dict[str, Any] | None = None, numerics: dict[str, Any] | None = None, **variant: Any) -> FullRun:
        model, base = (
            ModelConfig(**{"d_model": width, "n_layers": 5, "head_dim": 8, "context_length": 32} | variant)
            for width in (32, 16)
        )
        recipe = {"learning_rate": 0.01, "batch_tokens": BATCH, "warmup_fraction": 0.2, "clip_norm": 0.3} | (
            values or {}
        )
        of = {"model": model, "base": base, "corpus_key": corpus.key, "seed": 0, "evaluation_tokens": 32 * 35}
        return FullRun(
            numerics=Numerics(**of | (numerics or {})),
            segments=chain(Hyperparameters(**recipe), BATCH * STEPS),
            directory=tmp_path / "run",
            corpus=corpus.folder,
            checkpoint_every_tokens=BATCH * 2,
            evaluate_every_tokens=BATCH * 2,
            min_unit_params=0,
        )

    return make


def figures(run: FullRun) -> list[float]:
    """Losses and norms of every step, and the validation losses after them."""
    found = rows(run)
    return [row[name] for name in ("train_loss", "grad_norm", "val_loss") for row in found if name in row]


def layout(schedule: PipelineSchedule = "1f1b", **other: Any) -> Parallelism:
    return Parallelism(**{"sharding": "none", "pipeline_parallel": 2, "pipeline_schedule": schedule} | other)


LAYOUTS = {
    "plain": (2, {}),
    "zero2": (4, {"sharding": "zero2"}),
    "full": (4, {"sharding": "full"}),
    "tensor": (4, {"tensor_parallel": 2}),
    "full, tensor": (8, {"sharding": "full", "tensor_parallel": 2}),
}


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
@pytest.mark.parametrize("spread", LAYOUTS)
def test_a_schedule_has_the_figures_of_one_process(
    make_run: MakeRun, gloo_ranks: GlooRanks, schedule: PipelineSchedule, spread: str
) -> None:
    whole = make_run(qk_norm=True, queries_per_kv=2, z_loss=1e-3, label_smoothing=0.1)
    train(whole)
    ranks, other = LAYOUTS[spread]
    run = replace(
        whole, directory=whole.directory.with_name("staged"), parallelism=layout(schedule, **other), micro_batch=1
    )
    gloo_ranks.train(run, ranks)
    np.testing.assert_allclose(figures(run), figures(whole), rtol=2e-6)
    interrupt(run, after=2)
    assert train(replace(run, parallelism=Parallelism()))["resumed_from"] == BATCH * 2
    np.testing.assert_allclose(figures(run), figures(whole), rtol=2e-6)
