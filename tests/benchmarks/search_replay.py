"""How many trainings does a search need? Every searcher replayed on Step Law's real grid of rate × batch in 17 cells (N, D).

    python tests/benchmarks/search_replay.py [--seeds 50] [--quick] [--json FILE]

A suggestion is snapped to the nearest untried point in (log2 rate, log2 batch) and the searcher is given that point and its
loss. All searchers look in one box, that of all cells together: each cell's own is centred on its optimum and would leak
it. Cells are ordered by compute. A search ends within .1 % of its cell's best loss. That is partly luck, as run noise is
about .06 %: within .25 % is the robust tolerance.

    cold        nothing is known. TPE and the Gaussian process are Optuna's; the latter's losses are clipped at 1.1 × the best
    zero-shot   the surface's optimum at a cell from every run of the smaller ones; and what copying or a power law gives;
                and the same with the cells in other orders, drawn at random
    warm        the surface given every run of the smaller cells, then searching
    campaign    all cells one after another, from its own trials only

The table is read from ../shared/data beside the project, or from $MUSCALE_REFERENCE_DATA (steplaw_dense_all_lr_bs.csv).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from scaling import SearchBox, fit_response

COORDINATES, SCALES = ["log2_rate", "log2_batch"], ["n_params", "n_tokens"]
TIGHT, ROBUST = 0.001, 0.0025
ENOUGH = 4  # smaller cells, from which on a warm search is held to its target
WORKERS = 2
WARM_SEEDS, FEW_SEEDS = 5, 10
WITH_FEW_SEEDS = ("Gaussian process (Optuna), clipped", "ours, box 4 × 2 octaves wider")  # the slowest, and an extra
ALLOCATIONS = {92: [12] + [5] * 16, 140: [12] + [8] * 16}
ORDERS = 12
EXPECTED_DRIFT = {
    "log2_rate": {"n_params": (-0.36, 0.15)},
    "log2_batch": {"n_params": (0.0, 0.15), "n_tokens": (0.47, 0.15)},
}
"""The drift that is given beforehand, octaves per doubling, from other sources than this table and Step Law's fits to it;
all spreads are assumed. The table's models are of standard parametrization.

Rate with size: the mean of -.23 (arXiv 2409.19913, fixed batch), -.36 (2406.19146, at 20 tokens a parameter) and -.48 (fitted
here to the best rates of the grid over rate and batch in Lingle's Scaling Laws for Optimal LR and Batch Size, part III, 18
cells). Rate with tokens: nothing, as they differ in sign (-.32 at a fixed batch; .26). Batch with tokens: the mean of .38
(2505.13738), .45 (2510.03871) and .57 (Lingle's grid); with size: none in all three (Lingle's: .05 ± .04)."""
WIDER = {"log2_rate": (-3.0, 1.0), "log2_batch": (-1.5, 0.5)}  # octaves added to the box, more on one side

Suggest = Callable[[pd.DataFrame], tuple[float, float]]
"""Next (log2 rate, log2 batch), from the rows of the cell so far."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells, smallest compute first, and the box of all of them."""

    cells: tuple[pd.DataFrame, ...]
    box: SearchBox

    def wider(self) -> SearchBox:
        """The same box, whose middle is not the middle of the grids."""
        bounds = {name: (low + WIDER[name][0], high + WIDER[name][1]) for name, (low, high) in self.box.bounds.items()}
        return replace(self.box, bounds=bounds)


