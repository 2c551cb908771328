"""The loop on a CUDA device does what it does on the CPU, within rounding; what needs no device is tested without one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Block
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, chain, stem
from proxy_models.training.device import CPU, datasheet_flops, evaluation_batch, fitting_on, usable
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState, restore
from proxy_models.training.step import Stepper
from proxy_models.training.trainer import Trainer
from proxy_models.training.warm import WarmModel

BATCH = 4 * 32
ROUNDING = 1e-4
"""Relative, on losses of 20 steps in fp32. On the CPU other orders of the sums (micro-batches) change them by 3e-7, and with
Muon, which orthogonalizes in bf16, by 5e-6; a GPU's exponentials and roots differ besides."""


def dropping(numerics: Numerics) -> Numerics:
    model = replace(as_decoder(numerics.model), attention_dropout=0.1, mlp_dropout=0.1, stochastic_depth=0.2)
    return replace(numerics, model=model, base=model)


def twenty_steps(optimizer: OptimizerName = "adamw", *, learning_rate: float = 0.01) -> Segment:
    values = Hyperparameters(
        learning_rate=learning_rate, batch_tokens=BATCH, optimizer=optimizer, schedule="cosine", warmup_fraction=0.2
    )
    (segment,) = chain(values, 20 * BATCH)
    return segment


@pytest.mark.parametrize("device", ["tpu", "mps", "meta"])
def test_another_kind_of_device_is_refused(corpus: Corpus, device: str) -> None:
    with pytest.raises(ValueError, match=f'device must be "cpu", "cuda" or "cuda:<number>", got \'{device}\''):
        Trainer(corpus, device=device)


