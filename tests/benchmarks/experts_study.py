"""A study of a mixture of 8 experts, by the command line: sweep, transfer check, ladder, plan, and a full run on two ranks.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.experts_study [--several] [--folder runs/benchmarks/experts_study]

It writes a study file and calls `muscale run`, which promotes only if the gate is open. The same command continues. 15 minutes on
two quiet cores. With --several, the ladder has 4, 8 and 16 experts, so that its law is one of experts; the transfer check also
has grids over the sparsity, and the plan chooses between 8 and 16 experts.
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


_ONE = STUDY[STUDY.index("stems = [") : STUDY.index("[plan]")]
_SEVERAL = (
    "stems = [\n"
    + "".join(
        f"  {{ width = {width}, n_experts = {n_experts}, n_tokens = {n_tokens} }},\n"
        for width, n_tokens in ((32, 655_360), (32, 1_310_720), (48, 655_360), (64, 983_040))
        for n_experts in (4, 8, 16)
    )
    + "]\n\n"
)


def study(*, several: bool) -> str:
    """Return the study file."""
    if not several:
        return STUDY
    shapes = ", ".join(f"{{ width = 96, n_experts = {n_experts} }}" for n_experts in (8, 16))
    text = STUDY.replace(_ONE, _SEVERAL).replace("{ width = 96 }", shapes)
    return text.replace("seeds = [0, 1]\n", "seeds = [0, 1]\nsparsities = [2, 4, 8]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/experts_study"))
    parser.add_argument("--several", action="store_true", help="a ladder of several numbers of experts")
    asked = parser.parse_args()
    path = asked.folder.resolve() / "study.toml"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(study(several=asked.several))
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "muscale", "run", str(path)], check=False)
    print(f"exit code {ended.returncode} after {(time.monotonic() - begun) / 60:.0f} minutes")
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