@cache
def grid() -> Grid:
    """Read and tidied: rates lie √2 apart, with roundings to three or four digits."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    rows = pd.read_csv(Path(os.environ.get("MUSCALE_REFERENCE_DATA", default)) / "steplaw_dense_all_lr_bs.csv")
    reference = np.log2(rows["lr"].median())
    rows["log2_rate"] = reference + np.round(2 * (np.log2(rows["lr"]) - reference)) / 2
    rows["log2_batch"] = np.log2(rows["bs"])
    columns = [*SCALES, *COORDINATES, "loss"]
    cells = [cell[columns].reset_index(drop=True) for _, cell in rows.groupby(SCALES)]
    cells.sort(key=lambda cell: float(cell["n_params"].iloc[0]) * float(cell["n_tokens"].iloc[0]))
    bounds = {name: (float(rows[name].min()), float(rows[name].max())) for name in COORDINATES}
    return Grid(cells=tuple(cells), box=SearchBox(bounds=bounds, scales=tuple(SCALES), drift=EXPECTED_DRIFT))


def regrets(cell: pd.DataFrame) -> NDArray[np.float64]:
    """Loss of each point relative to the best, minus one."""
    return np.asarray(cell["loss"] / cell["loss"].min() - 1)


def nearest(cell: pd.DataFrame, point: Iterable[float], tried: list[int]) -> int:
    """Row of the untried point nearest to a suggestion."""
    distance = ((cell[COORDINATES].to_numpy() - np.array(list(point))) ** 2).sum(axis=1)
    distance[tried] = np.inf
    return int(distance.argmin())


def replay(cell: pd.DataFrame, suggest: Suggest, n: int | None = None) -> list[int]:
    """Rows tried: `n` of them, or until one is within TIGHT."""
    tried: list[int] = []
    regret = regrets(cell)
    while len(tried) < (n or len(cell)):
        tried.append(nearest(cell, suggest(cell.iloc[tried]), tried))
        if n is None and regret[tried[-1]] <= TIGHT:
            break
    return tried


def random_search(seed: int, box: SearchBox, number: int) -> Suggest:
    """Any untried point of the cell's grid with the same probability."""
    cell = grid().cells[number]
    order = iter(np.random.default_rng([seed, number]).permutation(len(cell)))

    def suggest(_: pd.DataFrame) -> tuple[float, float]:
        rate, batch = cell[COORDINATES].iloc[int(next(order))]
        return float(rate), float(batch)

    return suggest


def optuna_search(sampler: str) -> Callable[[int, SearchBox, int], Suggest]:
    """Optuna's, given the snapped points as trials of their own."""

    def build(seed: int, box: SearchBox, number: int) -> Suggest:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        made = optuna.samplers.TPESampler(seed=seed) if sampler == "tpe" else optuna.samplers.GPSampler(seed=seed)
        study = optuna.create_study(sampler=made)
        distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.FloatDistribution(*bounds) for name, bounds in box.bounds.items()
        }

        def suggest(tried: pd.DataFrame) -> tuple[float, float]:
            if len(tried):
                last = tried.iloc[-1]
                loss = float(last["loss"])
                if sampler == "gp":
                    loss = min(loss, 1.1 * float(tried["loss"].min()))
                params = {name: float(last[name]) for name in COORDINATES}
                study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=loss))
            asked = study.ask(distributions)
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
            return asked.params["log2_rate"], asked.params["log2_batch"]

        return suggest

    return build


def surface_search(seed: int, box: SearchBox, number: int, known: pd.DataFrame | None = None) -> Suggest:
    """Ours, given `known` beforehand."""
    scale = {name: float(grid().cells[number][name].iloc[0]) for name in SCALES}

    def suggest(tried: pd.DataFrame) -> tuple[float, float]:
        rows = tried if known is None else pd.concat([known, tried])
        point = fit_response(rows, box=box).suggest(scale, seed=seed)
        return point["log2_rate"], point["log2_batch"]

    return suggest


SEARCHERS: dict[str, Callable[[int, SearchBox, int], Suggest]] = {
    "random": random_search,
    "TPE (Optuna)": optuna_search("tpe"),
    "Gaussian process (Optuna), clipped": optuna_search("gp"),
    "ours": surface_search,
    "ours, box 4 × 2 octaves wider": surface_search,
}


def cold(task: tuple[str, int, int]) -> dict[str, Any]:
    """Evaluations that one searcher needs in one cell."""
    name, number, seed = task
    box = grid().wider() if "wider" in name else grid().box
    cell, began = grid().cells[number], time.perf_counter()
    tried = replay(cell, SEARCHERS[name](seed, box, number))
    return needed(cell, tried) | {"searcher": name, "cell": number, "seconds": time.perf_counter() - began}


def warm(task: tuple[int, int]) -> dict[str, Any]:
    """Evaluations that ours needs in one cell, given every run of the smaller ones."""
    number, seed = task
    cell, known, began = grid().cells[number], pd.concat(grid().cells[:number]), time.perf_counter()
    tried = replay(cell, surface_search(seed, grid().box, number, known))
    return needed(cell, tried) | {"cell": number, "seconds": time.perf_counter() - began}


def needed(cell: pd.DataFrame, tried: list[int]) -> dict[str, Any]:
    """How many evaluations it took to either tolerance."""
    regret = regrets(cell)[tried]
    return {"tight": len(tried), "robust": int(np.argmax(regret <= ROBUST)) + 1}


