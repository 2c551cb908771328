"""What does a timescale of the decay lose that was tuned at eight times fewer tokens per parameter, and what does a law bring back?

    python tests/benchmarks/tau_transfer.py [--seeds 2] [--folder runs/benchmarks/tau_transfer]

A decoder of width 32 on the standard library's own source: a grid of timescales at 7.8 tokens per parameter, as a sweep would have
it, and one at 63, the rate transferred by the horizon law's prior. The proxy's best timescale is taken to the long run as it is and by
tau ∝ (tokens per parameter)^-.527 (Power Lines, arXiv 2505.13738); losses between the grid's points are interpolated. Every
finished run is kept in the folder; the same command goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import fit_optimum
from scaling.optima.horizon import PRIOR
from tests.benchmarks.kept_runs import parser_of, row_of, trained

MODEL = ModelConfig(d_model=32, n_layers=2, head_dim=16, context_length=128)
BATCH_TOKENS, PROXY, RATIO = 1024, 262_144, 8
LOG2_RATE = -6.5
"""Near the best of the proxy at a timescale of half a run."""
EXPONENTS = {"as it is": 0.0, "Power Lines": -0.527}
TAUS = [-5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0]
"""Their log2, as shares of the run."""


@dataclass(frozen=True, kw_only=True)
class Task:
    n_tokens: int
    log2_tau: float
    log2_rate: float
    seed: int


def tasks(n_seeds: int) -> list[Task]:
    """Every run, the long ones first."""
    return [
        Task(n_tokens=PROXY * ratio, log2_tau=tau, log2_rate=round(LOG2_RATE - PRIOR[0] * np.log2(ratio), 6), seed=seed)
        for ratio in (RATIO, 1)
        for seed in range(n_seeds)
        for tau in TAUS
    ]


def train(corpus: Path, task: Task) -> dict[str, Any]:
    values = Hyperparameters(
        learning_rate=2.0**task.log2_rate, batch_tokens=BATCH_TOKENS, weight_decay_tau=2.0**task.log2_tau
    )
    return row_of(corpus, values, task.n_tokens, model=MODEL, base=MODEL, seed=task.seed, evaluation_tokens=262_144)


def main() -> None:
    options = parser_of(__doc__, "tau_transfer", seeds=2).parse_args()
    rows = trained(options, tasks(options.seeds), train)
    optima = {}
    for n_tokens, grid in rows.groupby("n_tokens"):
        best = optima[n_tokens] = fit_optimum(2.0 ** grid["log2_tau"], grid["loss"], seeds=grid["seed"].tolist())
        print(
            f"{n_tokens / MODEL.n_params:.1f} tokens per parameter: log2 tau {best.log2_rate:+.2f} ± {best.stderr:.2f}"
        )
        print(grid.pivot_table("loss", index="seed", columns="log2_tau").round(4).to_string())
    shift = (optima[PROXY * RATIO].log2_rate - optima[PROXY].log2_rate) / np.log2(RATIO)
    print(f"exponent of tau in tokens per parameter: {shift:.2f}")
    means = rows[rows["n_tokens"] == PROXY * RATIO].groupby("log2_tau")["loss"].mean()
    for rule, exponent in EXPONENTS.items():
        tau = optima[PROXY].log2_rate + exponent * np.log2(RATIO)
        loss = float(np.interp(tau, means.index, means))
        print(f"{rule:<12} log2 tau {tau:+.2f}: {loss / means.min() - 1:+.2%} above the grid's best")


if __name__ == "__main__":
    main()
