"""Held-out error, interval width and coverage of every form, and of the default forecast, on the public ladders.

    python tests/benchmarks/forecast.py [--cuts 10 30] [--ladders NAME ...] [--csv FILE]

Each ladder is fitted to its runs with C < Cmax/cut and held against those above. Errors are |log(predicted / measured)| in %.
Ladders of losses in mid-schedule are shown, and counted apart: no law of finished runs holds there. `hindsight` is the error of
whichever of the forecast's five fits came out best on a ladder: what a perfect choice among them would give.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd

from scaling import compute_flops
from scaling.fits.backtest import backtest
from scaling.fits.ensemble import fit_ensemble
from scaling.fits.forecast import DEFAULT
from tests.benchmarks.ladders import Ladder, ladders

LEVELS = (0.9, 0.95)


def measure(ladder: Ladder, cuts: list[float]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the table of a ladder, the predictions), each with its name and kind."""
    began = time.process_time()
    found = backtest(ladder.runs, n_params_convention="as the table has it", cuts=cuts)
    seconds = (time.process_time() - began) / max(len(cuts), 1)
    labels = {"ladder": ladder.name, "family": ladder.family, "annealed": ladder.annealed}
    best = [
        {"cut": cut, "method": "hindsight", "mean_error": hindsight(ladder.runs, cut)}
        for cut in found.predictions["cut"].unique()
    ]
    table = pd.concat([found.table(), pd.DataFrame(best)], ignore_index=True)
    return table.assign(**labels, seconds=seconds), found.predictions.assign(**labels)


def hindsight(runs: pd.DataFrame, cut: float) -> float:
    """Least mean error, %, over the forecast's fits."""
    flops = compute_flops(runs["n_params"], runs["n_tokens"])
    seen, held = runs[flops < flops.max() / cut], runs[flops >= flops.max() / cut]
    laws = fit_ensemble(seen).variants.values()
    errors = [np.log(law.loss(held["n_params"], held["n_tokens"]) / held["loss"]).abs().mean() for law in laws]
    return 100 * float(min(errors))


def pooled(predictions: pd.DataFrame) -> dict[str, float]:
    """Coverage of the supported held-out runs of all ladders together, and of each ladder with the same weight, in %."""
    inside = predictions[predictions["supported"] & (predictions["method"] == DEFAULT)]
    row: dict[str, float] = {"runs": len(inside)}
    for level in LEVELS:
        low, high = inside[f"low_{level:g}"], inside[f"high_{level:g}"]
        covered = inside["loss"].between(low, high)
        row[f"cover_{level:g}"] = 100 * covered.mean()
        row[f"cover_{level:g}_by_ladder"] = 100 * covered.groupby(inside["ladder"]).mean().mean()
        row[f"width_{level:g}"] = 100 * (high / low - 1).groupby(inside["ladder"]).median().median()
    return row


def main() -> None:
    """Print a table per cut, and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=float, nargs="+", default=[10, 30])
    parser.add_argument("--ladders", nargs="+")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    chosen = [ladder for ladder in ladders() if not options.ladders or ladder.name in options.ladders]
    parts = [measure(ladder, options.cuts) for ladder in chosen]
    table, predictions = pd.concat([t for t, _ in parts]), pd.concat([p for _, p in parts])
    if options.csv:
        predictions.to_csv(options.csv, index=False)
    for cut, part in table.groupby("cut"):
        print(f"\n## C < Cmax/{cut:g}: mean held-out error, %\n")
        print(
            part.pivot_table(index="ladder", columns="method", values="mean_error")
            .reindex(part["ladder"].unique())
            .round(2)
        )
        own = part[part["method"] == DEFAULT].set_index("ladder")
        print(
            "\nforecast:", own[["held_out", "top_error", "bias", "coverage_0.95", "width_0.95", "supported"]].round(2)
        )
        for name, some in (("annealed", part[part["annealed"]]), ("all", part)):
            errors = some.pivot_table(index="ladder", columns="method", values="mean_error")
            print(f"\n{name}: {len(errors)} ladders")
            print(pd.DataFrame({"median": errors.median(), "mean": errors.mean(), "worst": errors.max()}).round(2))
            ratio = errors[DEFAULT].agg(["median", "mean"]) / errors["chinchilla"].agg(["median", "mean"])
            print("forecast over Chinchilla's form:", ratio.round(3).to_dict())
            least = errors["hindsight"].mean() / errors["chinchilla"].mean()
            print(f"the mean, had the best of its fits been known for each ladder: {least:.3f}")
            print(
                {
                    k: round(v, 1)
                    for k, v in pooled(
                        predictions[predictions["ladder"].isin(errors.index) & (predictions["cut"] == cut)]
                    ).items()
                }
            )
    print(f"\n{table['seconds'].median():.2f} CPU seconds a ladder and cut")


if __name__ == "__main__":
    main()
