"""The state of routers goes where weights go: checkpoints, evaluations, averages, states of proxies, text."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh

from muscale import StageError
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint, subject_at
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, PARAMETRIZATION, write_manifest
from muscale.full_runs.checkpoints.stored_weights import RecordReader
from muscale.full_runs.distributed import process_group
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from proxy_models.architecture.config import as_decoder
from proxy_models.evaluation.samples import Samples
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from tests.muscale.forked_ranks import BATCH, STEPS, rows, small_corpus, small_run
from tests.muscale.gloo_ranks import GlooRanks

STATE = "blocks.0.mlp.router.balance_bias"


def of_experts(folder: Path, directory: Path) -> FullRun:
    run = small_run(
        small_corpus(folder),
        directory,
        segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * STEPS),
        evaluate_every_tokens=BATCH * 6,
        min_unit_params=0,
    )
    sizes = {"n_experts": 8, "expert_ratio": 0.5, "n_shared_experts": 1, "balance_rate": 0.05}
    model, base = (replace(as_decoder(one), **sizes) for one in (run.numerics.model, run.numerics.base))  # type: ignore[arg-type]
    return replace(run, numerics=replace(run.numerics, model=model, base=base))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    folder = tmp_path_factory.mktemp("experts")
    run = of_experts(folder / "corpus", folder / "run")
    train(run)
    return run


def without_state(checkpoint: Path, to: Path) -> Path:
    """An older checkpoint: the same tensors but the state of the router."""
    shapes = {name: shape for name, shape in RecordReader(checkpoint).shapes().items() if not name.endswith(STATE)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_sharded(dict(RecordReader(checkpoint).stream(shapes)), checkpoint_id=to)
    shutil.copyfile(checkpoint / PARAMETRIZATION, to / PARAMETRIZATION)
    write_manifest(to, {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in to.iterdir()})
    return to


def test_an_evaluation_reads_the_state_and_measures_what_the_run_measured(
    trained: FullRun, tmp_path: Path, gloo_ranks: GlooRanks
) -> None:
    last = rows(trained)[-1]
    found = evaluate_checkpoint(trained.directory, [Samples(prompts=("abc",), n_tokens=8)])
    assert found.val_loss == pytest.approx(last["val_loss"], rel=1e-6)
    subject, _ = subject_at(trained.directory)
    assert subject.model.get_buffer(STATE).abs().max() > 0.04
    subject.model.get_buffer(STATE).copy_(torch.linspace(-1, 1, 8))
    other = evaluate_checkpoint(trained.directory).val_loss
    assert other == found.val_loss, "each evaluation reads the state anew"
    assert gloo_ranks.call(_evaluate, trained.directory, world_size=2) == [pytest.approx(found.val_loss, rel=1e-6)] * 2


def _evaluate(directory: Path) -> float:
    with process_group(torch.device("cpu"), timeout=timedelta(seconds=60), records=directory):
        return evaluate_checkpoint(directory, mesh=init_device_mesh("cpu", (2,))).val_loss or 0.0


def test_a_checkpoint_without_the_state_is_refused_by_name(trained: FullRun) -> None:
    newest = trained.directory / CHECKPOINTS / f"tokens={trained.n_tokens}"
    with pytest.raises(StageError, match=STATE):
        evaluate_checkpoint(without_state(newest, newest.with_name("tokens=1")))
