"""Forecasts of task scores against measured ones: a study on two cores with tasks that its models can learn.

Every run of the ladder is scored at five checkpoints, with three seeds. The full run's scores are forecast and registered before it
starts, then measured, for three seeds.

    python tests/benchmarks/task_scores.py [--folder runs/benchmarks/task_scores]     # an hour on two cores
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from muscale import Study
from tests.benchmarks import task_corpus

N_CHARACTERS = 20_000_000
STUDY = """
name = "task scores"

[corpus]
source = "text"
kind = "jsonl"
tokenizer = "bpe"
validation_fraction = 0.02
evaluation_tokens = 16_384

[model]
d_model = 32
n_layers = 2
head_dim = 8
context_length = 64
vocab_size = 512

[hyperparameters]
learning_rate = 0.02
batch_tokens = 2048

[check]
widths = [16, 32, 64, 128]

[sweep]
trials = 6
n_tokens = 131_072
searcher = "random"
scheduler = "none"
top_k = 1
n_finalists = 1
n_seeds = 1

[sweep.space]
learning_rate = { distribution = "log_uniform", low = 0.005, high = 0.06 }

[transfer]
widths = [16, 32, 48]
n_tokens = 131_072
rates = 5
horizons = [0.5, 1.0]

[ladder]
stems = [
  { width = 16, n_tokens = 524_288, branches = 3 },
  { width = 24, n_tokens = 786_432, branches = 3 },
  { width = 32, n_tokens = 1_048_576, branches = 3 },
  { width = 40, n_tokens = 1_310_720, branches = 3 },
]
seeds = [0, 1, 2]

[scores]
tasks = ["grammar", "sums", "turning", "names", "code"]
prompts = ["the small dogs near the king", "two three plus one four is", "turn b c d f g h :"]
sample_tokens = 16
quantised_bits = [8, 4]
ablation = "layers"

[plan]
compute_flops = 1.5e12

[tracking]
wandb = "off"
"""


def main() -> None:
    """Write the text and the tasks, run the study and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/task_scores"))
    folder = parser.parse_args().folder
    path = folder / "study.toml"
    if not path.exists():
        task_corpus.write(folder, N_CHARACTERS)
        path.write_text(STUDY)
    tables = []
    for seed in range(3):
        study = Study.open(path, [f"promote.seed={seed}"], trains=True)
        study.run(force=True)
        tables.append(study.evaluate().table.assign(seed=seed))
    table = pd.concat(tables, ignore_index=True)
    shown = [
        "seed",
        "task",
        "metric",
        "value",
        "low",
        "high",
        "measured",
        "standard_error",
        "inside",
        "signal_to_noise",
        "method",
    ]
    print(table[shown].to_string(index=False, float_format="{:.3f}".format, na_rep="–"))
    known = table["inside"].dropna()
    print(f"{int(known.sum())} of {len(known)} measured scores are inside their 90 % interval")


if __name__ == "__main__":
    main()
