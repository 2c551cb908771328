"""The proposed layout fits, is the fastest by the prediction, and no more complicated than that needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muscale.plans.layouts import Layout, fitting_layouts, propose_layout
from muscale.plans.step_time import LINKS
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import MEMORY_SHARE
from scaling import accelerator
from tests.benchmarks.step_time import LLAMA_8B, LLAMA_70B

TINY = ModelConfig(d_model=512, n_layers=8, head_dim=64, vocab_size=32_000, context_length=2048)


def layouts(model: ModelConfig, workers: int, **changes: Any) -> list[Layout]:
    return fitting_layouts(
        model,
        workers=workers,
        batch_tokens=2**22,
        device="H100 SXM",
        links=replace(LINKS["H100 SXM"], **changes),
    )


def test_a_tiny_model_is_not_cut_within_its_blocks() -> None:
    proposed = propose_layout(layouts(TINY, 8))
    assert proposed is not None
    assert proposed.parallelism.sharding in ("none", "zero2")
    assert (proposed.parallelism.tensor_parallel, proposed.parallelism.checkpointing) == (1, "none")


def test_70b_does_not_fit_on_eight_devices_of_80_gb_and_is_cut_and_checkpointed_on_64() -> None:
    assert propose_layout(layouts(LLAMA_70B, 8)) is None
    proposed = propose_layout(layouts(LLAMA_70B, 64))
    assert proposed is not None
    assert proposed.parallelism.sharding == "full"
    assert proposed.parallelism.checkpointing != "none"


def test_what_is_proposed_fits_and_lies_within_two_percent_of_the_fastest() -> None:
    for workers in (8, 64, 512):
        found = layouts(LLAMA_8B, workers)
        proposed = propose_layout(found)
        assert proposed is not None
        assert proposed.step.total <= 1.02 * min(layout.step.total for layout in found)
        limit = MEMORY_SHARE * accelerator("H100 SXM").memory_bytes
        assert all(layout.memory.total <= limit for layout in found)


def test_products_are_never_shared_over_nodes() -> None:
    for network in (5e9, 50e9):
        proposed = propose_layout(layouts(replace(LLAMA_70B, queries_per_kv=1), 256, network=network))
        assert proposed is not None
        assert proposed.parallelism.tensor_parallel <= 8
