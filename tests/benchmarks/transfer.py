"""Does the best learning rate stay put? muP against standard parametrization over 8× in width, and over 4× in depth.

    python tests/benchmarks/transfer.py [--seeds 3] [--folder runs/benchmarks/transfer]

Pre-norm decoders (RMSNorm, rotary, SwiGLU, heads of 16, bytes, context 128) are trained for 200 steps of 8 sequences on
the standard library's own source, at a grid of rates and several seeds. The optimum of each shape is the minimum of a
parabola in log2(rate). Every finished run is kept in the folder; the same command goes on where it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import Scheme
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import fit_optimum, fit_transfer
from tests.benchmarks.kept_runs import parser_of, row_of, trained

BASE = ModelConfig(d_model=64, n_layers=2)
BATCH_TOKENS, N_TOKENS = 1024, 200 * 1024
RATES = [-9.0 + 0.75 * k for k in range(7)]  # log2
WIDTHS = (32, 64, 128, 256)
DEPTHS = (2, 4, 8)
STANDARD_SHIFT = {32: 0.0, 64: 0.0, 128: -0.75, 256: -1.5}  # of the grid, towards standard's known optima


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of one of the four experiments."""

    experiment: str
    size: int  # width or depth
    log2_rate: float
    seed: int

    @property
    def numerics(self) -> tuple[ModelConfig, ModelConfig, Scheme]:
        family = ModelFamily(base=BASE)
        if self.experiment in ("mup", "standard"):
            return family.at(width=self.size), BASE, "mup" if self.experiment == "mup" else "standard"
        model = family.at(width=32, depth=self.size)
        scaled = self.experiment == "depth scaled"
        return model, BASE if scaled else family.at(depth=self.size), "mup"

    @property
    def cost(self) -> float:
        return 6.0 * self.numerics[0].n_params * N_TOKENS


def tasks(n_seeds: int) -> list[Task]:
    """Every run, the costliest first."""
    wanted = []
    for seed in range(n_seeds):
        for rate in RATES:
            for width in WIDTHS:
                wanted.append(Task(experiment="mup", size=width, log2_rate=rate, seed=seed))
                shifted = rate + STANDARD_SHIFT[width]
                wanted.append(Task(experiment="standard", size=width, log2_rate=shifted, seed=seed))
            for depth in DEPTHS:
                wanted.append(Task(experiment="depth scaled", size=depth, log2_rate=rate, seed=seed))
                if depth > BASE.n_layers:  # at the base's depth the two are the same run
                    wanted.append(Task(experiment="depth unscaled", size=depth, log2_rate=rate, seed=seed))
    return sorted(wanted, key=lambda task: task.cost, reverse=True)


def train(corpus: Path, task: Task) -> dict[str, Any]:
    values = Hyperparameters(learning_rate=2.0**task.log2_rate, batch_tokens=BATCH_TOKENS)
    model, base, scheme = task.numerics
    return row_of(corpus, values, N_TOKENS, model=model, base=base, scheme=scheme, seed=task.seed)


def report(rows: pd.DataFrame, experiment: str) -> None:
    """Optima, drift with its 90 % interval, and what carrying the smallest's optimum to the largest gives up."""
    part = rows[rows["experiment"] == experiment]
    if experiment == "depth unscaled":
        shared = rows[(rows["experiment"] == "depth scaled") & (rows["size"] == BASE.n_layers)]
        part = pd.concat([part, shared])
    table = part.assign(width=part["size"], rate=2.0 ** part["log2_rate"])[["width", "rate", "loss", "seed"]]
    transfer = fit_transfer(table)
    given_up, drifts = [], []
    for _, of_seed in table.groupby("seed"):
        narrow, wide = (
            fit_optimum(group["rate"], group["loss"])
            for group in (of_seed[of_seed["width"] == size] for size in (table["width"].min(), table["width"].max()))
        )
        given_up.append(float(wide.loss * wide.regret(narrow.rate)))
        drifts.append(wide.log2_rate - narrow.log2_rate)
    optima = "  ".join(
        f"{int(size)}: {optimum.log2_rate:+.2f} ± {optimum.stderr:.2f} (loss {optimum.loss:.4f}, {optimum.status})"
        for size, optimum in transfer.optima.items()
    )
    low, high = transfer.interval
    error = np.std(given_up, ddof=1) / math.sqrt(len(given_up)) if len(given_up) > 1 else math.nan
    print(f"\n{experiment}")
    print(f"  log2 optimum    {optima}")
    print(f"  drift           {transfer.drift_octaves:+.2f} octaves, 90 % [{low:+.2f}, {high:+.2f}]; by seed", end=" ")
    print(", ".join(f"{drift:+.2f}" for drift in drifts))
    print(
        f"  given up        {np.mean(given_up):.4f} ± {error:.4f} nats by carrying the smallest's optimum to the largest"
    )
    print(f"  wider is better {transfer.larger_is_better}; verdict {transfer.verdict}", *transfer.reasons, sep="; ")


def main() -> None:
    options = parser_of(__doc__, "transfer", seeds=3).parse_args()
    rows = trained(options, tasks(options.seeds), train)
    for experiment in ("mup", "standard", "depth scaled", "depth unscaled"):
        report(rows, experiment)


if __name__ == "__main__":
    main()
