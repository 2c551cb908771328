"""Predicted against published training throughput, and 8B, 70B and 405B by layout: `python tests/benchmarks/step_time.py`, seconds.

Published: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3), asyncTP_llama3_h100_2025-06_torchtitan.md (bf16,
vanilla TP) and docs/performance.md (64 A100s, 2024); llm-foundry, scripts/train/benchmarking/README.md (H100 80GB BF16). All in
tokens per second and device. torchtitan's H100s have 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W, for which the share of the
peak that products reach is fitted to its first compiled row; its "selective op" recomputes every second product.

Pipelines: Llama 3's 405B (arXiv 2407.21783, table 4), without its third row, which shares out the context; torchtitan's 405B (table 5
of the same file), whose Float8 products are not predicted, so that only the two schedules are compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from muscale.plans.layouts import Layout, fitting_layouts, propose_layout
from muscale.plans.step_time import LINKS, Links, StepTime
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.stage_layout import PipelineSchedule

_LLAMA: dict[str, Any] = {"head_dim": 128, "mlp_ratio": 3.5, "vocab_size": 128_256, "context_length": 8192}
LLAMA_8B = ModelConfig(d_model=4096, n_layers=32, queries_per_kv=4, **_LLAMA)
LLAMA_70B = ModelConfig(d_model=8192, n_layers=80, queries_per_kv=8, **_LLAMA)
_MPT: dict[str, Any] = {
    "head_dim": 128,
    "mlp_ratio": 4.0,
    "vocab_size": 50_368,
    "context_length": 2048,
    "activation": "gelu",
    "tied": True,
    "positions": "alibi",
}
MPT_7B = ModelConfig(d_model=4096, n_layers=32, **_MPT)
MPT_13B = ModelConfig(d_model=5120, n_layers=40, **_MPT)
MPT_30B = ModelConfig(d_model=7168, n_layers=48, **_MPT)
MPT_70B = ModelConfig(d_model=8192, n_layers=80, **_MPT)
LLAMA_405B = ModelConfig(d_model=16_384, n_layers=126, queries_per_kv=16, **_LLAMA | {"mlp_ratio": 3.25})
BATCH_TOKENS = 2**23
LIMITED = replace(LINKS["H100 SXM"], memory=2.4e12, products=0.485)


@dataclass(frozen=True)
class Published:
    name: str
    model: ModelConfig
    workers: int
    micro_batch: int
    passes: int
    layout: Parallelism
    tokens_per_second: float
    compiled: bool = True
    device: str = "H100 SXM"
    links: Links | None = None
    recomputed: float | None = None
    fitted: bool = False


_SELECTIVE, _FULL = Parallelism(checkpointing="selective"), Parallelism(checkpointing="full")
PUBLISHED = (
    Published("torchtitan 8B", LLAMA_8B, 8, 2, 1, _SELECTIVE, 5762, False, links=LIMITED, recomputed=0.5, fitted=True),
    Published("torchtitan 8B", LLAMA_8B, 8, 2, 1, _SELECTIVE, 6667, links=LIMITED, recomputed=0.5, fitted=True),
    Published("torchtitan 8B", LLAMA_8B, 128, 2, 1, _SELECTIVE, 5605, False, links=LIMITED, recomputed=0.5),
    Published("torchtitan 8B", LLAMA_8B, 128, 2, 1, _SELECTIVE, 6514, links=LIMITED, recomputed=0.5),
    Published(
        "torchtitan 8B, TP 8",
        LLAMA_8B,
        64,
        12,
        1,
        replace(_SELECTIVE, tensor_parallel=8),
        4378,
        links=LIMITED,
        recomputed=0.5,
    ),
    Published("torchtitan 70B, TP 8", LLAMA_70B, 256, 16, 1, replace(_FULL, tensor_parallel=8), 597.3, links=LIMITED),
    Published("torchtitan 8B", LLAMA_8B, 64, 1, 1, _SELECTIVE, 2973, False, "A100 80GB", recomputed=0.5, fitted=True),
    Published("torchtitan 70B", LLAMA_70B, 64, 1, 1, _FULL, 331, False, "A100 80GB"),
    Published("llm-foundry 7B", MPT_7B, 8, 6, 1, Parallelism(), 10_643, False, fitted=True),
    Published("llm-foundry 13B", MPT_13B, 64, 2, 1, Parallelism(), 4800, False),
    Published("llm-foundry 30B", MPT_30B, 32, 14, 3, _FULL, 2308, False),
    Published("llm-foundry 70B", MPT_70B, 64, 8, 4, _FULL, 1039, False),
    Published("llm-foundry 70B", MPT_70B, 32, 2, 16, _FULL, 882, False),
)


_SHAPES = {
    "760m": (1536, 24),
    "1b": (2048, 24),
    "3b": (2560, 32),
    "7b": (4096, 32),
    "13b": (5120, 40),
    "30b": (7168, 48),
    "70b": (8192, 80),
}
_LLM_FOUNDRY = """
70b 2048 64 8 4 1 1039
70b 2048 32 2 16 1 882
30b 8192 8 1 21 1 1384
30b 4096 8 1 21 1 1802
30b 2048 32 14 3 1 2308
30b 2048 16 10 3 1 2263
30b 2048 8 3 21 1 2002
30b 1024 8 6 21 1 2084
13b 32768 8 1 3 1 1976
13b 16384 8 3 3 1 2985
13b 4096 8 10 3 1 4717
13b 2048 64 2 1 0 4800
13b 2048 32 2 1 0 4811
13b 2048 16 2 1 0 4767
13b 2048 8 2 1 0 4792
13b 1024 8 40 3 1 5502
7b 65536 8 1 2 1 1956
7b 32768 8 2 2 1 3318
7b 8192 8 8 2 1 6935
7b 4096 8 16 2 1 8611
7b 2048 8 6 1 0 10643
7b 1024 8 64 2 1 10203
3b 65536 8 1 2 1 3262
3b 32768 8 3 6 1 5873
3b 16384 8 1 6 0 11152
3b 8192 8 3 6 0 16578
3b 4096 8 5 6 0 20964
3b 2048 64 6 3 0 22525
3b 2048 32 6 3 0 23021
3b 2048 16 10 3 0 24142
3b 1024 8 20 6 0 27046
3b 512 8 40 6 0 27965
1b 65536 8 1 2 1 5506
1b 32768 8 1 4 0 12025
1b 16384 8 2 4 0 19649
1b 8192 8 3 4 0 29157
1b 4096 8 7 4 0 38535
1b 2048 64 20 1 0 44402
1b 2048 32 20 1 0 45130
1b 2048 16 20 1 0 46037
1b 2048 8 14 1 0 45455
1b 1024 8 18 4 0 48910
1b 512 8 56 4 0 52275
760m 32768 8 1 2 0 16291
760m 16384 8 3 2 0 27815
760m 8192 8 6 2 0 41825
760m 4096 8 12 2 0 55459
760m 2048 32 24 1 0 67971
760m 2048 16 24 1 0 68551
760m 2048 8 24 2 0 63147
760m 1024 8 48 2 0 78581
760m 512 8 96 2 0 83749
"""  # model, context, devices, micro-batch, passes, full checkpointing, tokens per second and device


def llm_foundry() -> list[Published]:
    """Every row of llm-foundry's table of H100s in bf16."""
    found = []
    for row in _LLM_FOUNDRY.split("\n")[1:-1]:
        name, *numbers = row.split()
        context, workers, micro_batch, passes, checkpointed, speed = map(int, numbers)
        width, depth = _SHAPES[name]
        model = ModelConfig(d_model=width, n_layers=depth, **_MPT | {"context_length": context})
        layout = _FULL if checkpointed else Parallelism()
        found.append(Published(f"llm-foundry {name}", model, workers, micro_batch, passes, layout, speed, False))
    return found