def zero_shot(number: int) -> dict[str, Any]:
    """Regrets with no run in the cell, and whether the intervals contain the optimum of the cell's own runs."""
    cells = grid().cells
    cell, smaller = cells[number], cells[:number]
    scale = {name: float(cell[name].iloc[0]) for name in SCALES}
    optimum = fit_response(pd.concat(smaller), box=grid().box).optimum(scale)
    cold = fit_response(pd.concat(smaller), box=replace(grid().box, drift={})).suggest(scale)
    best = [one.loc[one["loss"].idxmin()] for one in smaller]
    logs = np.array([[1.0, *np.log2([float(b[name]) for name in SCALES])] for b in best])
    argmins = np.array([[float(b[name]) for name in COORDINATES] for b in best])
    law, *_ = np.linalg.lstsq(logs, argmins, rcond=None)
    points = {
        "ours": [optimum.point[name] for name in COORDINATES],
        "ours, nothing stated of the drift": [cold[name] for name in COORDINATES],
        "the previous cell's best": argmins[-1],
        "power law on the best of each cell": np.array([1.0, *np.log2(list(scale.values()))]) @ law,
    }
    regret = regrets(cell)
    own = fit_response(cell, box=grid().box).optimum(scale)
    inside = {f"inside {n}": low <= own.point[n] <= high for n, (low, high) in optimum.intervals.items()}
    return {name: regret[nearest(cell, point, [])] for name, point in points.items()} | inside | {"cell": number}


def other_order(task: tuple[int, int]) -> dict[str, Any]:
    """Zero-shot regrets at one place of a random order of the cells, from all runs of those before it."""
    seed, place = task
    order = np.random.default_rng(seed).permutation(len(grid().cells))
    cell, known = grid().cells[order[place]], pd.concat([grid().cells[number] for number in order[:place]])
    scale = {name: float(cell[name].iloc[0]) for name in SCALES}
    out: dict[str, Any] = {"order": seed, "known": place}
    for name, drift in (("ours", EXPECTED_DRIFT), ("ours, nothing stated of the drift", {})):
        point = fit_response(known, box=replace(grid().box, drift=drift)).suggest(scale)
        out[name] = regrets(cell)[nearest(cell, [point[name] for name in COORDINATES], [])]
    return out


def campaign(task: tuple[int, int]) -> dict[str, Any]:
    """Regret of the best run in each cell, from its own trials only."""
    n_trials, seed = task
    known, found, began = pd.DataFrame(), [], time.perf_counter()
    for number, (cell, n) in enumerate(zip(grid().cells, ALLOCATIONS[n_trials], strict=True)):
        tried = replay(cell, surface_search(seed, grid().box, number, known), n)
        known = pd.concat([known, cell.iloc[tried]])
        found.append(float(regrets(cell)[tried].min()))
    return {"trials": n_trials, "seed": seed, "regrets": found, "seconds": time.perf_counter() - began}


def cost(n_rows: int) -> dict[str, Any]:
    """Seconds of one fit and suggestion with so many rows of all cells."""
    rows = pd.concat(grid().cells).sample(n_rows, random_state=0)
    seconds = []
    for seed in range(5):
        began = time.perf_counter()
        surface_search(seed, grid().box, 16, rows)(rows.iloc[:0])
        seconds.append(time.perf_counter() - began)
    return {"rows": n_rows, "seconds": float(np.median(seconds))}


def show(console: Console, title: str, table: pd.DataFrame) -> None:
    shown = Table(title=title, title_justify="left")
    for column in table.columns:
        shown.add_column(str(column))
    for row in table.itertuples(index=False):
        shown.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row))
    console.print(shown)


def summary(rows: pd.DataFrame, by: pd.Series[str]) -> pd.DataFrame:
    """Means over cells and seeds."""
    groups = rows.groupby(by, sort=False)
    return pd.DataFrame(
        {
            "to .1 %": groups["tight"].mean(),
            "± s.e.": groups["tight"].std() / np.sqrt(groups["tight"].size()),
            "to .25 %": groups["robust"].mean(),
            "p90 (.1 %)": groups["tight"].quantile(0.9),
            "worst": groups["tight"].max(),
            "s a suggestion": groups["seconds"].sum() / groups["tight"].sum(),
        }
    ).reset_index()


