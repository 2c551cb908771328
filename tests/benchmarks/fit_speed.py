"""One fit and 4,000 bootstrap refits against what a user would take instead: CPU seconds, and whose minimum is lowest.

    python tests/benchmarks/fit_speed.py [--ladders NAME ...] [--starts 4500] [--refits 4000] [--peer PYTHON]

On each public ladder the same objective (Σ Huber of log-loss residuals, delta 1e-3, Chinchilla's form) is minimised by `scaling.fit`
and by L-BFGS-B of scipy from a grid of starts with numerical gradients, as the replication's notebook does (Besiroglu et al.
2404.10102). `--peer` names a Python that has PyPI's `chinchilla` (`pip install chinchilla==0.2.0` in a venv of its own), which runs
on the reference problem with the same loss and the original grid. Every minimum is judged by one function. CPU seconds count
children; one process at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from scaling import fit
from scaling.minimizers.newton import huber
from tests.benchmarks.ladders import Ladder, ladders

DELTA = 1e-3
GRID = {  # Hoffmann et al. 2203.15556, app. D.2
    "e": [-1.0, -0.5, 0.0, 0.5, 1.0],
    "a": [0.0, 5.0, 10.0, 15.0, 20.0, 25.0],
    "b": [0.0, 5.0, 10.0, 15.0, 20.0, 25.0],
    "alpha": [0.0, 0.5, 1.0, 1.5, 2.0],
    "beta": [0.0, 0.5, 1.0, 1.5, 2.0],
}
PEER = """
import json, sys
import numpy as np
from chinchilla import Chinchilla
from chinchilla._metrics import log_huber
problem = json.load(open(sys.argv[1]))
found = Chinchilla(sys.argv[2], param_grid=problem["grid"], seed_ranges={"C": [1e15, 1e16], "N_to_D": [10, 20]},
                   loss_fn=lambda y, p: log_huber(y, p, delta=problem["delta"]), log_level=100)
for n, d, loss in problem["rows"]:
    found.database.append(C=6 * n * d, N=n, D=d, loss=loss)
found.fit()
print(json.dumps({k: float(v) for k, v in found.params.items()}))
"""


def judge(runs: pd.DataFrame, values: dict[str, float]) -> float:
    """The objective of five numbers."""
    n_params, n_tokens = runs["n_params"].to_numpy(), runs["n_tokens"].to_numpy()
    loss = values["E"] + values["A"] * n_params ** -values["alpha"] + values["B"] * n_tokens ** -values["beta"]
    return float(huber(np.log(loss / runs["loss"].to_numpy()), DELTA).sum())


def ours(runs: pd.DataFrame, refits: int = 2) -> dict[str, float]:
    return dict(fit(runs, n_params_convention="as the table has it", n_bootstrap=refits).law.parameters)


def grid(runs: pd.DataFrame, starts: int) -> dict[str, float]:
    """By L-BFGS-B from so many starts of the grid, drawn at random where not all are taken."""
    log_n, log_d = np.log(runs["n_params"].to_numpy()), np.log(runs["n_tokens"].to_numpy())
    log_loss = np.log(runs["loss"].to_numpy())

    def objective(theta: Any) -> float:
        e, a, b, alpha, beta = theta
        terms = np.stack([np.full_like(log_n, e), a - alpha * log_n, b - beta * log_d])
        top = terms.max(axis=0)
        return float(huber(top + np.log(np.exp(terms - top).sum(axis=0)) - log_loss, DELTA).sum())

    points = np.array(list(itertools.product(*GRID.values())))
    points = np.random.default_rng(0).permutation(points)[:starts]
    best = min((minimize(objective, point, method="L-BFGS-B") for point in points), key=lambda found: found.fun)
    e, a, b, alpha, beta = best.x
    return {"E": np.exp(e), "A": np.exp(a), "B": np.exp(b), "alpha": alpha, "beta": beta}


def peer(python: str, runs: pd.DataFrame) -> dict[str, float]:
    """By PyPI's `chinchilla`, which forks a pool of processes."""
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.json"
        rows = runs[["n_params", "n_tokens", "loss"]].to_numpy().tolist()
        problem.write_text(json.dumps({"grid": GRID, "delta": DELTA, "rows": rows}))
        done = subprocess.run([python, "-c", PEER, problem, folder], capture_output=True, text=True, check=True)
    values = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: values[name] for name in ("E", "A", "B", "alpha", "beta")}


def timed(work: Callable[[], dict[str, float]]) -> tuple[dict[str, float], float, float]:
    """(what was found, CPU seconds of this process and its children, wall seconds)."""
    wall, before = time.perf_counter(), _cpu()
    found = work()
    return found, _cpu() - before, time.perf_counter() - wall


def _cpu() -> float:
    import os

    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def compare(chosen: list[Ladder], starts: int, python: str | None) -> pd.DataFrame:
    """A row per ladder and way: objective and CPU seconds."""
    rows = []
    for ladder in chosen:
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "scaling.fit": lambda runs=ladder.runs: ours(runs),  # type: ignore[misc]
            f"L-BFGS-B, {starts} starts": lambda runs=ladder.runs: grid(runs, starts),  # type: ignore[misc]
        }
        if python and ladder.name == "besiroglu":
            ways["chinchilla 0.2.0"] = lambda runs=ladder.runs: peer(python, runs)  # type: ignore[misc]
        for way, work in ways.items():
            values, cpu, wall = timed(work)
            rows.append(
                {"ladder": ladder.name, "way": way, "objective": judge(ladder.runs, values), "cpu": cpu, "wall": wall}
            )
            print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1), flush=True)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladders", nargs="+")
    parser.add_argument("--starts", type=int, default=4500)
    parser.add_argument("--refits", type=int, default=4000)
    parser.add_argument("--peer")
    options = parser.parse_args()
    chosen = [ladder for ladder in ladders() if not options.ladders or ladder.name in options.ladders]
    reference = next(ladder for ladder in ladders() if ladder.name == "besiroglu").runs
    ours(reference)  # imports
    once = [timed(lambda: ours(reference))[1:] for _ in range(20)]
    print(
        "one fit of the reference problem, median of 20: {:.1f} ms CPU, {:.1f} ms wall".format(
            *1e3 * np.median(once, axis=0)
        )
    )
    _, cpu, wall = timed(lambda: ours(reference, options.refits))
    print(f"the same with {options.refits} bootstrap refits: {cpu:.2f} s CPU, {wall:.2f} s wall")
    many = reference.sample(100_000, replace=True, random_state=0, ignore_index=True)
    many["loss"] *= np.exp(0.01 * np.random.default_rng(0).standard_normal(len(many)))
    _, cpu, wall = timed(lambda: ours(many.assign(stem=range(len(many)))))
    print(f"one fit of 100,000 rows: {cpu:.2f} s CPU, {wall:.2f} s wall")
    table = compare(chosen, options.starts, options.peer)
    least = table.pivot_table(index="ladder", columns="way", values="objective")
    others = least.drop(columns="scaling.fit").min(axis=1)
    print("objective over the least of the others:", (least["scaling.fit"] / others).round(9).to_dict())
    print("CPU seconds, median over ladders:", table.groupby("way")["cpu"].median().round(3).to_dict())


if __name__ == "__main__":
    main()
