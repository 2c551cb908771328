"""Does a warm search try what no prior run tried? A planted optimizer, 3 % better, and a planted range, that no known run has.

    python tests/benchmarks/search_planted.py [--seeds 10] [--trials 20] [--cases "2 choices" …]

Ten runs at random points are known at each of two smaller sizes. Loss is 3 · exp(excess + noise), noise .06 %; excess is
.01 an octave² of rate and .0033 of init_scale, with a least value of 0, and more for what is not the best.

    2 choices, 3 choices    known runs are adamw's; muon is 3 % better, its best rate an octave higher; lion is 4 % worse
    range                   known rates lie below .005, the best of them at .002; a second basin, 3 % better, has its best at .044
    all covered             known runs have every choice: what exploring costs where there is nothing to find

cold: the same search without the known runs. Regret is of the best trial, without noise.
"""

from __future__ import annotations

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

from muscale.search.across_scales import AcrossScales
from muscale.search.protocols import Observation
from search_spaces import Choice, Config, Distribution, Fixed, LogUniform, Space

NUMBERS = {"learning_rate": LogUniform(low=1e-3, high=1e-1), "init_scale": LogUniform(low=1 / 8, high=8)}
BEST = {"adamw": (-6.6, 0.03), "lion": (-8.0, 0.04), "muon": (-5.6, 0.0)}  # log2 of the best rate, and what it gives up
BASINS = [(-9.0, 0.03), (-4.5, 0.0)]
CURVATURES, NOISE = (0.01, 0.0033), 6e-4
TWO, THREE = Choice(values=("adamw", "muon")), Choice(values=("adamw", "lion", "muon"))
SPACES = {
    "2 choices": Space({**NUMBERS, "optimizer": TWO}),
    "3 choices": Space({**NUMBERS, "optimizer": THREE}),
    "range": Space(NUMBERS),
    "all covered": Space({**NUMBERS, "optimizer": THREE}),
}
KNOWN_ONLY: dict[str, dict[str, Distribution]] = {
    "2 choices": {"optimizer": Fixed(value="adamw")},
    "3 choices": {"optimizer": Fixed(value="adamw")},
    "range": {"learning_rate": LogUniform(low=1e-3, high=5e-3)},
    "all covered": {},
}
"""What is known of each case, where it is not everything."""
WORKERS = 2


@dataclass
class Trials:
    """What the searcher is given of the sweep."""

    space: Space
    observations: list[Observation] = field(default_factory=list)
    pending: list[Config] = field(default_factory=list)


def excess(config: Config) -> float:
    """Log loss above the least there is."""
    rate, scale = (math.log2(cast(float, config[name])) for name in NUMBERS)
    basins = [BEST[str(config["optimizer"])]] if "optimizer" in config else BASINS
    by_rate = min(worse + CURVATURES[0] * (rate - best) ** 2 for best, worse in basins)
    return by_rate + CURVATURES[1] * (scale - 0.5) ** 2


def known_runs(case: str, seed: int) -> pd.DataFrame:
    """Ten draws at each of two smaller sizes: of adamw, of low rates, or of all there is."""
    generator, space, rows = np.random.default_rng([seed, 1]), SPACES[case], []
    known = Space({**space, **KNOWN_ONLY[case]})
    for number in range(20):
        config = known.draw(seed, number)
        loss = 3.2 * math.exp(excess(config) + NOISE * generator.standard_normal())
        rows.append({**config, "n_params": 250 + 250 * (number % 2), "n_tokens": 8000, "loss": loss})
    return pd.DataFrame(rows, columns=[*space.searched, "n_params", "n_tokens", "loss"])


def search(task: tuple[str, bool, int], n_trials: int) -> dict[str, Any]:
    """Regret of one search, the number of the first trial of the best kind, and the evaluations to within .5 %."""
    case, warm, seed = task
    space, known = SPACES[case], known_runs(case, seed)
    searcher = AcrossScales(
        space=space, seed=seed, n_params=1000, n_tokens=8000, prior_runs=lambda: known if warm else known.iloc[:0]
    )
    generator, trials, found = np.random.default_rng([seed, 2]), Trials(space), []
    for number in range(n_trials):
        config = searcher.propose(number, trials)
        found.append(excess(config))
        loss = 3 * math.exp(found[-1] + NOISE * generator.standard_normal())
        trials.observations.append(Observation(config=config, loss=loss))
    configs = [seen.config for seen in trials.observations]
    tried = [c for c in configs if c.get("optimizer", "muon") == "muon" and cast(float, c["learning_rate"]) > 5e-3]
    close = np.flatnonzero(np.array(found) <= 0.005)
    return {
        "case": case,
        "search": "warm" if warm else "cold",
        "never tried": not tried,
        "regret": math.expm1(min(found)),
        "to .5 %": int(close[0]) + 1 if len(close) else n_trials,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(SPACES), choices=list(SPACES))
    arguments = parser.parse_args()
    tasks = [
        (case, warm, seed) for case in arguments.cases for warm in (True, False) for seed in range(arguments.seeds)
    ]
    with ProcessPoolExecutor(WORKERS) as pool:
        rows = pd.DataFrame(pool.map(partial(search, n_trials=arguments.trials), tasks))
    groups = rows.groupby(["case", "search"], sort=False)
    table = pd.DataFrame(
        {
            f"never tried, of {arguments.seeds}": groups["never tried"].sum(),
            "mean regret, %": 100 * groups["regret"].mean(),
            "worst, %": 100 * groups["regret"].max(),
            "evaluations to .5 %": groups["to .5 %"].mean(),
        }
    )
    print(table.round(3).to_string())


if __name__ == "__main__":
    main()