def lower_priority() -> None:
    """Of a worker, so that others on the machine come first."""
    os.nice(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="3 seeds, 1 of what else has 10")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    arguments = parser.parse_args()
    seeds, few = (3, 1) if arguments.quick else (arguments.seeds, min(arguments.seeds, FEW_SEEDS))
    n = len(grid().cells)
    tasks = [
        (name, number, seed)
        for name in SEARCHERS
        for seed in range(few if name in WITH_FEW_SEEDS else seeds)
        for number in range(n)
    ]
    console, began = Console(width=120), time.perf_counter()
    figures: dict[str, pd.DataFrame] = {}
    # Spawned, as torch (under Optuna's Gaussian process) does not survive a fork with its threads.
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), initializer=lower_priority) as pool:

        def table(name: str, job: Callable[[Any], dict[str, Any]], of: Iterable[Any], chunk: int = 1) -> pd.DataFrame:
            figures[name] = pd.DataFrame(pool.map(job, of, chunksize=chunk))
            return figures[name]

        show(console, "a fit and a suggestion", table("cost", cost, [100, sum(map(len, grid().cells))]))
        show_zero_shot(console, table("zero_shot", zero_shot, range(1, n)))
        places = [(seed, place) for seed in range(3 if arguments.quick else ORDERS) for place in range(2, n)]
        show_other_orders(console, table("other_orders", other_order, places))
        warms = table("warm", warm, [(i, seed) for seed in range(min(seeds, WARM_SEEDS)) for i in range(1, n)])
        group = pd.Series(np.where(warms["cell"] >= ENOUGH, f"{ENOUGH} or more", f"1 to {ENOUGH - 1}"))
        show(console, "warm: given all runs of the smaller cells", summary(warms, group.rename("smaller cells")))
        campaigns = table("campaign", campaign, [(total, seed) for total in ALLOCATIONS for seed in range(seeds)])
        show_campaigns(console, campaigns)
        colds = table("cold", cold, tasks, 4)
        title = f"cold: evaluations, {n} cells × {seeds} seeds ({few}: {', '.join(WITH_FEW_SEEDS)})"
        show(console, title, summary(colds, colds["searcher"]))
    console.print(f"{time.perf_counter() - began:.0f} s on {WORKERS} processes")
    if arguments.json:
        arguments.json.write_text(json.dumps({k: json.loads(v.to_json(orient="records")) for k, v in figures.items()}))


def show_zero_shot(console: Console, zero: pd.DataFrame) -> None:
    """Regrets over the cells, and how often the intervals hold."""
    names = [c for c in zero.columns if c != "cell" and not c.startswith("inside")]
    shots = [
        {
            "zero-shot regret, %": name + part,
            "median": 100 * rows[name].median(),
            "mean": 100 * rows[name].mean(),
            "max": 100 * rows[name].max(),
        }
        for name in names
        for part, rows in (("", zero), (f", {ENOUGH} or more smaller cells", zero[zero["cell"] >= ENOUGH]))
        if part or "power law" not in name  # three cells or fewer don't determine it
    ]
    show(console, "zero-shot: no run in the cell", pd.DataFrame(shots))
    inside = ", ".join(f"{name} {zero[f'inside {name}'].mean():.0%}" for name in COORDINATES)
    console.print(f"90 % intervals of the zero-shot optimum that hold the optimum of the cell's own runs: {inside}")


def show_other_orders(console: Console, rows: pd.DataFrame) -> None:
    """Regrets by the number of known cells."""
    groups = {f"2 to {ENOUGH - 1}": rows[rows["known"] < ENOUGH], f"{ENOUGH} or more": rows[rows["known"] >= ENOUGH]}
    shots = [
        {
            "zero-shot regret, %": f"{name}, {known} known cells",
            "median": 100 * part[name].median(),
            "mean": 100 * part[name].mean(),
            "max": 100 * part[name].max(),
            "above .25 %": f"{(part[name] > ROBUST).mean():.0%}",
        }
        for name in rows.columns.drop(["order", "known"])
        for known, part in groups.items()
    ]
    show(console, f"zero-shot, {rows['order'].nunique()} random orders of the cells", pd.DataFrame(shots))


def show_campaigns(console: Console, campaigns: pd.DataFrame) -> None:
    lines = []
    for total, rows in campaigns.groupby("trials"):
        found, first, then = np.array(rows["regrets"].tolist()), ALLOCATIONS[total][0], ALLOCATIONS[total][1]
        lines.append(
            {
                "trials": f"{total} ({first}, then {then} a cell)",
                "cells within .1 %": f"{(found <= TIGHT).mean():.1%}",
                "within .25 %": f"{(found <= ROBUST).mean():.1%}",
                "above .5 %": f"{(found > 0.005).mean():.2%}",
                "mean regret, %": 100 * found.mean(),
                "worst, %": 100 * found.max(),
                "worst seed within .1 %": f"{(found <= TIGHT).mean(axis=1).min():.0%}",
                "s a suggestion": rows["seconds"].sum() / (total * len(found)),
            }
        )
    show(console, f"campaign on its own trials, {len(campaigns) // len(ALLOCATIONS)} seeds", pd.DataFrame(lines))


if __name__ == "__main__":
    main()
