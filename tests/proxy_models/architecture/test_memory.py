"""The estimate against what autograd and the optimizer really keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from proxy_models.architecture import memory
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, training_loss
from proxy_models.architecture.decoder_memory import (
    KEPT_APART,
    activation_bytes,
    evaluation_memory,
    fitting,
    training_memory,
)
from proxy_models.architecture.decoder_part import DecoderPart
from proxy_models.architecture.families import family_of
from proxy_models.architecture.memory import Checkpointing, Precision, Sharding, largest_micro_batch, least_memory
from proxy_models.architecture.parametrization import OptimizerName, parametrize
from proxy_models.architecture.pipeline_counts import PipelineShare
from proxy_models.architecture.stage_layout import PipelineSchedule
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training import soap
from proxy_models.training.fsdp import shard
from proxy_models.training.optimizer import make_optimizer
from proxy_models.training.precision import DTYPES
from tests.muscale.fake_ranks import rank_of
from tests.proxy_models.peak_memory import peak_bytes

SEQUENCES = 4


def kept_by_autograd(config: ModelConfig, precision: Precision, *, compiled: bool = False) -> int:
    """Bytes of the distinct storages that a forward pass keeps, weights and buffers left out."""
    model = Decoder(config)
    model.compute_dtype = DTYPES[precision]
    for block in model.blocks if compiled else ():
        block.compile(dynamic=False)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # held, so that its address is not given away again
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks:
        loss = training_loss(model, torch.zeros(SEQUENCES, config.context_length + 1, dtype=torch.int64))
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # dynamo and inductor warn about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_compiled_block_keeps_what_is_stated(activation: Any) -> None:
    one, two = (ModelConfig(d_model=64, n_layers=n, context_length=64, activation=activation) for n in (1, 2))

    def of_a_block(count: Callable[[ModelConfig], int]) -> int:
        return count(two) - count(one)

    # In fp32 weights have no copies; one norm scale of the block is kept with the weights.
    kept = of_a_block(partial(kept_by_autograd, precision="fp32", compiled=True))
    assert kept == of_a_block(lambda config: activation_bytes(config, SEQUENCES, compiled=True))
    eager = of_a_block(lambda config: activation_bytes(config, SEQUENCES))
    assert eager - kept == (4 * SEQUENCES * one.context_length * one.d_ff if activation == "swiglu" else 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(variant: dict[str, Any], precision: Precision) -> None:
    config = ModelConfig(d_model=64, n_layers=3, context_length=64, **variant)
    expected = activation_bytes(config, SEQUENCES, precision)
    expected += training_memory(config, micro_batch=SEQUENCES, precision=precision).gathered  # copies of the weights
    is_low = precision == "bf16"
    rms = 6 if is_low else 4  # unlike a GPU's fused one, a CPU's RMSNorm keeps its normalised input too, all in fp32
    if config.norm == "rmsnorm":
        n_norms = config.n_layers * (1 if config.parallel else 2) + 1
        expected += rms * SEQUENCES * config.context_length * config.d_model * n_norms
    if config.positions == "alibi":
        # Nor is a CPU's attention fused where a bias is added: it keeps its weights and its inputs, all in fp32.
        width, time = config.d_model, config.context_length
        copies = 3 * width if is_low else 0
        expected += SEQUENCES * time * config.n_layers * (4 * config.n_heads * time + 2 * copies)
        expected -= (6 if is_low else 4) * config.n_heads * time**2  # the bias is a buffer
    elif config.queries_per_kv > 1 and not is_low:  # a GPU's kernel takes a key and a value for each query head
        expected -= (
            SEQUENCES
            * config.context_length
            * config.n_layers
            * 8
            * config.head_dim
            * (config.n_heads - config.n_kv_heads)
        )
    if config.qk_norm:
        heads = config.n_heads + config.n_kv_heads
        expected += rms * SEQUENCES * config.context_length * heads * config.head_dim * config.n_layers
    assert kept_by_autograd(config, precision) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_window_keeps_what_whole_attention_keeps(precision: Precision) -> None:
    whole = ModelConfig(d_model=64, n_layers=2, context_length=64)
    window = replace(whole, attention_window=8, global_attention_every=2)
    assert kept_by_autograd(window, precision) == kept_by_autograd(whole, precision)
    assert activation_bytes(window, SEQUENCES, precision) == activation_bytes(whole, SEQUENCES, precision)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "lamb", "soap"])
def test_weights_gradients_and_moments_are_those_of_a_real_step(name: OptimizerName) -> None:
    config = ModelConfig(d_model=64, n_layers=2, context_length=16, biases=True)
    model = Decoder(config)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=16).resolve(1600)
    optimizer = make_optimizer(model, parametrize(config, config, optimizer=name), recipe)
    training_loss(model, torch.zeros(1, 17, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    estimate = training_memory(config, micro_batch=1, optimizer=name)
    assert estimate.parameters == sum(p.nbytes for p in model.parameters())
    assert estimate.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert estimate.optimizer == sum(moment.nbytes for moment in moments)
    assert estimate.gathered == 0


@pytest.mark.parametrize("together", [memory.TOGETHER, 1])
def test_a_step_of_soap_makes_what_is_estimated(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are computed together, and one by one."""
    monkeypatch.setattr(memory, "TOGETHER", together)
    monkeypatch.setattr(soap, "_FREQUENCY", 1)
    config = ModelConfig(d_model=128, n_layers=2, context_length=16, mlp_ratio=2)
    model = Decoder(config)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=16).resolve(1600)
    optimizer = make_optimizer(model, parametrize(config, config, optimizer="soap"), recipe)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    part = DecoderPart(config, "fp32", 1)
    assert peak_bytes(optimizer.step) == pytest.approx(4 * part.n_in_step("soap", 1), rel=0.1)


