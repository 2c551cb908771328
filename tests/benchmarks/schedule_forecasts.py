"""Forecasts of the loss under schedules that were not fitted, on public curves of nine schedules at three sizes (2503.12811).

python tests/benchmarks/schedule_forecasts.py               every three of the nine schedules fitted, the others held out (minutes)
python tests/benchmarks/schedule_forecasts.py --splits 12    so many of the 84 triples, drawn at random

Every held-out curve is forecast at its end, and over its last fifth, with 0, 40, 60 and 80 % of it measured. The width's constants
were chosen on 25M and 100M parameters; 400M only confirms them. "Parent" is the simple rule that, from the last measured step on, the
loss changes by the ratio of the curve at a constant rate. For other sizes, 25M and 100M forecast 400M, next to the plain ratio: the
loss at the end over the last measured loss, from the same schedule at 100M, or carried on in log N from both.
"""

import argparse
import itertools
import math
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pandas as pd

from scaling import ScalingError, ScheduleForecast, fit_schedules
from tests.benchmarks.ladders import table

SIZES = {"25M": 25e6, "100M": 100e6, "400M": 400e6}
WARMUP = 2160
SHARES = (0.0, 0.4, 0.6, 0.8)
CONSTANT, DECAYING = "constant_72000", "constant"


def curves(model: str) -> dict[str, pd.DataFrame]:
    rows = table("mpl_loss_curves")
    rows = rows[rows["model"] == model].assign(n_params=SIZES[model])
    return {str(run): part.sort_values("step").reset_index(drop=True) for run, part in rows.groupby("run")}


CURVES = {model: curves(model) for model in SIZES}


def measured_to(curve: pd.DataFrame, share: float) -> pd.DataFrame:
    return curve[["step", "lr"]].assign(loss=curve["loss"].where(curve["step"] <= share * curve["step"].max()))


def ratio(curve: pd.DataFrame, first: float, last: float) -> float:
    """Log of the loss at the last step over the loss at the first."""
    early, late = np.interp([first, last], curve["step"], curve["loss"])
    return math.log(late / early)


def row(made: ScheduleForecast, curve: pd.DataFrame) -> dict[str, float]:
    truth = curve.set_index("step")["loss"].loc[made.table["step"]].to_numpy()
    errors = np.abs(np.log(made.table["loss"].to_numpy() / truth))
    inside = (truth >= made.table["low"].to_numpy()) & (truth <= made.table["high"].to_numpy())
    return {
        "error": errors[-1],
        "held": float(inside[-1]),
        "half_width": made.high / made.loss - 1,
        "late_error": errors.mean(),
        "late_held": inside.mean(),
        "supported": float(made.supported),
    }


def of_split(fitted: tuple[str, ...]) -> list[dict[str, object]]:
    small = pd.concat([CURVES[model][run] for model in ("25M", "100M") for run in fitted], ignore_index=True)
    large = pd.concat([CURVES["400M"][run] for run in fitted], ignore_index=True)
    try:
        fits = {"small": fit_schedules(small, warmup_steps=WARMUP), "large": fit_schedules(large, warmup_steps=WARMUP)}
    except ScalingError:  # no rate falls among the three
        return []
    found: list[dict[str, object]] = []
    cases = [("25M", "small", "same"), ("100M", "small", "same"), ("400M", "large", "same"), ("400M", "small", "other")]
    for (model, which, size), share in itertools.product(cases, SHARES):
        for run, curve in CURVES[model].items():
            if (size == "same" and run in fitted) or (size == "other" and share == 0):
                continue
            steps = curve["step"].to_numpy()
            first, last = float(steps[steps <= share * steps[-1]].max(initial=0)), float(steps[-1])
            late = [float(step) for step in steps if step >= 0.8 * last and step > first]
            made = fits[which].forecast(measured_to(curve, share), at=late, n_params=SIZES[model])
            case = {"size": size, "model": model, "run": run, "measured": share, "fitted": run in fitted}
            shown = {**case, **row(made, curve)}
            loss = curve.set_index("step")["loss"]
            if not run.startswith(DECAYING):
                parent = CURVES[model][CONSTANT]
                by_parent = (
                    ratio(parent, first, last) if first else math.log(np.interp(last, parent["step"], parent["loss"]))
                )
                shown["parent"] = abs(by_parent - math.log(loss[last] / (loss[first] if first else 1)))
            if size == "other":
                truth = math.log(loss[last] / loss[first])
                by_size = {model: ratio(CURVES[model][run], first, last) for model in ("25M", "100M")}
                shown["ratio"] = abs(by_size["100M"] - truth)
                shown["ratio_in_log_n"] = abs(2 * by_size["100M"] - by_size["25M"] - truth)
            found.append(shown)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=84, help="number of triples of fitted schedules")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", help="write every forecast to this CSV")
    options = parser.parse_args()
    triples = [*itertools.combinations(sorted(CURVES["25M"]), 3)]
    chosen = np.random.default_rng(0).permutation(len(triples))[: options.splits]
    with ProcessPoolExecutor(options.workers) as pool:
        rows = pd.DataFrame([r for found in pool.map(of_split, [triples[i] for i in sorted(chosen)]) for r in found])
    if options.rows:
        rows.to_csv(options.rows, index=False)
    percent = [name for name in rows if name not in ("size", "model", "run", "measured", "fitted")]
    rows[percent] *= 100
    for by in (["size", "model"], ["size", "model", "measured"], ["size", "fitted", "measured"], ["size", "run"]):
        shown = rows.groupby(by)[percent].mean().round(2)
        shown.insert(0, "forecasts", rows.groupby(by).size())
        print(shown.to_string(), end="\n\n")


if __name__ == "__main__":
    main()