def predicted(run: Published) -> StepTime:
    """The model's step of a published run."""
    data = run.workers // run.layout.tensor_parallel
    return StepTime(
        run.model,
        run.layout,
        workers=run.workers,
        micro_batch=run.micro_batch,
        batch_tokens=data * run.micro_batch * run.passes * run.model.context_length,
        device=run.device,
        links=run.links,
        compiled=run.compiled,
        recomputed=run.recomputed,
    )


_OF_405B = Parallelism(sharding="zero2", tensor_parallel=8, pipeline_parallel=16, pipeline_schedule="interleaved")
PIPELINES = ((8192, 32, 1, 0.43), (16_384, 16, 1, 0.41), (16_384, 16, 16, 0.38))
"""Devices, sequences of a pipeline, ranks that share a sequence and published MFU of Llama 3's 405B; micro-batches of one sequence are
assumed. Sequences are as many times 8,192 tokens long as ranks share them."""
_OF_TORCHTITAN = Parallelism(sharding="zero2", tensor_parallel=8, pipeline_parallel=8, checkpointing="full")
SCHEDULES_OF_TORCHTITAN = {"1f1b": 100, "interleaved": 128}
"""Tokens per second and device of torchtitan's 405B on 512 H100s, 32 sequences to a pipeline; 8 micro-batches are assumed."""


