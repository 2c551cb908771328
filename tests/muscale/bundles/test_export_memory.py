"""What reads a finished run holds a part of it in memory: peaks of processes of their own, against 96 MiB of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from muscale.full_runs.checkpoints import stored_weights
from muscale.full_runs.checkpoints.stored_weights import MODEL, RecordReader, alone, read_weights
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import parameter_shapes
from proxy_models.architecture.llama import write_llama
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.tensor_files import TensorFiles, write_tensors
from tests.muscale.gloo_ranks import processes

SHAPE = ModelConfig(d_model=512, n_layers=5, vocab_size=8192, context_length=32)  # the largest tensor is a sixth of it
WEIGHTS = 4 * SHAPE.n_params_total / 2**20  # MiB


def stream_into_files(folder: Path) -> None:
    stored_weights.READ_BYTES = 1 << 20  # or one larger tensor
    shapes = parameter_shapes(SHAPE)
    stored = RecordReader(folder / "checkpoint").stream({f"{MODEL}.{name}": shape for name, shape in shapes.items()})
    write_tensors(folder / "w.safetensors", shapes, ((name.removeprefix("model."), tensor) for name, tensor in stored))


def export(folder: Path) -> None:
    multipliers = ForwardMultipliers(embedding=2.0, branch=0.5, readout=1.0, attention=0.25)
    weights = TensorFiles(folder / "w.safetensors")
    write_llama(SHAPE, multipliers, weights, folder / "llama", None, max_file_bytes=2 << 24)


def read_a_checkpoint(folder: Path) -> None:
    weights = read_weights(folder / "checkpoint", parameter_shapes(SHAPE))
    Decoder.with_weights(SHAPE, weights)(torch.zeros(1, 8, dtype=torch.long))


def _peak(do: Callable[[Path], None], folder: Path, results: Connection) -> None:
    """Send the peak of this process's memory above what it had before, in MiB; the peak of its past is forgotten first."""

    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))

    torch.set_num_threads(1)
    parameter_shapes(replace(SHAPE, n_layers=1))  # whatever is imported or made once
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    do(folder)
    results.send(status("VmHWM") - before)


def peak(do: Callable[[Path], None], folder: Path) -> float:
    here, there = processes.Pipe()
    process = processes.Process(target=_peak, args=(do, folder, there), daemon=True)
    process.start()
    there.close()
    try:
        return float(here.recv())
    finally:
        process.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("run")
    weights = {name: torch.rand(shape.shape) for name, shape in parameter_shapes(SHAPE).items()}
    with alone():
        save({MODEL: weights}, checkpoint_id=folder / "checkpoint")
    return folder


def test_streams_hold_a_few_tensors_and_an_evaluation_the_weights_once(folder: Path) -> None:
    assert WEIGHTS > 90
    assert peak(stream_into_files, folder) < 0.8 * WEIGHTS
    assert peak(export, folder) < 0.8 * WEIGHTS
    assert len(list((folder / "llama").glob("model-*.safetensors"))) > 2
    assert WEIGHTS < peak(read_a_checkpoint, folder) < 1.6 * WEIGHTS
    found, written = read_weights(folder / "checkpoint", parameter_shapes(SHAPE)), TensorFiles(folder / "w.safetensors")
    assert all(torch.equal(found[name], written[name]) for name in found)
