"""The tables of the study of rungs, each from the rows that `rungs.py` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, cast

import numpy as np
import pandas as pd

from search_spaces import Config, Space
from tests.benchmarks.rung_advice import SAMPLERS, Surface, quadratic_minimum, suggestions
from tests.benchmarks.rung_statistics import (
    WAYS,
    Array,
    Replay,
    random_search_regret,
    rank_correlation,
    reported,
    successive_halving,
    telling_error,
)

RUNGS = ("T/8", "T/4", "T/2", "T(1-f)")
PERMUTATIONS = 100
REPLAYS_OF = {"TPE": 25, "GP": 4}  # of them, what the samplers' time allows
SUGGESTIONS = 4  # of each sampler after each replay
OCTAVES = 5.0  # of the searched rate
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
    """Print one as Markdown."""
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


def facts(seeds: list[SeedTable]) -> list[str]:
    """What the other figures are to be held against."""
    lines = []
    for name in ("annealed", "mid-decay"):
        finals = [table.final(name) for table in seeds]
        pairs = [rank_correlation(one, other) for one, other in combinations(finals, 2) if len(one) == len(other)]
        if pairs:
            stacked = np.stack([final for final in finals if len(final) == len(finals[0])])
            spread = stacked.std(axis=0, ddof=1)
            half = np.argsort(stacked.mean(axis=0))[: stacked.shape[1] // 2]
            lines.append(
                f"finals of {name} between seeds: Spearman {np.mean(pairs):.3f}; sd over seeds, median of the better half "
                f"{np.median(spread[half]):.4f} nats, of all {np.median(spread):.4f}"
            )
        lines.append(f"best final of {name}: " + ", ".join(f"{np.nanmin(final):.4f}" for final in finals))
    between = [rank_correlation(table.final("annealed"), table.final("mid-decay")) for table in seeds]
    lines.append("finals of WSD with those of linear decay: " + ", ".join(f"{value:.3f}" for value in between))
    for number, rung in enumerate(RUNGS):
        signals = [(table.signals["averaged"][:, number], table.signals["annealed"][:, number]) for table in seeds]
        same = [rank_correlation(*pair) for pair in signals]
        level = np.concatenate([averaged - annealed for averaged, annealed in signals])
        lines.append(
            f"averaged with annealed at {rung}: Spearman "
            + ", ".join(f"{value:.3f}" for value in same)
            + f"; averaged - annealed {np.nanmin(level):+.4f} to {np.nanmax(level):+.4f} nats"
        )
    return lines


def optima(seeds: list[SeedTable], space: Space, configs: Sequence[Config]) -> pd.DataFrame:
    """log2 of the best rate by each signal at each rung: minimum of a quadratic surface, mean over seeds, and their sd."""
    rows = []
    for signal in seeds[0].signals:
        row = [signal]
        for number in range(len(RUNGS)):
            found = []
            for table in seeds:
                points = np.array([space.encode(configs[config]) for config in table.configs])
                best = space.decode(quadratic_minimum(points, np.log(table.signals[signal][:, number])))
                found.append(np.log2(cast(float, best["learning_rate"])))
            spread = f" ± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
            row.append(f"{np.mean(found):+.2f}{spread}")
        rows.append(row)
    return pd.DataFrame(rows, columns=["log2 rate", *RUNGS[:3], "last"])


def exactness(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Branches at T/2 against the runs planned for their length."""
    branches = {(row["config"], row["seed"]): row["rungs"] for row in rows if row["kind"] == "wsd"}
    compared = []
    for row in rows:
        if row["kind"] == "planned" and (of := branches.get((row["config"], row["seed"]))):
            planned, branch = row["rungs"][0], next(r for r in of if r["tokens"] == row["rungs"][0]["tokens"])
            same = planned["digest"] == branch["digest"] and planned["annealed"] == branch["annealed"]
            compared.append((row["config"], branch["annealed"], planned["annealed"], same))
    return pd.DataFrame(compared, columns=["config", "branch", "planned", "same bits"])


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


def reporting_ways(seeds: list[SeedTable], space: Space, configs: Sequence[Config]) -> tuple[str, pd.DataFrame]:
    """Worth of each way of reporting a stopped trial after ASHA (eta 2, by averages).

    Its error, and the loss given up, on a surface through all true finals, by what is suggested next: the minimum of a
    quadratic surface, and Optuna's.
    """
    finals = np.nanmean([table.final("annealed") for table in seeds], axis=0)
    points = np.array([space.encode(configs[number]) for number in seeds[0].configs])
    surface = Surface.fit(points, np.log(finals))
    best, least = surface.best()
    found = []
    for table in seeds:
        final, known = table.final("annealed"), [configs[number] for number in table.configs]
        for number, replay in enumerate(_replays(table, "averaged", 2, (0, 1, 2))):
            for way in WAYS:
                values = reported(way, table.signals["averaged"][:, :3], final, replay.reached)
                row: dict[str, Any] = {"way": way, **asdict(telling_error(values, final, replay.reached))}
                suggested = {"quadratic": quadratic_minimum(points, values)[None]}
                for name, sampler in SAMPLERS.items():
                    if number < REPLAYS_OF[name]:
                        asked = suggestions(space, sampler(number), known, values, SUGGESTIONS)
                        suggested[name] = np.array([space.encode(config) for config in asked])
                for name, at in suggested.items():
                    row[name] = float(np.mean(np.exp(surface(at)) - np.exp(least)))
                    row[f"{name} octaves"] = float(np.mean(np.abs(at[:, 0] - best[0]))) * OCTAVES
                found.append({**row, "seed": table.seed})
    every = pd.DataFrame(found)
    means = every.groupby("way", sort=False).mean().drop(columns="seed").reset_index()
    by_seed = every.groupby(["way", "seed"], sort=False)["quadratic"].mean()
    means["quadratic, seeds"] = [" ".join(f"{value:.4f}" for value in by_seed[way]) for way in means["way"]]
    about = (
        f"surface: rmse of a left-out configuration {surface.error:.4f} log loss; minimum "
        f"{np.exp(least):.4f} at {space.decode(best)}"
    )
    return about, means