def predicted_405b(workers: int, sequences: int, context: int) -> StepTime:
    """The model's step of Llama 3's 405B with two stages for each rank of a pipeline; Meta's number of stages is not published."""
    layout = replace(_OF_405B, context_parallel=context)
    model = replace(LLAMA_405B, context_length=LLAMA_405B.context_length * context)
    return StepTime(
        model,
        layout,
        workers=workers,
        micro_batch=1,
        batch_tokens=layout.data_ranks(workers) * sequences * model.context_length,
        device="H100 SXM",
    )


def predicted_torchtitan(schedule: PipelineSchedule) -> StepTime:
    """The model's step of torchtitan's 405B, in bf16."""
    return StepTime(
        LLAMA_405B,
        replace(_OF_TORCHTITAN, pipeline_schedule=schedule),
        workers=512,
        micro_batch=4,
        batch_tokens=256 * LLAMA_405B.context_length,
        device="H100 SXM",
        links=LIMITED,
    )


def h100_layouts(model: ModelConfig, workers: int, batch_tokens: int) -> list[Layout]:
    """The layouts that fit."""
    conditions: dict[str, Any] = {"workers": workers, "batch_tokens": batch_tokens, "device": "H100 SXM"}
    return fitting_layouts(StepTime(model, Parallelism(), micro_batch=1, **conditions))


def _print_pipelines() -> None:
    print("\n| run | devices | layout | published MFU | predicted | bubble |\n| --- | --- | --- | --- | --- | --- |")
    for workers, sequences, context, mfu in PIPELINES:
        found = predicted_405b(workers, sequences, context)
        print(
            f"| Llama 3 405B | {workers:,} | TP 8, CP {context}, PP 16, {sequences} micro-batches | {mfu:.0%} | {found.mfu:.0%} "
            f"| {found.bubble_share:.0%} |"
        )
    one, two = predicted_torchtitan("1f1b"), predicted_torchtitan("interleaved")
    ratio = SCHEDULES_OF_TORCHTITAN["interleaved"] / SCHEDULES_OF_TORCHTITAN["1f1b"]
    print(
        f"torchtitan 405B, interleaved over 1F1B: published {ratio:.2f}, predicted {one.total / two.total:.2f} "
        f"(bf16: {one.tokens_per_second:.0f} and {two.tokens_per_second:.0f} tokens per second and device)"
    )

    print(
        f"\nThe proposed layout and the fastest pipeline, batch of {2 * BATCH_TOKENS:,} tokens; * proposed\n"
        "| model, devices | sharding | TP | PP, schedule | checkpointing | micro-batch | GiB | tokens/s | MFU | exposed | bubble |\n"
        + "| --- " * 11
        + "|"
    )
    for name, model in (("8B", LLAMA_8B), ("70B", LLAMA_70B), ("405B", LLAMA_405B)):
        for workers in (64, 256, 1024):
            layouts = h100_layouts(model, workers, 2 * BATCH_TOKENS)
            proposed = propose_layout(layouts)
            staged = next((layout for layout in layouts if layout.parallelism.pipeline_parallel > 1), None)
            for layout in [proposed, *([] if proposed is staged else [staged])]:
                if layout is None:
                    continue
                of, step = layout.parallelism, layout.step
                stages = f"{of.pipeline_parallel}, {of.pipeline_schedule}" if of.pipeline_parallel > 1 else "1"
                print(
                    f"| {name}, {workers:,}{' *' if layout is proposed else ''} | {of.sharding} | {of.tensor_parallel} | {stages} "
                    f"| {of.checkpointing} | {layout.micro_batch} | {layout.memory.total / 2**30:.0f} "
                    f"| {step.tokens_per_second:,.0f} | {step.mfu:.0%} | {step.exposed_share - step.bubble_share:.0%} "
                    f"| {step.bubble_share:.0%} |"
                )


