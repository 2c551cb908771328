"""How often 90 % intervals hold what was planted: the best size of a decision, isoFLOPs, a downstream metric.

    python tests/benchmarks/interval_coverage.py [--sets 40]

Each set is a planted law with other noise. Forty sets tell a share of 90 % to within 5 %; they take about two minutes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from scaling import Chinchilla, decide, fit, fit_downstream, fit_isoflops

PLANTED = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)
EVEN = Chinchilla().law(E=1.8, A=400.0, B=1600.0, alpha=0.34, beta=0.34)
BUDGETS = (1e18, 3e18, 1e19, 3e19, 1e20)
Held = tuple[str, bool]


def decisions(seed: int) -> Iterator[Held]:
    """Ladders of twenty runs, the largest of 1.9e19 FLOPs; the best size at five and five hundred times it."""
    sizes, ratios = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0]))
    for noise in (0.002, 0.006):
        error = noise * np.random.default_rng(seed).standard_normal(20)
        runs = pd.DataFrame({"n_params": sizes, "n_tokens": sizes * ratios})
        runs["loss"] = PLANTED.loss(runs["n_params"], runs["n_tokens"]) * np.exp(error)
        law = fit(runs, n_params_convention="total", n_bootstrap=2)
        for flops in (1e20, 1e22):
            found = decide(law, flops).intervals
            assert found is not None
            low, high = found.loc["n_params", ["low", "high"]]
            yield f"decide, scatter {noise}, {flops:.0e} FLOPs", low <= PLANTED.allocate(flops).n_params <= high


def isoflops(seed: int) -> Iterator[Held]:
    """Five budgets over two decades, sizes over four octaves around the best; the exponent, and N* a hundred times on."""
    for n in (5, 7, 9):
        budget = np.repeat(BUDGETS, n)
        best = np.repeat([EVEN.allocate(flops).n_params for flops in BUDGETS], n)
        runs = pd.DataFrame({"n_params": best * np.tile(2 ** np.linspace(-2, 2, n), len(BUDGETS))})
        runs["n_tokens"] = budget / 6 / runs["n_params"]
        error = 0.002 * np.random.default_rng(seed).standard_normal(len(runs))
        runs["loss"] = EVEN.loss(runs["n_params"], runs["n_tokens"]) * np.exp(error)
        found = fit_isoflops(runs, n_params_convention="total", n_bootstrap=100).intervals(1e22)
        for name, true in (("params_exponent", 0.5), ("n_params", EVEN.allocate(1e22).n_params)):
            yield f"isoFLOPs of {n} sizes, {name}", found.loc[name, "low"] < true < found.loc[name, "high"]


def metrics(seed: int) -> Iterator[Held]:
    """Accuracy from .25 to .9, half-way at 2.4; a further run .3 nats below the least loss."""
    for n, least, given in itertools.product((12, 24, 60), (1.8, 2.2), ({}, {"chance": 0.25})):
        noise = 0.01 * np.random.default_rng(seed).standard_normal(n + 1)
        loss = np.append(np.linspace(least, 3.6, n), least - 0.3)
        accuracy = np.clip(0.25 + 0.65 / (1 + np.exp((loss - 2.4) / 0.25)) + noise, 0, 1)
        rows = pd.DataFrame({"loss": loss[:-1], "accuracy": accuracy[:-1]})
        low, high = fit_downstream(rows, **given).interval(loss[-1])  # type: ignore[arg-type]
        yield f"downstream, {n} losses from {least}{', chance given' if given else ''}", low <= accuracy[-1] <= high


def main() -> None:
    """Print the share held of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=40, help="planted sets of each kind (default: 40)")
    sets = parser.parse_args().sets
    held: dict[str, list[bool]] = {}
    for seed in track(range(sets), "planted sets"):
        for name, inside in itertools.chain(decisions(seed), isoflops(seed), metrics(seed)):
            held.setdefault(name, []).append(bool(inside))
    table = Table("90 % interval of", "held", title=f"{sets} planted sets")
    for name, each in held.items():
        table.add_row(name, f"{np.mean(each):.0%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
