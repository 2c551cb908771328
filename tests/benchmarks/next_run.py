"""Which run next: error of the forecast against what was spent, when runs are chosen by us, at random, or by size.

    OMP_NUM_THREADS=1 python tests/benchmarks/next_run.py [--random 10]

A pool is the runs of a public ladder below a tenth of its largest compute; held out are the others. A campaign starts from
the pool's cheapest runs (8, or as many up to 13 as give three sizes and three token counts), spends a share of the pool's
FLOPs beyond them on further runs of the pool, and forecasts everything held out. Its error, the mean |log forecast −
log loss|, is taken relative to that of a forecast from the whole pool, and the mean over pools is geometric, of a family's
ladders first: one family, one vote. We choose in batches of an eighth of the runs made, at least 1, and fit again after each.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import pandas as pd

from scaling import compute_flops
from scaling.design import Criterion, Design
from scaling.ensemble import Ensemble, fit_ensemble
from tests.benchmarks.ladders import Ladder, ladders

SHARES = (0.03, 0.10, 0.30)
FIRST, MOST_FIRST = 8, 13
WAYS = ("ours", "per FLOP", "largest first", "smallest first", "random")
FEWEST = 25  # runs of a pool; of fewer, a third of the FLOPs is nearly all runs


class Pool:
    """A ladder cut at a tenth of its largest compute."""

    def __init__(self, ladder: Ladder) -> None:
        cost = np.asarray(compute_flops(ladder.runs["n_params"], ladder.runs["n_tokens"]))
        inside = cost < cost.max() / 10
        order = np.argsort(cost[inside], kind="stable")
        self.name, self.family = ladder.name, ladder.family
        self.runs = ladder.runs[inside].iloc[order].reset_index(drop=True)
        self.cost = cost[inside][order]
        self.held_out = ladder.runs[~inside]

    @property
    def n_first(self) -> int:
        """Runs that a campaign starts from."""
        for n in range(FIRST, MOST_FIRST):
            if min(self.runs[:n]["n_params"].nunique(), self.runs[:n]["n_tokens"].nunique()) >= 3:
                return n
        return MOST_FIRST

    def fitted(self, chosen: list[int]) -> Ensemble:
        return fit_ensemble(self.runs.iloc[sorted(chosen)])

    def error(self, ensemble: Ensemble) -> float:
        """Mean |log forecast − log loss| over what is held out."""
        held = self.held_out
        forecast = ensemble.log_loss(held["n_params"].to_numpy(), held["n_tokens"].to_numpy())
        return float(np.abs(forecast - np.log(held["loss"].to_numpy())).mean())

    def campaign(self, way: str, share: float, seed: int = 0) -> list[int]:
        """The runs that are in hand once a share of the pool's FLOPs is spent."""
        chosen, left = list(range(self.n_first)), share * self.cost.sum()
        generator = np.random.default_rng(seed)
        while True:
            rest = np.setdiff1d(np.arange(len(self.cost)), chosen)
            rest = rest[self.cost[rest] <= left]
            if not rest.size:
                return chosen
            for pick in self._picks(way, rest, chosen, left, generator):
                chosen.append(int(pick))
                left -= self.cost[pick]

    def _picks(
        self, way: str, rest: np.ndarray, chosen: list[int], left: float, generator: np.random.Generator
    ) -> list[int]:
        if way == "random":
            return [int(generator.choice(rest))]
        if way in ("largest first", "smallest first"):
            return [int(rest[-1 if way == "largest first" else 0])]
        made, held = self.runs.iloc[sorted(chosen)], self.held_out
        design = Design.of(self.fitted(chosen), made, held["n_params"].to_numpy(), held["n_tokens"].to_numpy())
        could = self.runs.iloc[rest]
        criterion: Criterion = "variance per FLOP" if way == "per FLOP" else "variance"
        picks = design.greedy(
            could["n_params"].to_numpy(), could["n_tokens"].to_numpy(), self.cost[rest], left, criterion
        )
        return [int(rest[index]) for (index, _), _ in zip(picks, range(max(len(chosen) // 8, 1)), strict=False)]


def measured(pools: list[Pool], n_random: int) -> pd.DataFrame:
    """A row for each pool, way, share and seed: relative error, and the runs in hand."""
    records = []
    for pool in pools:
        started = time.process_time()
        full = pool.error(pool.fitted(list(range(len(pool.cost)))))
        for way in WAYS:
            for share in SHARES:
                for seed in range(n_random if way == "random" else 1):
                    chosen = pool.campaign(way, share, seed)
                    error = pool.error(pool.fitted(chosen))
                    records.append(
                        {
                            "pool": pool.name,
                            "family": pool.family,
                            "way": way,
                            "share": share,
                            "error": error,
                            "relative": error / full,
                            "n_runs": len(chosen),
                        }
                    )
        print(
            f"{pool.name}: {len(pool.cost)} runs, first {pool.n_first}, error of all {full:.2%}, "
            f"{time.process_time() - started:.0f} s CPU",
            flush=True,
        )
    return pd.DataFrame(records)


def summary(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Geometric mean over seeds, over the ladders of a family, over families."""
    logs = table.assign(value=np.log(table[column]))
    for keys in (["way", "share", "family", "pool"], ["way", "share", "family"], ["way", "share"]):
        logs = logs.groupby(keys, as_index=False)["value"].mean()
    return np.exp(logs.pivot_table(index="way", columns="share", values="value")).loc[list(WAYS)]


def spent_to_reach(pool: Pool, way: str, wanted: float, shares: list[float], seed: int = 0) -> float:
    """The least of these shares of the pool's FLOPs after which the error is at most `wanted`, infinite if none."""
    for share in shares:
        if pool.error(pool.fitted(pool.campaign(way, share, seed))) <= wanted:
            return share
    return math.inf


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=10, help="seeds of the random choice")
    parser.add_argument("--out", type=Path, help="write every campaign to this CSV")
    options = parser.parse_args()
    pools = [pool for ladder in ladders() if len((pool := Pool(ladder)).cost) >= FEWEST]
    table = measured(pools, options.random)
    if options.out:
        table.to_csv(options.out, index=False)
    pd.set_option("display.width", 200)
    print("\nerror relative to the whole pool's, geometric mean over families")
    print(summary(table, "relative").round(2).to_string())
    print("\nerror itself, %, geometric mean over families")
    print((100 * summary(table, "error")).round(2).to_string())
    print("\nof each pool, relative error")
    by_pool = table.assign(value=np.log(table["relative"]))
    print(np.exp(by_pool.pivot_table(index="pool", columns=["way", "share"], values="value")).round(2).to_string())


if __name__ == "__main__":
    main()
