"""How fast proxies train: our loop, eager and compiled, beside a plain loop and beside the Lightning Trainer.

    python tests/benchmarks/proxy_speed.py [--widths 32 64 128 256] [--rounds 3]

All train the same decoder on the same batches, 8 sequences of 128 bytes, by AdamW with clipping, in one process on one
thread. The plain loop is what one would write by hand, after nanoGPT: random windows of a memory-mapped file, a Python
schedule, AdamW, clipping. Rounds alternate between the four, and the median counts. The share of the peak is FLOPs of the
matrix products over what plain products of the model's shapes reach.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from muscale.compat import import_lightning
from proxy_models.config import ModelConfig
from proxy_models.corpus import EMBEDDED, Corpus, write_corpus
from proxy_models.decoder import Decoder, next_token_loss
from proxy_models.hyperparameters import Hyperparameters, stem
from proxy_models.numerics import Numerics
from proxy_models.training import Trainer

L = import_lightning()

SEQUENCES, CONTEXT, DEPTH = 8, 128, 2
BATCH_TOKENS = SEQUENCES * CONTEXT
Loop = Callable[[ModelConfig, int], float]  # tokens per second over so many steps


def ours(corpus: Corpus, *, compiled: bool) -> Loop:
    """The platform's loop, its models kept warm as in a sweep."""
    trainer = Trainer(corpus, compile=compiled)

    def run(config: ModelConfig, n_steps: int) -> float:
        numerics = Numerics(model=config, base=config, corpus_key=corpus.key, seed=0, evaluation_tokens=CONTEXT)
        recipe = Hyperparameters(learning_rate=0.004, batch_tokens=BATCH_TOKENS).resolve(10_000 * BATCH_TOKENS)
        return n_steps * BATCH_TOKENS / trainer.train(numerics, stem(recipe, n_steps * BATCH_TOKENS)).seconds

    return run


def random_windows(tokens: np.ndarray) -> torch.Tensor:
    """A batch of windows at random places."""
    starts = torch.randint(len(tokens) - CONTEXT - 1, (SEQUENCES,)).tolist()
    return torch.stack([torch.from_numpy(tokens[s : s + CONTEXT + 1].astype(np.int64)) for s in starts])


def plain(corpus: Corpus) -> Loop:
    """A loop by hand."""

    def run(config: ModelConfig, n_steps: int) -> float:
        model = Decoder(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, betas=(0.9, 0.95), weight_decay=0.1)
        started = time.perf_counter()
        for step in range(n_steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.004 * min(1.0, (step + 1) / 10)
            loss = next_token_loss(model, random_windows(corpus.train))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return n_steps * BATCH_TOKENS / (time.perf_counter() - started)

    return run


class Windows(IterableDataset[torch.Tensor]):
    """Batches of random windows, without end."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield random_windows(self.tokens)


class Module(L.LightningModule):
    """The decoder as one would put it under Lightning."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.marks: list[float] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.marks.append(time.perf_counter())
        loss = next_token_loss(self.model, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.004, betas=(0.9, 0.95), weight_decay=0.1)


def lightning(corpus: Corpus) -> Loop:
    """Lightning's Trainer with its defaults, logging to CSV, no checkpoints."""

    def run(config: ModelConfig, n_steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            module = Module(config)
            trainer = L.Trainer(
                max_steps=n_steps,
                accelerator="cpu",
                gradient_clip_val=1.0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            trainer.fit(module, DataLoader(Windows(corpus.train), batch_size=None))
        return (n_steps - 1) * BATCH_TOKENS / (module.marks[-1] - module.marks[0])

    return run


def peak_flops(config: ModelConfig) -> float:
    """FLOP/s of plain matrix products of the MLP's shape."""
    x, w = torch.randn(BATCH_TOKENS, config.d_model), torch.randn(config.d_model, config.d_ff)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(5):
            x @ w
        best = min(best, (time.perf_counter() - started) / 5)
    return 2 * BATCH_TOKENS * config.d_model * config.d_ff / best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/proxy_speed"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = write_corpus(options.folder / "corpus", EMBEDDED)
    loops = {
        "plain": plain(corpus),
        "lightning": lightning(corpus),
        "ours, eager": ours(corpus, compiled=False),
        "ours, compiled": ours(corpus, compiled=True),
    }
    print(f"{'width':>6}  {'loop':<16}{'tokens/s':>10}{'× plain':>9}{'× lightning':>13}{'of the peak':>13}")
    for width in options.widths:
        config = ModelConfig(d_model=width, n_layers=DEPTH, context_length=CONTEXT)
        n_steps = max(20, round(2.5e12 / (config.train_flops_per_token * BATCH_TOKENS) / 40))
        seen: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            loop(config, 5)  # compiles, and fills caches
        for _ in range(options.rounds):
            for name, loop in loops.items():
                seen[name].append(loop(config, n_steps))
        peak = peak_flops(config)
        rates = {name: statistics.median(values) for name, values in seen.items()}
        for name, rate in rates.items():
            print(
                f"{width:>6}  {name:<16}{rate:>10,.0f}{rate / rates['plain']:>9.2f}{rate / rates['lightning']:>13.2f}"
                f"{rate * config.train_flops_per_token / peak:>13.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