def test_sharding_divides_the_memory_that_it_shards() -> None:
    config = ModelConfig(d_model=64, n_layers=8)
    kinds: tuple[Sharding, ...] = ("none", "zero2", "full", "hybrid")
    whole, zero2, zero3, hybrid = (
        training_memory(config, micro_batch=1, sharding=kind, world_size=4) for kind in kinds
    )
    for kind, found in zip(kinds, (whole, zero2, zero3, hybrid), strict=True):
        kept = found.parameters + found.gradients + found.optimizer
        assert least_memory(config, "adamw", sharding=kind, world_size=4) == kept
    one = training_memory(config, micro_batch=1)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (one.parameters, one.gradients, one.optimizer)
    for cut in (zero2, zero3):
        assert (cut.parameters, cut.gradients, cut.optimizer) == (
            one.parameters // 4,
            one.gradients // 4,
            one.optimizer // 4,
        )
    assert (one.gathered, whole.gathered, zero2.gathered) == (0, one.parameters, one.parameters)
    groups = config.n_params_by_group
    block = (groups["attention"] + groups["mlp"] + groups["norms"]) // 8
    assert zero3.gathered == 4 * (max(groups["readout"], block) + block)
    tied = training_memory(replace(config, tied=True), micro_batch=1, sharding="full", world_size=4)
    assert tied.gathered == 4 * (groups["readout"] + 2 * block), "a tied table is gathered all the while"
    in_bf16 = training_memory(config, micro_batch=1, sharding="full", world_size=4, precision="bf16")
    assert zero3.gathered > in_bf16.gathered
    assert (zero3.parameters, zero3.gradients) == (in_bf16.parameters, in_bf16.gradients)
    assert zero3 == hybrid
    assert whole.activations == zero2.activations


def test_a_shard_of_rows_that_do_not_divide_evenly_has_as_many_as_the_first_rank() -> None:
    config, ranks = ModelConfig(d_model=64, n_layers=2, mlp_ratio=2.5, vocab_size=100), 48
    with rank_of(0, ranks):
        model = Decoder(config)
        shard(model, family_of(config), init_device_mesh("cpu", (ranks,)))
        held = sum(cast(DTensor, parameter).to_local().nbytes for parameter in model.parameters())
    found = training_memory(config, micro_batch=1, sharding="full", world_size=ranks)
    assert found.parameters == pytest.approx(held, rel=0.01)
    whole = training_memory(config, micro_batch=1, sharding="zero2", world_size=ranks)
    assert whole.gathered == pytest.approx(ranks * held, rel=0.01), "padding is gathered too"


def test_checkpointing_and_low_precision_keep_less() -> None:
    config = ModelConfig(d_model=64, n_layers=8)
    plain = activation_bytes(config, 2)
    assert activation_bytes(config, 2, "bf16") < plain
    assert activation_bytes(config, 2, checkpointing="full") < plain / 3
    assert (
        activation_bytes(config, 2, checkpointing="full")
        < activation_bytes(config, 2, checkpointing="selective")
        < plain
    )
    assert activation_bytes(config, 4) == 2 * plain


