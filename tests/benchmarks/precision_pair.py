"""By how much does a proxy's loss differ between fp32 and another precision, beside what another seed does?

    python tests/benchmarks/precision_pair.py [--precision bf16] [--width 64] [--tokens 524288] [--seeds 5]

The quickstart's model and hyperparameters on text made here: words that follow each other by a rule, with noise. Both runs of a
pair have the same initial values and batches, so that their difference is rounding alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Precision
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import Trainer
from tests.benchmarks.kept_runs import final_loss


def made_corpus(folder: Path) -> Corpus:
    """Two megabytes of words drawn by a chain of order one over 500 of them."""
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefghijklmnop"), size=generator.integers(2, 8))) for _ in range(500)]
    followers = generator.integers(len(words), size=(len(words), 8))
    (folder / "text").mkdir()
    for number in range(64):
        word, text = 0, []
        for choice in generator.zipf(1.5, size=6000):
            word = int(followers[word, choice % 8])
            text.append(words[word])
        (folder / "text" / f"{number}.txt").write_text(" ".join(text))
    return write_corpus(folder / "tokens", str(folder / "text"), validation_fraction=0.05)


def main() -> None:
    """Train the pairs and print their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = ModelConfig(d_model=options.width, n_layers=2, context_length=128)
    base = replace(model, d_model=32)
    values = Hyperparameters(learning_rate=0.01, batch_tokens=1024)
    exact: list[float] = []
    rounded: list[float] = []
    low: Precision = options.precision
    with tempfile.TemporaryDirectory() as folder:
        corpus = made_corpus(Path(folder))
        trainer = Trainer(corpus, compile=False)
        for seed in range(options.seeds):
            numerics = Numerics(model=model, base=base, corpus_key=corpus.key, seed=seed, evaluation_tokens=65_536)
            for member, losses in ((numerics, exact), (replace(numerics, precision=low), rounded)):
                losses.append(final_loss(trainer, member, values, options.tokens))
            print(f"seed {seed}: fp32 {exact[-1]:.5f}, {low} {rounded[-1]:.5f}, {rounded[-1] / exact[-1] - 1:+.3%}")
    differences = [in_low / in_full - 1 for in_low, in_full in zip(rounded, exact, strict=True)]
    print(f"{low} against fp32: mean {statistics.mean(differences):+.3%}, sd {statistics.stdev(differences):.3%}")
    print(f"fp32 from seed to seed: sd {statistics.stdev(exact) / statistics.mean(exact):.3%}")


if __name__ == "__main__":
    main()
