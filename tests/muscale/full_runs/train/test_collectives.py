"""Which collectives a step calls in each layout: kind, dtype and bytes of what a rank puts in, on a rank without the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast, get_args

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from muscale.full_runs.train.sharding import Meshes, build_model
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, training_loss
from proxy_models.architecture.memory import Checkpointing, Precision
from proxy_models.architecture.parametrization import OptimizerName, parametrize
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import make_optimizer
from proxy_models.training.precision import DTYPES
from proxy_models.training.whole_matrices import WholeMatrices
from tests.muscale.collectives import Collectives
from tests.muscale.fake_ranks import rank_of

WIDTH, LAYERS, TIME, SEQUENCES, VOCAB = 64, 3, 32, 2, 256
RANKS, FP32 = 8, 4


def built(
    parallelism: Parallelism, *, min_unit_params: int = 0, precision: Precision = "fp32", **variant: Any
) -> Decoder:
    """The decoder as the first of eight ranks has it."""
    model = ModelConfig(d_model=WIDTH, n_layers=LAYERS, head_dim=8, context_length=TIME, vocab_size=VOCAB, **variant)
    numerics = Numerics(model=model, base=model, corpus_key="", seed=0, evaluation_tokens=TIME, precision=precision)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256).resolve(25600)
    model_of_rank = build_model(
        numerics,
        recipe,
        parallelism,
        device=torch.device("cpu"),
        meshes=Meshes.of(parallelism, parallelism.grid(RANKS), "cpu"),
        min_unit_params=min_unit_params,
    )
    return cast(Decoder, model_of_rank)


def counted(model: Decoder) -> Collectives:
    """The collectives of one pass forward and backward."""
    collectives = Collectives()
    with collectives:
        training_loss(model, torch.zeros(SEQUENCES, TIME + 1, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    return collectives


def counted_in_a_step(model: Decoder, optimizer: OptimizerName) -> Collectives:
    """The collectives of the optimizer's step."""
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=256, optimizer=optimizer).resolve(25600)
    made = make_optimizer(model, parametrize(model.config, model.config, optimizer=optimizer), recipe)
    counted(model)
    collectives = Collectives()
    with collectives:
        made.step()
    return collectives


