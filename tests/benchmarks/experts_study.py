"""A study of a mixture of 8 experts, by the command line: sweep, transfer check, ladder, plan, and a full run on two ranks.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.experts_study [--folder runs/benchmarks/experts_study]

It writes a study file and calls `muscale run`, which promotes only if the gate is open. The same command continues. Half an hour on
two busy cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

STUDY = """
name = "experts"

[corpus]
source = "python-stdlib"
evaluation_tokens = 32_768

[model]
d_model = 64
n_layers = 2
head_dim = 16
context_length = 128
n_experts = 8
experts_per_token = 2
expert_ratio = 1.0
expert_scheme = "sqrt_gate"     # its best rate drifts least with the width (docs/experts.md)

[hyperparameters]
learning_rate = 0.0078
batch_tokens = 1024
warmup_floor_tokens = 10_240

[sweep]
trials = 12
n_tokens = 262_144
rungs = 3

[sweep.space]
learning_rate = { distribution = "log_uniform", low = 0.002, high = 0.06 }

[transfer]
widths = [32, 64, 128]
n_tokens = 262_144
rates = 5
octaves = 4.0
horizons = [1.0, 2.0, 4.0]
seeds = [0, 1]

[ladder]
stems = [
  { width = 32, n_tokens = 655_360 },
  { width = 32, n_tokens = 1_310_720 },
  { width = 48, n_tokens = 655_360 },
  { width = 64, n_tokens = 491_520 },
  { width = 64, n_tokens = 983_040 },
  { width = 80, n_tokens = 655_360 },
]

[plan]
compute_flops = 2.4e12
shapes = [{ width = 96 }]

[promote]
workers = 2
expert_parallel = 2

[tracking]
wandb = "off"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/experts_study"))
    path = parser.parse_args().folder.resolve() / "study.toml"
    if not path.exists():
        path.parent.mkdir(parents=True)
        path.write_text(STUDY)
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "muscale", "run", str(path)], check=False)
    print(f"exit code {ended.returncode} after {(time.monotonic() - begun) / 60:.0f} minutes")
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
