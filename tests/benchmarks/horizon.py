"""Does a narrow proxy, full long before the full run, tell its best rate too low, and does a second, wider one mend it?

    OMP_NUM_THREADS=1 python tests/benchmarks/horizon.py [--seeds 3] [--folder runs/benchmarks/horizon]

The quickstart's recipe with proxies of width 16 and 32: grids of rates at 256 steps and at more, among them width 16 at the full
run's tokens and width 32 at its tokens per parameter; and the grid of the full size, width 48, whose fitted minimum is the
oracle. Printed: each optimum, and by how many octaves each law misses the oracle. Every finished run is kept in the folder; the
same command goes on where it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import fit_horizon_law, fit_optimum
from tests.benchmarks.kept_runs import parser_of, row_of, trained

BASE = ModelConfig(d_model=16, n_layers=2, head_dim=16, context_length=128)
FAMILY = ModelFamily(base=BASE)
STEP = 1024
FULL = (48, 1408 * STEP)
TOKENS_PER_PARAM = FULL[1] / FAMILY.at(width=FULL[0]).n_params
SHORT = 256 * STEP
WIDER = (32, round(TOKENS_PER_PARAM * FAMILY.at(width=32).n_params / STEP) * STEP)
GRIDS = ((16, FULL[1]), FULL, WIDER, (16, SHORT), (32, SHORT), (48, SHORT))
"""Width and tokens."""
RATES = (-8.0, -7.0, -6.0, -5.0, -4.0)


@dataclass(frozen=True, kw_only=True)
class Task:
    width: int
    n_tokens: int
    log2_rate: float
    seed: int


def train(corpus: Path, task: Task) -> dict[str, Any]:
    values = Hyperparameters(
        learning_rate=2.0**task.log2_rate, batch_tokens=STEP, warmup_floor_tokens=10 * STEP, cooldown_fraction=0.15
    )
    model = FAMILY.at(width=task.width)
    return row_of(corpus, values, task.n_tokens, compile=True, model=model, base=BASE, seed=task.seed)


def main() -> None:
    options = parser_of(__doc__, "horizon", seeds=3).parse_args()
    tasks = [
        Task(width=width, n_tokens=n_tokens, log2_rate=rate, seed=seed)
        for seed in range(options.seeds)
        for width, n_tokens in GRIDS
        for rate in RATES
    ]
    report(trained(options, tasks, train).assign(rate=lambda rows: 2.0 ** rows["log2_rate"]))


def report(rows: pd.DataFrame) -> None:
    """The optima and the laws' misses, of each seed."""
    for seed, own in rows.groupby("seed"):
        print(f"seed {seed}")
        for (width, n_tokens), grid in own.groupby(["width", "n_tokens"]):
            best = fit_optimum(grid["rate"], grid["loss"])
            ratio = n_tokens / FAMILY.at(width=width).n_params
            print(
                f"  width {width}, {n_tokens:>9,} tokens, {ratio:5.1f} a parameter: "
                f"{best.log2_rate:+.2f} ± {best.stderr:.2f} ({best.status}), {best.loss:.4f}",
                grid.sort_values("rate")["loss"].round(4).tolist(),
            )
        oracle = fit_optimum(*_grid(own, FULL))
        for name, law_rows in laws(own).items():
            law = fit_horizon_law(law_rows)
            miss = math.log2(law.rate(FULL[1])) - oracle.log2_rate
            print(f"  {name:<20} {miss:+.2f} octaves from the oracle; rate ∝ D^{-law.exponent:.2f} ± {law.stderr:.2f}")


def laws(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What each law is fitted to; none sees a long run of the full size."""
    short, narrow = rows["n_tokens"] == SHORT, rows["width"] == GRIDS[0][0]
    wider = (rows["width"] == WIDER[0]) & (rows["n_tokens"] == WIDER[1])
    return {"the narrow width's": rows[short | narrow], "two widths'": rows[short | narrow | wider]}


def _grid(rows: pd.DataFrame, grid: tuple[int, int]) -> tuple[pd.Series, pd.Series]:
    own = rows[(rows["width"] == grid[0]) & (rows["n_tokens"] == grid[1])]
    return own["rate"], own["loss"]


if __name__ == "__main__":
    main()