def _print_published() -> None:
    print(
        "| run | devices | micro-batch × passes | published | predicted | error |\n| --- | --- | --- | --- | --- | --- |"
    )
    for run in PUBLISHED:
        found = predicted(run).tokens_per_second
        kind = "eager" if not run.compiled else "compiled"
        error = f"{found / run.tokens_per_second - 1:+.0%}" + (" (fitted)" if run.fitted else "")
        print(
            f"| {run.name}, {kind}, {run.layout.checkpointing} | {run.workers} {run.device} | {run.micro_batch} × {run.passes} "
            f"| {run.tokens_per_second:,.0f} | {found:,.0f} | {error} |"
        )

    rows = llm_foundry()
    half = replace(LINKS["H100 SXM"], attention=LINKS["H100 SXM"].attention / 2)
    slow = [replace(run, links=half) for run in rows]
    for kind, runs in (
        ("llm-foundry, contexts to 4,096", [run for run in rows if run.model.context_length <= 4096]),
        ("llm-foundry, longer contexts", [run for run in rows if run.model.context_length > 4096]),
        ("llm-foundry, all, attention at half the speed", slow),
    ):
        errors = sorted(predicted(run).tokens_per_second / run.tokens_per_second - 1 for run in runs)
        print(f"{kind}: {len(errors)} rows, {errors[0]:+.0%} to {errors[-1]:+.0%}, median {median(errors):+.0%}")


def _print_layouts() -> None:
    print(f"\nH100 SXM, bf16, AdamW, compiled, batch of {BATCH_TOKENS:,} tokens; * proposed")
    print(
        "| model, devices | sharding | TP | checkpointing | micro-batch | GiB | tokens/s | MFU | exposed |\n"
        + "| --- " * 9
        + "|"
    )
    for name, model in (("8B", LLAMA_8B), ("70B", LLAMA_70B)):
        for workers in (64, 512, 1024):
            layouts = h100_layouts(model, workers, BATCH_TOKENS)
            proposed = propose_layout(layouts)
            best: dict[tuple[str, int], Layout] = {}  # of each sharding, and of each tensor_parallel
            for layout in layouts:
                of = layout.parallelism
                if of.tensor_parallel in (1, 8) and of.pipeline_parallel == 1:
                    best.setdefault((of.sharding, of.tensor_parallel), layout)
            shown = [*best.values()] + ([] if proposed in best.values() or proposed is None else [proposed])
            for layout in shown:
                of, step = layout.parallelism, layout.step
                print(
                    f"| {name}, {workers:,}{' *' if layout is proposed else ''} | {of.sharding} | {of.tensor_parallel} "
                    f"| {of.checkpointing} | {layout.micro_batch} | {layout.memory.total / 2**30:.0f} "
                    f"| {step.tokens_per_second:,.0f} | {step.mfu:.0%} | {step.exposed_share:.0%} |"
                )


if __name__ == "__main__":
    _print_published()
    _print_layouts()
    _print_pipelines()