@pytest.mark.parametrize(("kind", "tolerance"), [("none", 0.1), ("selective", 0.15), ("full", 0.15)])
def test_the_estimate_of_each_checkpointing_is_near_the_measured_peak(kind: Checkpointing, tolerance: float) -> None:
    config = ModelConfig(d_model=64, n_layers=8, context_length=128, norm="layernorm")
    model, sequences = Decoder(config), torch.zeros(SEQUENCES, 129, dtype=torch.int64)
    for block in model.blocks:
        block.checkpointing = kind  # type: ignore[assignment]

    def step() -> None:
        training_loss(model, sequences).backward()  # type: ignore[no-untyped-call]

    step()  # its gradients stay, so that only activations are counted
    estimate = training_memory(config, micro_batch=SEQUENCES, checkpointing=kind)
    assert peak_bytes(step) == pytest.approx(estimate.activations + estimate.reduced, rel=tolerance)


def test_chunked_logits_are_not_kept() -> None:
    config = ModelConfig(d_model=64, n_layers=1, vocab_size=50_000)
    one, two = (activation_bytes(config, size) for size in (16, 32))
    assert two - one < 4 * 16 * config.context_length * config.vocab_size / 10


def test_the_largest_micro_batch_divides_the_share_and_fits() -> None:
    config = ModelConfig(d_model=64, n_layers=2)
    limit = training_memory(config, micro_batch=5).total
    estimate = partial(training_memory, config)
    assert largest_micro_batch(estimate, 24, limit=limit) == 4
    assert largest_micro_batch(partial(estimate, checkpointing="full"), 24, limit=limit) > 4
    assert largest_micro_batch(estimate, 24, limit=1) == 1


def test_a_proxy_takes_the_least_checkpointing_with_which_it_fits() -> None:
    config = ModelConfig(d_model=64, n_layers=8)
    state: dict[str, Any] = {"precision": "bf16", "optimizer": "adamw"}
    one, recomputed = (
        training_memory(config, micro_batch=1, checkpointing=kind, **state).total for kind in ("none", "full")
    )
    assert fitting(config, 24, limit=training_memory(config, micro_batch=5, **state).total, **state) == (4, "none")
    assert fitting(config, 24, limit=one, **state) == (1, "none")
    size, kind = fitting(config, 24, limit=one - 1, **state)
    assert kind != "none"
    assert training_memory(config, micro_batch=size, checkpointing=kind, **state).total < one
    assert fitting(config, 24, limit=recomputed, **state) == (1, "full")
    assert fitting(config, 24, limit=1, **state) == (1, "full")


def test_bad_arguments_are_refused() -> None:
    config = ModelConfig(d_model=64, n_layers=1)
    with pytest.raises(ValueError, match="micro_batch must.*1, got 0"):
        training_memory(config, micro_batch=0)
    with pytest.raises(ValueError, match="optimizer.*got 'sgd'"):
        training_memory(config, micro_batch=1, optimizer="sgd")
    assert "GiB a device" in str(training_memory(config, micro_batch=1))


def in_pipeline(config: ModelConfig, schedule: PipelineSchedule, *, sequences: int = 32, **conditions: Any) -> Any:
    """Return the estimate for the rank of a pipeline of four that needs the most."""
    pipeline = PipelineShare(schedule=schedule, ranks=4, sequences=sequences)
    return training_memory(config, **{"micro_batch": 2} | conditions, pipeline=pipeline)


