"""The full run on one NVIDIA GPU: tokens/s, share of the peak (MFU), and memory against the estimate that the gate goes by.

    python tests/benchmarks/full_run_gpu.py [--sizes 125M 350M 1.3B] [--steps 20] [--micro-batch 8]

GPT-3's shapes (Brown et al., arXiv 2005.14165, table 2.1) as our family, heads of 64, context 2048, 50,304 ids, in bf16, AdamW,
by `muscale.full_runs.train.module` itself without Ray: eager, compiled, and each with activations of whole blocks, or of all but the
attention's and products' outputs, computed again. Every case is a process of its own. MFU counts the FLOPs of
`ModelConfig.train_flops_per_token` against the peak in the vendor's datasheet; steps count from the fifth, by their median.
Without a GPU only `--sizes tiny` runs, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from muscale import json_lines
from muscale.layout import METRICS
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Checkpointing, training_memory
from proxy_models.data.corpus import EMBEDDED, Corpus, write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.device import datasheet_flops
from proxy_models.training.numerics import Numerics

VOCAB_SIZE, CONTEXT = 50_304, 2048
SHAPES = {"125M": (768, 12), "350M": (1024, 24), "1.3B": (2048, 24)}
TINY = ModelConfig(d_model=64, n_layers=2, context_length=128)
WARM = 4  # steps that compile, and find their algorithms


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    size: str
    compile: bool
    checkpointing: Checkpointing
    micro_batch: int
    steps: int

    @property
    def model(self) -> ModelConfig:
        """Its shape."""
        if self.size == "tiny":
            return TINY
        width, depth = SHAPES[self.size]
        return ModelConfig(
            d_model=width, n_layers=depth, head_dim=64, context_length=CONTEXT, vocab_size=VOCAB_SIZE, mlp_ratio=2.75
        )


def train_case(case: Case, corpus: Path) -> dict[str, Any]:
    """Train it in this process; returns speed and memory."""
    from muscale.full_runs.full_run import FullRun
    from muscale.full_runs.train.module import train

    model, on_gpu = case.model, torch.cuda.is_available()
    batch = 4 * case.micro_batch * model.context_length
    values, n_tokens = Hyperparameters(learning_rate=0.002, batch_tokens=batch), case.steps * batch
    numerics = Numerics(
        model=model,
        base=model,
        corpus_key=Corpus.open(corpus).key,
        seed=0,
        evaluation_tokens=16 * model.context_length,
        precision="bf16" if on_gpu else "fp32",
    )
    with tempfile.TemporaryDirectory() as directory:
        run = FullRun(
            numerics=numerics,
            segments=chain(values, n_tokens),
            directory=Path(directory) / "run",
            corpus=corpus,
            checkpoint_every_tokens=2 * n_tokens,  # at the end only
            evaluate_every_tokens=2 * n_tokens,
            micro_batch=case.micro_batch,
            parallelism=Parallelism(sharding="none", checkpointing=case.checkpointing),
            compile=case.compile,
        )
        result = train(run)
        seconds = [row["step_seconds"] for row in json_lines.read(run.directory / METRICS)][WARM:-1]
    estimate = training_memory(
        model, micro_batch=case.micro_batch, precision=numerics.precision, checkpointing=case.checkpointing
    )
    speed = batch / float(np.median(seconds))
    return {
        "device": str(result["environment"]["device"]),
        "compiled": result["environment"]["compiled"],
        "tokens_per_second": speed,
        "flops": speed * model.train_flops_per_token,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "estimated_bytes": estimate.total,
    }


def measure(case: Case, corpus: Path) -> dict[str, Any]:
    """Train it in a process of its own, whose memory nothing else is in."""
    command = [sys.executable, __file__, "--corpus", str(corpus), "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["without a word"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def described(case: Case, found: dict[str, Any]) -> str:
    """A line of the table."""
    head = f"{case.size:<6}{'compiled' if case.compile else 'eager':<10}{case.checkpointing:<11}"
    if "failed" in found:
        return f"{head}{found['failed']}"
    peak, estimate = found["peak_bytes"], found["estimated_bytes"]
    stated = datasheet_flops(found["device"], "bf16") if peak else None
    mfu = f"{found['flops'] / stated:.1%}" if stated else "–"
    memory = f"{peak / 2**30:.2f}" if peak else "–"
    off = f"{estimate / peak - 1:+.1%}" if peak else "–"
    return f"{head}{found['tokens_per_second']:>12,.0f}{mfu:>8}{memory:>12}{estimate / 2**30:>12.2f}{off:>8}" + (
        "" if found["compiled"] == case.compile else "  not compiled: no compiler"
    )


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=[*SHAPES, "tiny"], default=[*SHAPES])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences; a batch has four of them")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(train_case(Case(**json.loads(options.case)), options.corpus)))
        return
    if options.steps < WARM + 3:
        raise SystemExit(f"--steps must be at least {WARM + 3}, got {options.steps}")
    if not torch.cuda.is_available() and set(options.sizes) != {"tiny"}:
        raise SystemExit("torch sees no GPU here; --sizes tiny shows that the script works")
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", EMBEDDED).folder
        print(f"{'size':<6}{'':<10}{'again':<11}{'tokens/s':>12}{'MFU':>8}{'peak, GiB':>12}{'estimate':>12}{'off':>8}")
        for size in options.sizes:
            for compiled in (False, True):
                for checkpointing in get_args(Checkpointing):
                    case = Case(
                        size=size,
                        compile=compiled,
                        checkpointing=checkpointing,
                        micro_batch=options.micro_batch,
                        steps=options.steps,
                    )
                    print(described(case, measure(case, corpus)), flush=True)


if __name__ == "__main__":
    main()