@pytest.mark.parametrize(("n_devices", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_a_cuda_device_that_is_not_there_is_refused(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, n_devices: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    with pytest.raises(ValueError, match=f"device {device}: torch .* sees {n_devices} CUDA devices here"):
        Trainer(corpus, device=device)


def test_cuda_alone_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert usable("cuda") == torch.device("cuda", 1)
    assert usable("cuda:0") == torch.device("cuda", 0)
    assert usable("cpu:0") == usable(CPU) == CPU


def test_a_warm_model_is_on_its_device_as_a_whole(variant: dict[str, Any]) -> None:
    config = ModelConfig(d_model=32, n_layers=1, context_length=16, **variant)
    module = WarmModel(config, compiled=False, device=torch.device("meta")).module
    assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}


@pytest.mark.parametrize(("fused", "where"), [(True, "meta"), (None, "cpu")])
def test_moments_are_restored_on_their_parameter_s_device_and_the_step_where_the_optimizer_counts_it(
    fused: bool | None, where: str
) -> None:
    module = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.param_groups[0]["fused"] = fused
    saved = {"weight/weight": torch.ones(1, 2), "exp_avg/weight": torch.ones(1, 2), "step/weight": torch.tensor(3.0)}
    restore(module, optimizer, saved)
    state = optimizer.state[module.weight]
    assert {kind: tensor.device.type for kind, tensor in state.items()} == {"exp_avg": "meta", "step": where}


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_both_devices_start_alike_and_train_alike(corpus: Corpus, numerics: Numerics) -> None:
    cpu, cuda = (Trainer(corpus, device=device, compile=False) for device in ("cpu", "cuda"))
    expected, actual = (trainer.train(numerics, twenty_steps()) for trainer in (cpu, cuda))
    assert actual.curve.train_loss[0] == pytest.approx(expected.curve.train_loss[0], rel=1e-5)
    assert actual.curve.train_loss == pytest.approx(expected.curve.train_loss, rel=ROUNDING)
    assert actual.curve.grad_norm == pytest.approx(expected.curve.grad_norm, rel=10 * ROUNDING)
    assert actual.loss == pytest.approx(expected.loss, rel=ROUNDING)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_learn_like_fp32(corpus: Corpus, numerics: Numerics, precision: Any) -> None:
    trainer = Trainer(corpus, device="cuda", compile=False)
    exact, rounded = (trainer.train(replace(numerics, precision=p), twenty_steps()) for p in ("fp32", precision))
    assert rounded.curve.train_loss == pytest.approx(exact.curve.train_loss, rel=0.02)
    assert rounded.loss != exact.loss
    assert rounded.curve.train_loss[-1] < rounded.curve.train_loss[0] - 1


@pytest.mark.gpu
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(
    ("optimizer", "change"),
    [
        ("adamw", {}),
        ("adamw", {"random": True}),
        ("adamw", {"precision": "bf16"}),
        ("adamw", {"precision": "fp16"}),
        ("adamw", {"guard": GuardSettings(action="rewind", window=8, threshold=0.01, max_spikes=20, snapshot_every=3)}),
        ("lion", {}),
        ("adafactor", {}),
        ("muon", {}),
        ("lamb", {}),
        ("soap", {}),
    ],
    ids=["plain", "random", "bf16", "fp16", "guarded", "lion", "adafactor", "muon", "lamb", "soap"],
)
def test_resuming_from_disk_is_the_uninterrupted_run_under_deterministic_algorithms(
    corpus: Corpus, numerics: Numerics, tmp_path: Path, optimizer: OptimizerName, change: dict[str, Any]
) -> None:
    fields = {name: value for name, value in change.items() if name != "random"}
    numerics = replace(dropping(numerics) if "random" in change else numerics, **fields)
    whole = twenty_steps(optimizer, learning_rate=0.3 if numerics.guard else 0.003)
    first, second = (Trainer(corpus, device="cuda", compile=False) for _ in range(2))
    uninterrupted = first.train(numerics, whole)
    assert (len(uninterrupted.spikes) > 0) == bool(numerics.guard)
    half = first.train(numerics, replace(whole, end=7 * BATCH))
    assert half.state is not None
    half.state.save(tmp_path / "half.pt")
    resumed = second.train(numerics, replace(whole, start=7 * BATCH), TrainState.load(tmp_path / "half.pt"))
    assert resumed.state is not None
    assert uninterrupted.state is not None
    for name, tensor in uninterrupted.state.tensors.items():
        assert torch.equal(resumed.state.tensors[name].nan_to_num(nan=-1.0), tensor.nan_to_num(nan=-1.0)), name
    assert resumed.loss == uninterrupted.loss
    assert np.array_equal(
        np.concatenate([half.curve.train_loss, resumed.curve.train_loss]), uninterrupted.curve.train_loss
    )


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon", "lamb", "soap"])
@pytest.mark.parametrize(("begins", "ends"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_state_of_one_device_resumes_on_the_other(
    corpus: Corpus, numerics: Numerics, optimizer: OptimizerName, begins: str, ends: str
) -> None:
    whole = twenty_steps(optimizer, learning_rate=0.003)
    expected = Trainer(corpus, compile=False).train(numerics, whole)
    one, other = (Trainer(corpus, device=device, compile=False) for device in (begins, ends))
    half = one.train(numerics, replace(whole, end=7 * BATCH))
    assert half.state is not None
    assert {tensor.device.type for tensor in half.state.tensors.values()} == {"cpu"}
    result = other.train(numerics, replace(whole, start=7 * BATCH), half.state)
    assert result.loss == pytest.approx(expected.loss, rel=10 * ROUNDING if optimizer == "muon" else ROUNDING)


@pytest.mark.gpu
def test_no_step_waits_for_the_device(corpus: Corpus, numerics: Numerics) -> None:
    trainer = Trainer(corpus, device="cuda", compile=False)
    numerics = replace(dropping(numerics), precision="bf16")
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH).resolve(100 * BATCH)

    def waits(n_steps: int) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer.train(numerics, stem(recipe, n_steps * BATCH))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(warning.message) for warning in caught)

    waits(1)  # makes the model
    assert 0 < waits(96) - waits(32) < 16  # two more looks at 32 losses each


@pytest.mark.gpu
def test_the_caller_s_random_numbers_are_left_alone(corpus: Corpus, numerics: Numerics) -> None:
    before = torch.cuda.get_rng_state()
    Trainer(corpus, device="cuda", compile=False).train(dropping(numerics), twenty_steps())
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, expected: float | None) -> None:
    assert datasheet_flops(name, "bf16") == datasheet_flops(name, "fp16") == expected
    assert datasheet_flops(name, "fp32") is None


def test_evaluation_takes_no_more_sequences_than_training_on_a_gpu_and_always_as_many_on_a_cpu() -> None:
    cuda = torch.device("cuda", 0)
    assert [evaluation_batch(cuda, size) for size in (1, 3, 100)] == [1, 3, 64]
    assert [evaluation_batch(cuda, size, stages=8) for size in (1, 3, 100)] == [8, 24, 64]
    assert evaluation_batch(cuda, 1, stages=128) == 128, "a micro-batch for each rank"
    assert [evaluation_batch(CPU, size) for size in (None, 1, 100)] == [64, 64, 64]


def test_a_worker_s_share_of_a_gpu_bounds_its_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(d_model=64, n_layers=8)
    limit = training_memory(config, micro_batch=8, precision="bf16").total
    monkeypatch.setattr("proxy_models.training.device.memory_limit", lambda _: limit)
    whole, half = (fitting_on(torch.device("cuda", 0), config, 16, precision="bf16", share=share) for share in (1, 0.5))
    assert whole == (8, "none")
    assert half == (2, "none")
    assert fitting_on(CPU, config, 16, precision="bf16") == (None, "none")


def test_a_proxy_that_must_be_trained_in_parts_and_recomputed_has_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus, numerics: Numerics
) -> None:
    expected = Trainer(corpus, compile=False).train(numerics, twenty_steps())
    trainer, seen, step = Trainer(corpus, compile=False), [], Stepper.step

    def recorded(stepper: Stepper, *arguments: Any, **options: Any) -> Any:
        kinds = {block.checkpointing for block in stepper.module.modules() if isinstance(block, Block)}
        seen.append((stepper.micro_batch, *kinds))
        return step(stepper, *arguments, **options)

    monkeypatch.setattr(Stepper, "step", recorded)
    with monkeypatch.context() as patch:
        patch.setattr("proxy_models.training.trainer.fitting_on", lambda *_, **__: (3, "full"))
        actual = trainer.train(numerics, twenty_steps())
    assert actual.curve.train_loss == pytest.approx(expected.curve.train_loss, rel=ROUNDING)
    again = trainer.train(numerics, twenty_steps())
    assert again.curve.train_loss.tolist() == expected.curve.train_loss.tolist()
    assert seen == 20 * [(3, "full")] + 20 * [(None, "none")]
