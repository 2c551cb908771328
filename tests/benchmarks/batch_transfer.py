"""What does a rate tuned at a small batch lose at one eight times larger, and how much of it does a rule of the batch bring back?

    python tests/benchmarks/batch_transfer.py [--seeds 2] [--folder runs/benchmarks/batch_transfer]

The quickstart's model on the standard library's own source: a grid of rates at width 64 and 512 tokens a step, as a sweep would
have it, and grids at width 128 and twice the tokens with 512 and with 4,096 a step, with and without a beta2 or beta1 of a shorter
half-life in steps. The rate of the small grids is transferred by each rule, and its loss read from the parabola of the large grid; the
horizon law's prior carries it to the longer run. Every finished run is kept in the folder; the same command goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import Optimum, fit_optimum
from scaling.optima.horizon import PRIOR
from tests.benchmarks.kept_runs import parser_of, row_of, trained

BASE = ModelConfig(d_model=64, n_layers=2, head_dim=16, context_length=128)
SMALL, LARGE = 512, 4096
RATIO = LARGE / SMALL
BETA1, BETA2 = 0.9, 0.95
RULES = {"uncorrected": 0.0, "Step Law's mean slope, .3": 0.3, "square root": 0.5}


@dataclass(frozen=True, kw_only=True)
class Task:
    width: int
    batch_tokens: int
    n_tokens: int
    beta1: float
    beta2: float
    log2_rate: float
    seed: int


LARGE_RATES = [-8.0, -7.0, -6.0, -5.0, -4.0]
GRIDS: dict[str, tuple[tuple[int, int, int, float, float], list[float]]] = {
    "proxy": ((64, SMALL, 262_144, BETA1, BETA2), [-9.0, -8.0, -7.0, -6.0, -5.0]),
    "small batch": ((128, SMALL, 524_288, BETA1, BETA2), [-9.0, -8.0, -7.0, -6.0, -5.0]),
    "small batch, beta1 .8": ((128, SMALL, 524_288, 0.8, BETA2), [-9.0, -8.0, -7.0, -6.0, -5.0]),
    "large batch": ((128, LARGE, 524_288, BETA1, BETA2), LARGE_RATES),
    "large batch, beta2 of the same half-life": ((128, LARGE, 524_288, BETA1, BETA2**RATIO), LARGE_RATES),
    "large batch, beta1 .8": ((128, LARGE, 524_288, 0.8, BETA2), LARGE_RATES),
    "large batch, beta1 of the same half-life": ((128, LARGE, 524_288, BETA1**RATIO, BETA2), LARGE_RATES),
}
"""Width, tokens of a step and of the run, beta1, beta2; log2 of the rates."""


def tasks(n_seeds: int) -> list[Task]:
    """Every run, the large batch's first."""
    return [
        Task(width=width, batch_tokens=batch, n_tokens=n_tokens, beta1=beta1, beta2=beta2, log2_rate=rate, seed=seed)
        for seed in range(n_seeds)
        for (width, batch, n_tokens, beta1, beta2), rates in reversed(GRIDS.values())
        for rate in rates
    ]


def train(corpus: Path, task: Task) -> dict[str, Any]:
    values = Hyperparameters(
        learning_rate=2.0**task.log2_rate, batch_tokens=task.batch_tokens, beta1=task.beta1, beta2=task.beta2
    )
    model = ModelFamily(base=BASE).at(width=task.width)
    return row_of(corpus, values, task.n_tokens, model=model, base=BASE, seed=task.seed)


def main() -> None:
    options = parser_of(__doc__, "batch_transfer", seeds=2).parse_args()
    rows = trained(options, tasks(options.seeds), train)
    optima: dict[str, Optimum] = {}
    for name, (case, _) in GRIDS.items():
        grid = rows[(rows[["width", "batch_tokens", "n_tokens", "beta1", "beta2"]] == list(case)).all(axis=1)]
        best = optima[name] = fit_optimum(2.0 ** grid["log2_rate"], grid["loss"], seeds=grid["seed"].tolist())
        least = grid.groupby("log2_rate")["loss"].mean().min()
        print(
            f"{name:<42} log2 rate {best.log2_rate:+.2f} ± {best.stderr:.2f}, loss {best.loss:.4f}, least {least:.4f}"
        )
    slope = (optima["large batch"].log2_rate - optima["small batch"].log2_rate) / np.log2(RATIO)
    print(f"slope of log2 rate in log2 batch at width 128: {slope:.2f}")
    reference = optima["large batch"].loss
    for name in (name for name in optima if name.startswith("large batch")):
        for rule, exponent in RULES.items():
            transferred = optima["proxy"].log2_rate - PRIOR[0] + exponent * np.log2(RATIO)
            loss = optima[name].loss * (1 + float(optima[name].regret(2.0**transferred)))
            print(
                f"{name:<42} {rule:<28} log2 rate {transferred:+.2f}: {loss / reference - 1:+.2%} from the best of the large batch"
            )


if __name__ == "__main__":
    main()