def test_a_rank_of_a_pipeline_holds_its_stages_with_whole_gradients_and_gathered_weights() -> None:
    config = ModelConfig(d_model=64, n_layers=16, vocab_size=64)
    groups = config.n_params_by_group
    stage = 4 * (groups["attention"] + groups["mlp"] + groups["norms"]) // 16 + groups["embedding"]  # the first
    for kind in ("zero2", "full"):
        found = in_pipeline(config, "1f1b", precision="bf16", sharding=kind, world_size=4)
        assert found.parameters == pytest.approx(stage, rel=0.01), "4 bytes over 4 ranks"
        assert found.optimizer == pytest.approx(2 * stage, rel=0.01)
        assert found.gradients == pytest.approx(4 * stage, rel=0.01)
        whole = 2 * stage if kind == "zero2" else 2 * (stage - 2 * (stage - groups["embedding"]) // 4)
        assert found.gathered == pytest.approx(whole, rel=0.01), "after a forward pass only two of four blocks again"
    unsharded = in_pipeline(config, "1f1b", precision="bf16", sharding="none", world_size=4)
    assert unsharded.parameters == pytest.approx(4 * stage, rel=0.01)


def test_activations_in_a_pipeline_are_those_in_flight_and_the_buffers_that_receive_them() -> None:
    config = ModelConfig(d_model=64, n_layers=32, vocab_size=64)
    stream = 4 * config.context_length * config.d_model  # of a sequence in fp32
    block = (activation_bytes(config, 2) - activation_bytes(replace(config, n_layers=16), 2)) / 16

    def kept(schedule: PipelineSchedule, **conditions: Any) -> float:
        """Return the micro-batches of two sequences on all blocks of a rank, without buffers."""
        buffers = 1 if schedule in ("gpipe", "1f1b") else 3  # the first rank receives no input for its first stage
        activations = in_pipeline(config, schedule, **conditions).activations - buffers * 32 * stream
        return float(activations / (8 * block))

    flight = {
        "gpipe": 16,
        "looped_bfs": 16,
        "1f1b": 4,
        "interleaved": 5.5,
        "zero_bubble": 4 * KEPT_APART["zero_bubble"],
        "zero_bubble_v": 4 * KEPT_APART["zero_bubble_v"],
        "dualpipe_v": 4.5 * KEPT_APART["dualpipe_v"],
    }
    for schedule, number in flight.items():
        assert kept(cast(PipelineSchedule, schedule)) == pytest.approx(number, rel=0.1), schedule
    assert kept("1f1b", micro_batch=1) == pytest.approx(4 / 2, rel=0.1), "half the sequences in flight"
    more, less = (in_pipeline(config, "1f1b", sequences=n).activations for n in (64, 32))
    assert more - less == 32 * stream, "a buffer for each sequence, and no more in flight"


def test_an_evaluation_in_a_pipeline_keeps_what_stages_send_and_gathers_a_stage() -> None:
    config, pipeline = ModelConfig(d_model=64, n_layers=16), PipelineShare(schedule="1f1b", ranks=4, sequences=32)
    state: dict[str, Any] = {"sharding": "full", "world_size": 4, "pipeline": pipeline}
    training = training_memory(config, micro_batch=2, **state)
    found = evaluation_memory(config, 2, training, **state)
    assert evaluation_memory(config, 2, training, **state | {"pipeline": replace(pipeline, sequences=64)}) == found
    stream = 4 * 2 * 4 * config.context_length * config.d_model  # of four micro-batches of two sequences, in fp32
    held = training.parameters + training.optimizer
    assert found - held > 2 * stream, "received and sent"
    assert found < evaluation_memory(config, 2, training, sharding="zero2", world_size=4) + 2 * stream


def test_a_pipeline_keeps_at_least_the_least_memory() -> None:
    config = ModelConfig(d_model=64, n_layers=16)
    kinds: tuple[Sharding, ...] = ("none", "full")
    for kind in kinds:
        found = in_pipeline(config, "interleaved", sharding=kind, world_size=4)
        least = least_memory(config, "adamw", sharding=kind, world_size=4, stages=4)
        assert least < found.parameters + found.gradients + found.optimizer


def test_the_micro_batch_of_a_pipeline_leaves_several_for_each_rank() -> None:
    config, pipeline = ModelConfig(d_model=64, n_layers=16), PipelineShare(schedule="1f1b", ranks=4, sequences=64)
    estimate = partial(training_memory, config, pipeline=pipeline)
    assert largest_micro_batch(estimate, 64, limit=2**60, pipeline=pipeline) == 4
    limit = estimate(micro_batch=2).total
    assert largest_micro_batch(estimate, 64, limit=limit, pipeline=pipeline) == 2
    assert largest_micro_batch(estimate, 32, limit=2**60, pipeline=pipeline) == 2, "of a smaller share, as in a ramp"


def test_a_pipeline_that_is_not_possible_is_refused() -> None:
    config = ModelConfig(d_model=64, n_layers=6)
    with pytest.raises(ValueError, match="8 stages.* n_layers=6"):
        in_pipeline(config, "interleaved")
    with pytest.raises(ValueError, match="at most 1 sequences.* got 3 sequences"):
        in_pipeline(config, "1f1b", sequences=3, micro_batch=1)
