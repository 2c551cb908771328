"""Does a related but different family mislead a warm search? Four known cells of one family, and Step Law's other cells.

    python tests/benchmarks/search_families.py [--seeds 4] [--cells 7]

The searched family is made of Step Law's cells (`search_replay`): N divided by 4, as if activated parameters were counted,
loss 5 % lower, the optimum an octave off in rate and in batch, their signs by the seed. Given are four of its cells, each
smaller than the one that is searched, drawn by the seed.

    alone       only these
    pooled      and the 12 other cells, as if they were the same family's
    source      and the 12 other cells as a source
    reversed    and the 12 others, as a source whose rates and batches are mirrored: nothing in it helps

Evaluations until within .1 % and .25 % of the cell's best.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

from scaling import fit_response
from tests.benchmarks.search_replay import COORDINATES, ENOUGH, SCALES, WORKERS, grid, needed, replay

WAYS = ("alone", "pooled", "source", "reversed")
SHIFTS = ((-1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (1.0, 1.0))  # octaves of rate and batch


def related(cell: pd.DataFrame, shift: tuple[float, float]) -> pd.DataFrame:
    moved = {name: cell[name] + by for name, by in zip(COORDINATES, shift, strict=True)}
    return cell.assign(n_params=cell["n_params"] / 4, loss=0.95 * cell["loss"], **moved)


def evaluations(task: tuple[str, int, int]) -> dict[str, Any]:
    """Evaluations that one way needs in one cell."""
    way, number, seed = task
    cells, shift = grid().cells, SHIFTS[seed % len(SHIFTS)]
    chosen = np.random.default_rng([seed, number]).choice(number, ENOUGH, replace=False)
    target = related(cells[number], shift).reset_index(drop=True)
    known = pd.concat([related(cells[i], shift) for i in chosen]).assign(source="")
    others = pd.concat([cells[i] for i in range(len(cells)) if i not in chosen and i != number])
    bounds = {name: (low - 1, high + 1) for name, (low, high) in grid().box.bounds.items()}
    if way == "reversed":
        others = others.assign(**{name: sum(bounds[name]) - others[name] for name in COORDINATES})
    if way != "alone":
        known = pd.concat([known, others.assign(source="" if way == "pooled" else "dense")])
    box = replace(grid().box, bounds=bounds, sources=("dense",) if way in ("source", "reversed") else ())
    scale = {name: float(target[name].iloc[0]) for name in SCALES}
    left_out = []

    def suggest(tried: pd.DataFrame) -> tuple[float, float]:
        surface = fit_response(pd.concat([known, tried.assign(source="")]), box=box)
        left_out.append(bool(surface.left_out))
        point = surface.suggest(scale, seed=seed)
        return point["log2_rate"], point["log2_batch"]

    tried = replay(target, suggest)
    return {**needed(target, tried), "way": way, "cell": number, "seed": seed, "left out": float(np.mean(left_out))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--cells", type=int, default=7, help="how many cells, evenly from the fifth to the last")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args()
    numbers = np.linspace(ENOUGH, len(grid().cells) - 1, arguments.cells).round().astype(int).tolist()
    tasks = [(way, number, seed) for way in arguments.ways for seed in range(arguments.seeds) for number in numbers]
    with ProcessPoolExecutor(WORKERS) as pool:
        groups = pd.DataFrame(pool.map(evaluations, tasks)).groupby("way", sort=False)
    table = pd.DataFrame(
        {
            "to .1 %": groups["tight"].mean(),
            "± s.e.": groups["tight"].std() / np.sqrt(groups["tight"].size()),
            "to .25 %": groups["robust"].mean(),
            "worst": groups["tight"].max(),
            "left out": groups["left out"].mean(),
        }
    )
    print(table.round(2).to_string())


if __name__ == "__main__":
    main()
