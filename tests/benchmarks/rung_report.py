"""The tables of the study of rungs, each from the rows that `rungs.py` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, get_args

import numpy as np
import pandas as pd

from tests.benchmarks.rung_statistics import (
    Array,
    Replay,
    Way,
    random_search_regret,
    rank_correlation,
    reported,
    successive_halving,
    telling_error,
)

RUNGS = ("T/8", "T/4", "T/2", "T(1-f)")
PERMUTATIONS = 100
HALVINGS: tuple[tuple[int, tuple[int, ...]], ...] = ((2, (0, 1, 2)), (4, (1,)), (4, (0, 2)), (4, (0, 1, 2)))
"""Reduction factor, and the rungs at which it stops trials; a factor 4 apart, and all of them."""


@dataclass(frozen=True, kw_only=True)
class SeedTable:
    """What one seed showed; arrays of [n_configs, 4 rungs], NaN after a divergence.

    Attributes:
        seed: Which.
        configs: Numbers of the configurations, [n_configs].
        signals: "stable", "averaged" (of the stem), "annealed" (its branches), "mid-decay" and "mid-decay averaged" (of
            linear decay).
        stem_tokens, branch_tokens: Of each rung: since the start, and of its cooldown alone. [4]
    """

    seed: int
    configs: tuple[int, ...]
    signals: dict[str, Array]
    stem_tokens: Array
    branch_tokens: Array

    def final(self, signal: str) -> Array:
        """Annealed loss at T under the schedule that the signal is of."""
        return self.signals["mid-decay" if signal.startswith("mid-decay") else "annealed"][:, -1]

    def costs(self, signal: str, rungs: Sequence[int]) -> list[float]:
        """In full runs: from each of the rungs to the next, and to the end."""
        n_tokens = self.stem_tokens[-1] + self.branch_tokens[-1]
        ends = [*self.stem_tokens[list(rungs)], n_tokens]
        branches = [*self.branch_tokens[list(rungs)], 0] if signal == "annealed" else [0] * len(ends)
        return [float(cost) for cost in (np.diff([0, *ends]) + branches) / n_tokens]


def tables(rows: Iterable[dict[str, Any]]) -> list[SeedTable]:
    """One for each seed, of the configurations that were trained under both schedules."""
    runs = {(row["seed"], row["config"], row["kind"]): row["rungs"] for row in rows}
    result = []
    for seed in sorted({seed for seed, *_ in runs}):
        configs = sorted(c for s, c, kind in runs if s == seed and kind == "wsd" and (seed, c, "linear") in runs)
        if not configs:
            continue
        stems, decays = ([runs[seed, config, kind] for config in configs] for kind in ("wsd", "linear"))
        whole = next(rungs for rungs in stems if len(rungs) == len(RUNGS))
        stem_tokens = np.array([rung["tokens"] for rung in whole], np.float64)
        result.append(
            SeedTable(
                seed=seed,
                configs=tuple(configs),
                signals={
                    "stable": _column(stems, "last"),
                    "averaged": _column(stems, "averaged"),
                    "annealed": _column(stems, "annealed"),
                    "mid-decay": _column(decays, "last"),
                    "mid-decay averaged": _column(decays, "averaged"),
                },
                stem_tokens=stem_tokens,
                branch_tokens=np.array([rung["annealed_tokens"] for rung in whole]) - stem_tokens,
            )
        )
    return result


def _column(runs: list[list[dict[str, Any]]], name: str) -> Array:
    values = np.full((len(runs), len(RUNGS)), np.nan)
    for config, rungs in enumerate(runs):
        for number, rung in enumerate(rungs):
            values[config, number] = np.nan if rung[name] is None else rung[name]
    return values


def show(title: str, table: pd.DataFrame) -> None:
    cells = table.map(lambda value: f"{value:.4f}" if isinstance(value, float) else str(value))
    lines = [table.columns, ["---"] * len(table.columns), *cells.to_numpy()]
    print(f"\n{title}\n", *("| " + " | ".join(line) + " |" for line in lines), sep="\n")


def correlations(seeds: list[SeedTable]) -> pd.DataFrame:
    """Spearman's of each signal with the final loss of its own schedule: mean, and each seed; and among the better half."""
    rows = []
    for signal in seeds[0].signals:
        for number, rung in enumerate(RUNGS[:3] if signal.startswith("mid") else RUNGS):
            all_, better = [], []
            for table in seeds:
                values, final = table.signals[signal][:, number], table.final(signal)
                half = np.argsort(final)[: len(final) // 2]
                all_.append(rank_correlation(values, final))
                better.append(rank_correlation(values[half], final[half]))
            each = " ".join(f"{value:.3f}" for value in all_)
            rows.append((signal, rung, np.mean(all_), each, np.mean(better), " ".join(f"{v:.2f}" for v in better)))
    return pd.DataFrame(rows, columns=["signal", "rung", "mean", "seeds", "better half", "its seeds"])


def _replays(
    table: SeedTable, signal: str, reduction: int, rungs: Sequence[int], budget: float = np.inf
) -> list[Replay]:
    """One for each order of arrival; the orders are the same for every signal."""
    generator = np.random.default_rng(table.seed)
    return [
        successive_halving(
            table.signals[signal][:, list(rungs)],
            table.costs(signal, rungs),
            generator.permutation(len(table.configs)).tolist(),
            reduction=reduction,
            budget=budget,
        )
        for _ in range(PERMUTATIONS)
    ]


def halving(seeds: list[SeedTable]) -> pd.DataFrame:
    """Regret of ASHA in its own seed's finals (mean, and each seed), at the compute that ranking by averages needs."""
    rows = []
    for reduction, rungs in HALVINGS:
        budgets = [fmean(r.spent for r in _replays(table, "averaged", reduction, rungs)) for table in seeds]
        for signal in seeds[0].signals:
            regrets, spent, begun, random = [], [], [], []
            for table, budget in zip(seeds, budgets, strict=True):
                replays = _replays(table, signal, reduction, rungs, budget)
                final = table.final(signal)
                regrets.append(np.mean([replay.regret(final) for replay in replays]))
                spent.append(fmean(replay.spent for replay in replays))
                begun.append(np.mean([(replay.reached >= 0).sum() for replay in replays]))
                random.append(random_search_regret(final, spent[-1]))
            rows.append(
                (
                    reduction,
                    ",".join(RUNGS[rung] for rung in rungs),
                    signal,
                    np.mean(regrets),
                    " ".join(f"{regret:.4f}" for regret in regrets),
                    f"{np.mean(spent):.2f}",
                    f"{np.mean(begun):.1f}",
                    np.mean(random),
                )
            )
    names = ["eta", "rungs", "signal", "regret", "seeds", "full runs", "begun", "random"]
    return pd.DataFrame(rows, columns=names)


def reporting_ways(seeds: list[SeedTable]) -> pd.DataFrame:
    """Error of each way of reporting a stopped trial after ASHA (eta 2, by averages)."""
    found = []
    for table in seeds:
        final = table.final("annealed")
        for replay in _replays(table, "averaged", 2, (0, 1, 2)):
            for way in get_args(Way):
                values = reported(way, table.signals["averaged"][:, :3], final, replay.reached)
                found.append({"way": way, **asdict(telling_error(values, final, replay.reached))})
    return pd.DataFrame(found).groupby("way", sort=False).mean().reset_index()
