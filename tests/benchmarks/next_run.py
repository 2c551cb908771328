"""Which run next: error of the forecast against what was spent, when runs are chosen by us, at random, or by size.

    OMP_NUM_THREADS=1 python tests/benchmarks/next_run.py [--random 4] [--csv FILE]

A pool is the runs of a public ladder below a tenth of its largest compute; held out are the others. A campaign starts from
the pool's cheapest runs (8, and again 12; in both cases up to 13 until there are three sizes and three token counts), spends
a share of the pool's FLOPs beyond them on further runs of the pool, and forecasts everything held out. Its error, the mean
|log forecast − log loss|, is taken relative to that of a forecast from the whole pool. Means are geometric: over starts and
seeds, then the ladders of a family, then families. We choose in batches of a quarter of the runs made and fit again after each.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling import compute_flops, fit, next_runs
from scaling.decisions.design import Criterion, Design
from scaling.fits.ensemble import Ensemble, fit_ensemble
from tests.benchmarks.ladders import Ladder, ladders

SHARES = (0.03, 0.10, 0.30)
STARTS, MOST_FIRST = (8, 12), 13
WAYS = ("ours", "per FLOP", "largest first", "smallest first", "random")
FEWEST = 25
"""Runs of a pool: of fewer, campaigns differ by two or three runs."""
WANTED = (1.5, 1.2)
"""Errors to be reached, of the whole pool's."""