def units(model: Decoder) -> list[str]:
    """The modules that are gathered by themselves."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_embedding_and_readout_are_gathered_once_and_a_block_twice() -> None:
    with rank_of(0, RANKS):
        model = built(Parallelism())
        assert units(model) == ["", "embedding", "blocks.0", "blocks.1", "blocks.2", "readout"]
        table, rest = VOCAB * WIDTH * FP32, WIDTH * FP32
        block = sum(parameter.numel() for parameter in model.blocks[0].parameters()) * FP32
        gathers, reductions = (counted(model).of(kind) for kind in ("all-gather", "reduce-scatter"))
        ours = {size // RANKS: n for size, n in ((table, 2), (block, 2 * LAYERS), (rest, 1))}
        assert gathers == {(torch.float32, size): n for size, n in ours.items()}
        assert reductions == {(torch.float32, table): 2, (torch.float32, block): LAYERS, (torch.float32, rest): 1}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ({"tied": True}, ["", "blocks.0", "blocks.1", "blocks.2"]),
        ({"min_unit_params": VOCAB * WIDTH + 1}, ["", "blocks.0", "blocks.1", "blocks.2"]),
        ({"min_unit_params": 10**6}, [""]),
    ],
    ids=["tied", "small table", "small"],
)
def test_a_tied_table_and_what_is_small_are_in_the_unit_of_the_rest(
    variant: dict[str, Any], expected: list[str]
) -> None:
    with rank_of(0, RANKS):
        assert units(built(Parallelism(), **variant)) == expected


@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
def test_ranks_that_share_a_sequence_gather_keys_and_values_once_a_block_and_pass(checkpointing: Checkpointing) -> None:
    layout = Parallelism(sharding="none", context_parallel=2, checkpointing=checkpointing)
    with rank_of(0, RANKS):
        found = counted(built(layout, queries_per_kv=2))
    keys = 2 * SEQUENCES * TIME * WIDTH // 2 * FP32  # keys and values of all positions
    again = checkpointing != "none"
    assert found.of("all-gather") == {(torch.float32, keys // 2): (1 + again) * LAYERS}
    assert found.of("reduce-scatter") == {(torch.float32, keys): LAYERS}


@pytest.mark.parametrize(
    ("parallel", "precision"), [(False, "fp32"), (False, "bf16"), (True, "fp32")], ids=["fp32", "bf16", "parallel"]
)
def test_ranks_that_share_products_gather_and_scatter_the_stream_once_a_sublayer_and_way(
    parallel: bool, precision: Precision
) -> None:
    tensor, dtype = 4, DTYPES[precision]
    with rank_of(0, RANKS):
        model = built(Parallelism(sharding="none", tensor_parallel=tensor), precision=precision, parallel=parallel)
        parts = [cast(DTensor, parameter).to_local().numel() for parameter in model.blocks[0].parameters()]
        found = counted(model)
    stream, loss = SEQUENCES * TIME * WIDTH, 2 * SEQUENCES * TIME
    norms, sums = (LAYERS if parallel else 2 * LAYERS) + 1, 2 * LAYERS + 1  # sums of attention, MLP and embedding
    expected: Counter[tuple[str, torch.dtype, int]] = Counter()
    for kind, entries, calls, of in (
        ("all-gather", stream // tensor, norms + sums, dtype),  # norms' outputs forward, gradients of sums backward
        ("reduce-scatter", stream, norms + sums, dtype),  # sums forward, gradients of norms' outputs backward
        ("all-gather", loss, 1, torch.float32),  # two numbers a position
        ("all-reduce", WIDTH, norms, dtype),  # gradients of gains, over positions
        ("all-reduce", WIDTH, 1, torch.float32),  # these and the next are of replicas: of the last gain
        ("all-reduce", VOCAB // tensor * WIDTH, 2, torch.float32),
        ("all-reduce", sum(parts), LAYERS, torch.float32),
    ):
        expected[kind, of, entries * of.itemsize] += calls
    assert found.calls == expected


def products(rows: int, columns: int) -> int:
    return max(rows, columns) * min(rows, columns) ** 2


def kept(rows: int, columns: int) -> int:
    return 2 * (rows * columns + rows**2 + columns**2)


@pytest.mark.parametrize(
    "parallelism",
    [Parallelism(), Parallelism(tensor_parallel=2), Parallelism(sharding="hybrid", shard_ranks=4)],
    ids=["full", "tensor", "hybrid"],
)
@pytest.mark.parametrize(
    ("optimizer", "cost", "dtype"), [("muon", products, torch.bfloat16), ("soap", kept, torch.float32)]
)
def test_a_step_sends_its_parts_of_the_matrices_once_and_the_updates_of_those_it_owns_once(
    parallelism: Parallelism, optimizer: OptimizerName, cost: Callable[[int, int], int], dtype: torch.dtype
) -> None:
    with rank_of(0, RANKS):
        model = built(parallelism)
        found = counted_in_a_step(model, optimizer)
        matrices = [cast(DTensor, p) for p in model.blocks.parameters() if p.ndim == 2]
        share = WholeMatrices(matrices, cost)
    copies = 2 if parallelism.sharding == "hybrid" else 1
    costs = [cost(*matrix.shape) for matrix in matrices]
    work = [sum(of for of, owner in zip(costs, share.owners, strict=True) if owner == rank) for rank in range(RANKS)]
    assert max(work) - min(work) <= max(costs)
    here = [n for n, owner in enumerate(share.owners) if owner < RANKS // copies]  # in this rank's copy of the model
    sent = sum(matrices[n].to_local().numel() for n in here)
    owned = copies * sum(m.numel() for m, owner in zip(matrices, share.owners, strict=True) if owner == 0)
    assert found.calls == Counter(("all-to-all", dtype, dtype.itemsize * size) for size in (sent, owned))


@pytest.mark.parametrize("parallelism", [Parallelism(), Parallelism(tensor_parallel=2)], ids=["full", "tensor"])
def test_a_step_of_adafactor_reduces_twice(parallelism: Parallelism) -> None:
    with rank_of(0, RANKS):
        model = built(parallelism)
        found = counted_in_a_step(model, "adafactor")
        parameters = list(model.parameters())
    edges = sum(sum(parameter.shape) for parameter in parameters if parameter.ndim == 2)
    sizes = (edges + len(parameters), len(parameters))  # rows, columns and the parameter's size; the update's size
    assert found.calls == Counter(("all-reduce", torch.float32, FP32 * size) for size in sizes)


@pytest.mark.parametrize("parallelism", [Parallelism(), Parallelism(tensor_parallel=2)], ids=["full", "tensor"])
def test_a_step_of_lamb_reduces_two_norms_of_each_tensor_that_starts_at_random_values_once(
    parallelism: Parallelism,
) -> None:
    with rank_of(0, RANKS):
        model = built(parallelism)
        found = counted_in_a_step(model, "lamb")
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert found.calls == Counter([("all-reduce", torch.float32, FP32 * 2 * len(matrices))])
