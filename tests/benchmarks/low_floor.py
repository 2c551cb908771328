"""Forecasts of ladders whose floor lies far below the losses, as those of the smallest models: error, coverage, and what tells them.

    python tests/benchmarks/low_floor.py [--sets 25]

Ladders of the quickstart's eleven stems are planted with E from .05 to .6 of the least loss, alpha and beta drawn from .25 to .55, and
.5 % of noise; the forecast is of its full run, five times the largest run's compute. Shown by the planted share of E, and by the
share that the forecast's fits find, of which `scaling.fits.support` judges.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

from scaling import Chinchilla, fit
from scaling.fits.ensemble import fit_ensemble
from scaling.fits.support import floor_share

STEMS = [
    (10_448, 655_360),
    (10_448, 1_310_720),
    (33_440, 655_360),
    (33_440, 1_310_720),
    (33_440, 2_621_440),
    (68_976, 655_360),
    (68_976, 1_638_400),
    (117_056, 491_520),
    (117_056, 983_040),
    (177_680, 655_360),
    (250_848, 458_752),
]
TARGET = (177_680, 3_377_152)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
NOISE = 0.005


def forecasts(share: float, seed: int) -> dict[str, float]:
    """A planted ladder's forecast beside its loss."""
    draw = np.random.default_rng([seed, round(100 * share)])
    alpha, beta = draw.uniform(0.25, 0.55, 2)
    runs = pd.DataFrame(STEMS, columns=["n_params", "n_tokens"], dtype=float)
    scale = {"A": 1e5**alpha, "B": 1e6**beta * draw.uniform(0.5, 1.5)}
    least = Chinchilla().law(E=0.0, alpha=alpha, beta=beta, **scale).loss(runs["n_params"], runs["n_tokens"]).min()
    law = Chinchilla().law(E=share / (1 - share) * least, alpha=alpha, beta=beta, **scale)
    runs["loss"] = law.loss(runs["n_params"], runs["n_tokens"]) * np.exp(NOISE * draw.standard_normal(len(runs)))
    found = fit(runs, n_params_convention="total", loss_unit="nats per token", n_bootstrap=2)
    forecast = found.forecast(*TARGET)
    truth = float(law.loss(*TARGET)) * np.exp(NOISE * draw.standard_normal())
    return {
        "planted": share,
        "found": floor_share(found.rows, fit_ensemble(found.rows)),
        "error": 100 * np.log(forecast.loss / truth),
        "held": 100 * (forecast.low <= truth <= forecast.high),
    }


def main() -> None:
    """Print the mean signed error, %, and how many 90 % intervals held, %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=25)
    sets = parser.parse_args().sets
    rows = pd.DataFrame([forecasts(share, seed) for share in SHARES for seed in range(sets)])
    rows["found within"] = pd.cut(rows["found"], [0, 0.2, 0.3, 0.35, 0.4, 0.5, 1])
    shown = {"sets": ("error", "size"), "error": ("error", "mean"), "held": ("held", "mean")}
    print(rows.groupby("planted").agg(found=("found", "median"), **shown).round(2).to_string())
    print(rows.groupby("found within", observed=True).agg(**shown).round(2).to_string())


if __name__ == "__main__":
    main()
