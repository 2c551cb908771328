"""The full run on one NVIDIA GPU: tokens/s, share of the peak (MFU), and memory against the estimate that the gate goes by.

    python tests/benchmarks/full_run_gpu.py [--sizes 125M 350M 1.3B] [--steps 20] [--micro-batch 8] [--ranks 1]
        [--blocks compiled eager] [--checkpointing none selective full]

GPT-3's shapes (Brown et al., arXiv 2005.14165, table 2.1) as our family, heads of 64, context 2048, 50,304 ids, in bf16, AdamW, FSDP2
over all ranks, by the training of `muscale doctor --gpu`: compiled, eager, and each with activations of whole blocks, or of all but
the attention's and products' outputs, computed again. Every rank is a process of its own. MFU counts the FLOPs of
`ModelConfig.train_flops_per_token` against the peak in the vendor's datasheet, and stands next to the MFU that a plan predicts;
steps count from the fifth, by their median.
Without a GPU only `--sizes tiny` runs, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from muscale.environment import device_name
from muscale.machine.gpu.gpu_checks import predicted_mfu
from muscale.machine.gpu.training import WARM_STEPS, Case, Measurement, measure
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Checkpointing
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import EMBEDDED

VOCAB_SIZE, CONTEXT, PASSES = 50_304, 2048, 4
SHAPES = {"125M": (768, 12), "350M": (1024, 24), "1.3B": (2048, 24)}
TINY = ModelConfig(d_model=64, n_layers=2, context_length=128)


def shape(size: str) -> ModelConfig:
    if size == "tiny":
        return TINY
    width, depth = SHAPES[size]
    return ModelConfig(
        d_model=width, n_layers=depth, head_dim=64, context_length=CONTEXT, vocab_size=VOCAB_SIZE, mlp_ratio=2.75
    )


def described(case: Case, found: Measurement) -> str:
    size, blocks, kind = case.name.split("-")
    head = f"{size:<6}{blocks:<10}{kind:<11}"
    if found.failure:
        return f"{head}{found.failure}"
    peak, estimate = found.peak_bytes, case.estimate.total
    mfu = f"{found.median_mfu:.1%}" if found.median_mfu else "–"
    plan = predicted_mfu(found, device_name(torch.device(case.device, 0))) if case.device == "cuda" else None
    predicted = f"{plan:.1%}" if plan else "–"
    memory = f"{peak / 2**30:.2f}" if peak else "–"
    off = f"{estimate / peak - 1:+.1%}" if peak else "–"
    speed = case.batch_tokens / found.median_seconds
    return f"{head}{speed:>12,.0f}{mfu:>8}{predicted:>11}{memory:>12}{estimate / 2**30:>12.2f}{off:>8}" + (
        "" if found.compiled == case.compile else "  not compiled: no compiler"
    )


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=[*SHAPES, "tiny"], default=[*SHAPES])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=8, help=f"sequences; a batch has {PASSES} of them a rank")
    parser.add_argument("--ranks", type=int, default=1, help="one GPU each")
    parser.add_argument("--blocks", nargs="+", choices=["compiled", "eager"], default=["compiled", "eager"])
    parser.add_argument("--checkpointing", nargs="+", choices=get_args(Checkpointing), default=get_args(Checkpointing))
    options = parser.parse_args()
    if options.steps <= WARM_STEPS:
        raise SystemExit(f"--steps must be above {WARM_STEPS}, got {options.steps}")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and set(options.sizes) != {"tiny"}:
        raise SystemExit("torch sees no GPU here; --sizes tiny shows that the script works")
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", EMBEDDED).folder
        print(
            f"{'size':<6}{'':<10}{'again':<11}{'tokens/s':>12}{'MFU':>8}{'predicted':>11}{'peak, GiB':>12}{'estimate':>12}{'off':>8}"
        )
        for checkpointing, blocks, size in product(options.checkpointing, options.blocks, options.sizes):
            case = Case(
                name=f"{size}-{blocks}-{checkpointing}",
                model=shape(size),
                device="cuda" if on_gpu else "cpu",
                ranks=options.ranks,
                precision="bf16" if on_gpu else "fp32",
                sequences=PASSES * options.micro_batch * options.ranks,
                micro_batch=options.micro_batch,
                steps=options.steps,
                compile=blocks == "compiled",
                checkpointing=checkpointing,
            )
            print(described(case, measure(case, corpus, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
