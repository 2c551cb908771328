"""Held-out error, interval width and coverage of every form, and of the default forecast, on the public ladders.

    python tests/benchmarks/forecast.py [--cuts 10 30 100] [--ladders NAME ...] [--csv FILE] [--few-runs] [--left-out]

Each ladder is fitted to its runs with C < Cmax/cut and held against those above. Errors are |log(predicted / measured)| in %.
A table by distance shows coverage and width over the decades between a target and the largest fitted run: at a cut of 10 a target
may lie further than a decade, if no run lies in between. Of the reasons of `scaling.fits.support` it prints whether what they flag
was missed more often. Ladders of losses in mid-schedule are shown, and counted apart: no law of finished runs holds there.
`hindsight` is the error of whichever of the forecast's fits came out best on a ladder: what a perfect choice among them would give.
With --left-out the prior of each family's ladders has the centres of the other families (`prior.py`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd

from scaling import compute_flops
from scaling.fits.backtest import Backtest, backtest
from scaling.fits.ensemble import fit_ensemble
from scaling.fits.forecast import DEFAULT, interval_factor, log_scale
from scaling.fits.law_prior import PRIOR
from tests.benchmarks.ladders import Ladder, ladders
from tests.benchmarks.prior import left_out

LEVELS = (0.9, 0.95)
BANDS = (0.0, 0.5, 1.0, 1.25, 1.5, 2.0, 2.5)
"""Decades of compute above the largest fitted run."""


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
    return table.assign(**labels, seconds=seconds), found.predictions.assign(**labels, decades=decades(ladder, found))


def decades(ladder: Ladder, found: Backtest) -> pd.Series:
    """Distance of each prediction in decades of compute above the largest run that was fitted for it."""
    flops, cut = compute_flops(ladder.runs["n_params"], ladder.runs["n_tokens"]), found.predictions["cut"]
    largest = {each: flops[flops < flops.max() / each].max() for each in cut.unique()}
    return np.log10(found.predictions["compute_flops"] / cut.map(largest))


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


def judged(predictions: pd.DataFrame) -> pd.DataFrame:
    """Predictions of the forecast with covered (at 95 %), error and full width, in %."""
    own = predictions[predictions["method"] == DEFAULT]
    covered = 100 * own["loss"].between(own["low_0.95"], own["high_0.95"])
    width = 100 * (own["high_0.95"] / own["low_0.95"] - 1)
    return own.assign(covered=covered, error=100 * own["log_error"].abs(), width=width)


def by_distance(predictions: pd.DataFrame) -> pd.DataFrame:
    """A row for supported or not and each band of distance: targets, ladders, coverage at 95 % by run and ladder, error, widths."""
    own = judged(predictions)
    band = pd.cut(own["decades"], [*BANDS, np.inf], include_lowest=True)
    rows = []
    for (supported, within), part in own.groupby([own["supported"], band], observed=True):
        by_ladder = part.groupby("ladder")
        row = {"supported": supported, "decades": f"{max(within.left, 0):g} to {within.right:g}"}
        row |= {"targets": len(part), "ladders": len(by_ladder), "cover": part["covered"].mean()}
        row |= {"cover_by_ladder": by_ladder["covered"].mean().mean(), "error": part["error"].mean()}
        row |= {"width": part["width"].median(), "least_width": part["width"].min()}
        rows.append(row)
    return pd.DataFrame(rows).round(2)


def by_reason(predictions: pd.DataFrame) -> pd.DataFrame:
    """A row for each reason: targets flagged by it and by nothing else, their coverage at 95 %, error and width, and the others'.

    `least_loss` is the least by which coverage is lower among the flagged, over the families left out one at a time.
    """
    own, rows = judged(predictions), []
    for reason in sorted({name for names in own["reasons"] for name in names.split(", ") if name}):
        flagged = own["reasons"].str.split(", ").map(lambda names, reason=reason: reason in names)
        row: dict[str, object] = {
            "reason": reason,
            "flagged": int(flagged.sum()),
            "alone": int((own["reasons"] == reason).sum()),
            "families": own.loc[flagged, "family"].nunique(),
        }
        for name, some in (("with", own[flagged]), ("without", own[~flagged])):
            row |= {f"cover_{name}": some["covered"].mean(), f"error_{name}": some["error"].mean()}
            row |= {f"median_{name}": some["error"].median(), f"width_{name}": some["width"].median()}
        kept = [own["family"] != family for family in own["family"].unique()]
        row["least_loss"] = min(
            own.loc[keep & ~flagged, "covered"].mean() - own.loc[keep & flagged, "covered"].mean()
            for keep in kept
            if (keep & flagged).any()
        )
        rows.append(row)
    return pd.DataFrame(rows).round(2)


def of_few_runs(
    ladder: Ladder, cut: float, counts: tuple[int, ...] = (7, 8, 10, 12, 15, 20), draws: int = 5
) -> pd.DataFrame:
    """Held-out runs of at most 20 targets, forecast from so many runs drawn at random: n_runs, error in %, covered at 95 %."""
    flops = compute_flops(ladder.runs["n_params"], ladder.runs["n_tokens"])
    seen, held = ladder.runs[flops < flops.max() / cut], ladder.runs[flops >= flops.max() / cut]
    held = held.sample(min(len(held), 20), random_state=0)
    at, parts = (held["n_params"].to_numpy(), held["n_tokens"].to_numpy()), []
    for n_runs in (count for count in counts if count < seen["stem"].nunique()):
        for draw in range(draws):
            chosen = np.random.default_rng(100 * draw + n_runs).choice(seen["stem"].unique(), n_runs, replace=False)
            ensemble = fit_ensemble(seen[seen["stem"].isin(chosen)])
            error = np.abs(ensemble.log_loss(*at) - np.log(held["loss"].to_numpy()))
            covered = error <= interval_factor(0.95) * log_scale(ensemble, *at)
            parts.append(pd.DataFrame({"n_runs": n_runs, "error": 100 * error, "covered": 100 * covered}))
    return pd.concat(parts) if parts else pd.DataFrame(columns=["n_runs", "error", "covered"])


def main() -> None:
    """Print a table per cut, and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=float, nargs="+", default=[10, 30, 100])
    parser.add_argument("--ladders", nargs="+")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--few-runs", action="store_true", help="also forecast from few runs drawn at random")
    parser.add_argument("--left-out", action="store_true", help="centres of the prior by the other families")
    options = parser.parse_args()
    chosen = [ladder for ladder in ladders() if not options.ladders or ladder.name in options.ladders]
    parts, priors = [], {}
    if options.left_out:
        priors = {family: left_out(family) for family in {ladder.family for ladder in chosen}}
    for ladder in chosen:
        with patch.dict(PRIOR, priors.get(ladder.family, {})):
            parts.append(measure(ladder, options.cuts))
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
            signed = some.pivot_table(index="ladder", columns="method", values="bias")[DEFAULT]
            print(f"signed error of the forecast: {signed.mean():+.2f} in the mean of the ladders")
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
    for name, some in (("annealed", predictions[predictions["annealed"]]), ("all", predictions)):
        own = some[some["method"] == DEFAULT]
        print(f"\n## Reasons, {name}, all cuts: {own['supported'].mean():.1%} of {len(own)} targets supported\n")
        print(by_reason(some).to_string(index=False))
        print({key: round(value, 1) for key, value in pooled(some).items()})
        print(f"\n## By distance above the largest fitted run, {name}, all cuts\n")
        print(by_distance(some).to_string(index=False))
    if options.few_runs:
        few = pd.concat([of_few_runs(ladder, cut) for ladder in chosen if ladder.annealed for cut in options.cuts])
        print(few.groupby("n_runs")[["covered", "error"]].mean().round(2))
    print(f"\n{table['seconds'].median():.2f} CPU seconds a ladder and cut")


if __name__ == "__main__":
    main()