class Pool:
    """A ladder cut at a tenth of its largest compute: what could be run, cheapest first, and what is held out."""

    def __init__(self, ladder: Ladder) -> None:
        cost = np.asarray(compute_flops(ladder.runs["n_params"], ladder.runs["n_tokens"]))
        inside = cost < cost.max() / 10
        order = np.argsort(cost[inside], kind="stable")
        self.name, self.family, self.annealed = ladder.name, ladder.family, ladder.annealed
        self.runs = ladder.runs[inside].iloc[order].reset_index(drop=True)
        self.cost = cost[inside][order]
        self.held_out = ladder.runs[~inside]

    def first(self, start: int) -> list[int]:
        """The runs that a campaign starts from."""
        for n in range(start, MOST_FIRST):
            if min(self.runs[:n]["n_params"].nunique(), self.runs[:n]["n_tokens"].nunique()) >= 3:
                return list(range(n))
        return list(range(MOST_FIRST))

    def fitted(self, chosen: list[int]) -> Ensemble:
        """The forecast from some of the runs."""
        return fit_ensemble(self.runs.iloc[sorted(chosen)])

    def error(self, ensemble: Ensemble) -> float:
        """Mean |log forecast − log loss| over what is held out."""
        forecast = ensemble.log_loss(*self.points(self.held_out))
        return float(np.abs(forecast - np.log(self.held_out["loss"].to_numpy())).mean())

    def points(self, runs: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """N and D."""
        return runs["n_params"].to_numpy(), runs["n_tokens"].to_numpy()

    def campaign(self, way: str, share: float, start: int, seed: int = 0) -> list[int]:
        """The runs in hand once a share of the pool's FLOPs is spent."""
        chosen, left = self.first(start), share * self.cost.sum()
        generator = np.random.default_rng(seed)
        while True:
            rest = np.setdiff1d(np.arange(len(self.cost)), chosen)
            rest = rest[self.cost[rest] <= left]
            if not rest.size:
                return chosen
            if way == "random":
                picks = [int(generator.choice(rest))]
            elif way in ("largest first", "smallest first"):
                picks = [int(rest[-1 if way == "largest first" else 0])]
            else:
                picks = self.designed("variance per FLOP" if way == "per FLOP" else "variance", rest, chosen, left)
            chosen += picks
            left -= self.cost[picks].sum()

    def designed(self, criterion: Criterion, rest: NDArray[np.int64], chosen: list[int], left: float) -> list[int]:
        """A batch as `scaling.next_runs` chooses it, of all that is held out as targets."""
        design = Design.of(self.fitted(chosen), self.runs.iloc[sorted(chosen)], *self.points(self.held_out))
        picks = design.greedy(*self.points(self.runs.iloc[rest]), self.cost[rest], left, criterion)
        return [int(rest[index]) for _, (index, _) in zip(range(max(len(chosen) // 4, 1)), picks, strict=False)]


def measured(pool: Pool, n_random: int) -> pd.DataFrame:
    """A row for each way, share, start and seed: error, and the same relative to the whole pool's."""
    whole = pool.error(pool.fitted(list(range(len(pool.cost)))))
    records = [
        {
            "pool": pool.name,
            "family": pool.family,
            "annealed": pool.annealed,
            "way": way,
            "share": share,
            "start": start,
            "whole": whole,
            "n_runs": len(chosen := pool.campaign(way, share, start, seed)),
            "relative": pool.error(pool.fitted(chosen)) / whole,
        }
        for way in WAYS
        for share in SHARES
        for start in STARTS
        for seed in range(n_random if way == "random" else 1)
    ]
    return pd.DataFrame(records)


def summary(table: pd.DataFrame, columns: str, values: str) -> pd.DataFrame:
    """Geometric mean of `values`: over starts and seeds, over the ladders of a family, over families."""
    logs = table.assign(value=np.log(table[values]))
    for keys in (["way", columns, "family", "pool"], ["way", columns, "family"], ["way", columns]):
        logs = logs.groupby(keys, as_index=False)["value"].mean()
    return np.exp(logs.pivot_table(index="way", columns=columns, values="value")).loc[list(WAYS)]


def spent_to_reach(table: pd.DataFrame, wanted: float) -> pd.DataFrame:
    """The least of the shares at which a pool's mean relative error is at most `wanted`; 1, the whole pool, if none."""
    keys = ["way", "family", "pool"]
    logs = table.assign(value=np.log(table["relative"])).groupby([*keys, "share"], as_index=False)["value"].mean()
    reached = logs[logs["value"] <= np.log(wanted)].groupby(keys)["share"].min()
    every = pd.MultiIndex.from_frame(logs[keys].drop_duplicates())
    return reached.reindex(every, fill_value=1.0).reset_index().assign(wanted=wanted)


def widths(pool: Pool) -> list[dict[str, object]]:
    """What `next_runs` expects of the interval at the largest run held out, and what the next fit makes of it."""
    sizes, tokens = pool.points(pool.held_out)
    largest = int(np.argmax(compute_flops(sizes, tokens)))
    n_params, n_tokens = float(sizes[largest]), float(tokens[largest])
    records = []
    for n_made, share in product((16, 24), (0.1, 0.3)):
        made, rest = pool.runs[:n_made], pool.runs[n_made:]
        fitted = fit(made, n_params_convention="as the table has it", n_bootstrap=20)
        affordable, could = share * float(pool.cost.sum()), rest[["n_params", "n_tokens"]]
        found = next_runs(fitted, n_params, n_tokens, affordable_flops=affordable, candidates=could)
        if len(found.runs):
            more = pd.concat([made, rest.loc[found.runs.index]])
            then = fit(more, n_params_convention="as the table has it", n_bootstrap=20).forecast(n_params, n_tokens)
            actual = (then.high - then.low) / then.loss
            ratio = {"expected / actual": found.width_then / actual, "actual / now": actual / found.width_now}
            records.append({"pool": pool.name, "annealed": pool.annealed, **ratio})
    return records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=4, help="seeds of the random choice")
    parser.add_argument("--csv", type=Path, help="write every campaign to this file")
    options = parser.parse_args()
    tables, expected, started = [], list[dict[str, object]](), time.process_time()
    for ladder in ladders():
        pool = Pool(ladder)
        if len(pool.cost) < FEWEST:
            print(f"{pool.name}: {len(pool.cost)} runs are too few", flush=True)
            continue
        expected += widths(pool)
        tables.append(measured(pool, options.random))
        spent = time.process_time() - started
        print(
            f"{pool.name}: {len(pool.cost)} runs, error of all {tables[-1]['whole'][0]:.2%}, {spent:.0f} s", flush=True
        )
    table = pd.concat(tables, ignore_index=True)
    if options.csv:
        table.to_csv(options.csv, index=False)
    pd.set_option("display.width", 200)
    for name, part in (("all pools", table), ("annealed", table[table["annealed"]])):
        print(f"\n{name}: error relative to the whole pool's, by share of its FLOPs")
        print(summary(part, "share", "relative").round(2).to_string())
        print("share of the pool's FLOPs to an error of so many times the whole pool's")
        reached = pd.concat([spent_to_reach(part, wanted) for wanted in WANTED])
        print(summary(reached, "wanted", "share").round(3).to_string())
    batches = pd.DataFrame(expected)
    for name, part in (("all pools", batches), ("annealed", batches[batches["annealed"]])):
        print(f"\n{name}: width of the interval after a batch of four, {len(part)} batches")
        print(part.drop(columns=["pool", "annealed"]).quantile([0.1, 0.25, 0.5, 0.75, 0.9]).round(2).to_string())
    by_pool = table.assign(value=np.log(table["relative"]))
    print("\nof each pool")
    print(np.exp(by_pool.pivot_table(index="pool", columns=["way", "share"], values="value")).round(2).to_string())


if __name__ == "__main__":
    main()
