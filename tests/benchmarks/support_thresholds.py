"""Thresholds of support as the other families would choose them, and what they do for the family left out.

    python tests/benchmarks/support_thresholds.py [--cuts 10 30]

For misfit and for D/N the threshold is the value that parts held from missed 95 % intervals of the other families' held-out runs
best; the largest there is where none does. Ladders of losses in mid-schedule are among them: they are what misfit is for.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

from scaling import compute_flops
from scaling.fits.ensemble import MAD, fit_ensemble
from scaling.fits.forecast import interval_factor, log_scale
from scaling.fits.support import MAX_MISFIT, RATIO_MARGIN
from tests.benchmarks.ladders import Ladder, ladders

LEAST = 10
"""Targets on either side of a threshold."""
IN_USE = {"misfit": MAX_MISFIT, "ratio": RATIO_MARGIN}


def targets(ladder: Ladder, cut: float) -> pd.DataFrame:
    """Held-out runs: family, whether the 95 % interval holds, misfit, and the factor of D/N beyond what two runs have."""
    flops = compute_flops(ladder.runs["n_params"], ladder.runs["n_tokens"])
    seen, held = ladder.runs[flops < flops.max() / cut], ladder.runs[flops >= flops.max() / cut]
    fits, at = fit_ensemble(seen), (held["n_params"].to_numpy(), held["n_tokens"].to_numpy())
    off = fits.log_loss(seen["n_params"], seen["n_tokens"]) - np.log(seen["loss"])
    error = np.abs(fits.log_loss(*at) - np.log(held["loss"].to_numpy()))
    ratios, ratio = np.sort(seen["n_tokens"] / seen["n_params"]), at[1] / at[0]
    return pd.DataFrame(
        {
            "family": ladder.family,
            "inside": error <= interval_factor(0.95) * log_scale(fits, *at),
            "misfit": MAD * float(np.median(np.abs(off))),
            "ratio": np.maximum(np.maximum(ratios[1] / ratio, ratio / ratios[-2]), 1.0),
        }
    )


def threshold(some: pd.DataFrame, reason: str) -> float:
    """The value of a reason's quantity that parts held from missed intervals best: the largest z of two proportions."""
    best, value = 0.0, float(some[reason].max())
    for candidate in np.sort(some[reason].unique()):
        within = some[reason] <= candidate
        n, m = int(within.sum()), int((~within).sum())
        if min(n, m) < LEAST:
            continue
        pooled = some["inside"].mean()
        z = (some.loc[within, "inside"].mean() - some.loc[~within, "inside"].mean()) / np.sqrt(
            max(pooled * (1 - pooled), 1e-9) * (1 / n + 1 / m)
        )
        if z > best:
            best, value = float(z), float(candidate)
    return value


def main() -> None:
    """Print a row for each family left out and reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=float, nargs="+", default=[10, 30])
    cuts, parts = parser.parse_args().cuts, []
    for ladder in ladders():
        flops = compute_flops(ladder.runs["n_params"], ladder.runs["n_tokens"])
        parts += [targets(ladder, cut) for cut in cuts if (flops < flops.max() / cut).sum() > 7]
    found, rows = pd.concat(parts, ignore_index=True), []
    for reason, in_use in IN_USE.items():
        # D/N is judged where nothing else is wrong.
        some = found[found["misfit"] <= MAX_MISFIT] if reason == "ratio" else found
        for family, own in some.groupby("family"):
            by_others = threshold(some[some["family"] != family], reason)
            for name, value in (("others'", by_others), ("in use", in_use)):
                within, beyond = own[own[reason] <= value], own[own[reason] > value]
                counts = {"within": len(within), "holds": within["inside"].mean(), "beyond": len(beyond)}
                rows.append(
                    {"reason": reason, "left out": family, "threshold": name, "value": value}
                    | counts
                    | {"beyond holds": beyond["inside"].mean()}
                )
    table = pd.DataFrame(rows).round(3)
    print(table.to_string(index=False))
    for (reason, name), part in table.groupby(["reason", "threshold"]):
        held = [
            np.average(part[c].fillna(0), weights=part[n]) for c, n in (("holds", "within"), ("beyond holds", "beyond"))
        ]
        print(
            f"{reason}, {name}: within {held[0]:.3f} of {part['within'].sum()}, beyond {held[1]:.3f} of {part['beyond'].sum()}"
        )


if __name__ == "__main__":
    main()
