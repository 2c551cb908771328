"""Forecasts of the memorised share of a full run's training text, by the times that it was read, against measured shares.

The text is the standard library's source with planted sentences of random words, which occur 1 to 2,048 times. A ladder of three
widths is measured, and the shares of a wider and longer run are forecast and registered before it begins, for three seeds.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.memorisation [--seeds 0 1 2] [--folder runs/benchmarks/memorisation]

The same command continues an interrupted study. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd

from muscale import Study
from muscale.actors.cluster import staying_cluster

N_SOURCE, N_EACH, MOST_COPIES, N_WORDS = 2_000_000, 300_000, 2048, 24
"""Bytes of source text and of each number of copies, the largest number of copies, and words of a sentence."""
STUDY = """
name = "memorisation"

[corpus]
source = "text"
kind = "jsonl"
validation_fraction = 0.05
evaluation_tokens = 32_768

[model]
d_model = 32
n_layers = 2
head_dim = 16
context_length = 256

[hyperparameters]
learning_rate = 0.01
batch_tokens = 2048

[sweep]
trials = 4
n_tokens = 131_072
searcher = "quasi_random"
scheduler = "none"
top_k = 1
n_finalists = 1
n_seeds = 1

[sweep.space]
learning_rate = { distribution = "log_uniform", low = 0.003, high = 0.03 }

[transfer]
widths = [32, 48]
n_tokens = 131_072
rates = 5
horizons = [0.5, 1.0]

[ladder]
stems = [
  { width = 32, n_tokens = 2_097_152, branches = 3 },
  { width = 48, n_tokens = 2_097_152, branches = 3 },
  { width = 64, n_tokens = 2_097_152, branches = 3 },
]

[scores]
memorisation = true

[plan]
compute_flops = 5e12
shapes = [{ width = 96 }]

[tracking]
wandb = "off"
"""


def write(folder: Path) -> None:
    """Write the documents: pieces of source text, and planted sentences."""
    rng = np.random.default_rng(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    source = "\n".join(path.read_text(errors="ignore") for path in files)[:N_SOURCE]
    documents = [source[start : start + 2000] for start in range(0, len(source), 2000)]
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, 3 + n % 4)) for n in range(512)]
    copies = 1
    while copies <= MOST_COPIES:
        size = 0
        while size < N_EACH:
            sentence = " ".join(rng.choice(words, N_WORDS))
            documents += [sentence] * copies
            size += len(sentence) * copies
        copies *= 2
    order = rng.permutation(len(documents))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": documents[i]}) + "\n" for i in order))


def main() -> None:
    """Write the text, run the study and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/memorisation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    path = options.folder.resolve() / "study.toml"
    if not path.exists():
        write(path.parent / "text")
        path.write_text(STUDY)
    tables = []
    with staying_cluster():
        for seed in options.seeds:
            study = Study.open(path, [f"promote.seed={seed}"], trains=True)
            study.run(force=True)
            tables.append(study.evaluate().table.assign(seed=seed))
    table = pd.concat(tables, ignore_index=True).sort_values("task", kind="stable")
    shown = ["seed", "task", "value", "low", "high", "measured", "standard_error", "inside"]
    print(table[shown].to_string(index=False, float_format="{:.3f}".format, na_rep="–"))
    known = table["inside"].dropna()
    print(f"{int(known.sum())} of {len(known)} measured shares are inside their 90 % interval")


if __name__ == "__main__":
    main()
