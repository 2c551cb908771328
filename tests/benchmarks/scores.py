"""Forecasts of public models' scores: how often 90 % intervals contain them, for families left out and for larger models.

    python tests/benchmarks/scores.py [--most-flops 8.4e21]

The tables are observational (Open LLM leaderboards, 28 scores): N, D and scores of public models, nothing trained here. `score` is
`fit_score`, with an offset for each family; `one curve` is `fit_downstream` in the logarithm of the compute, one sigmoid for all
families, as is usual.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from scaling import fit_downstream, fit_score

REFERENCE = Path(os.environ.get("MUSCALE_REFERENCE_DATA", Path(__file__).parents[3] / "shared/data"))
TABLES = ("obsscaling_base_upto8.4e22", "sloth_v1_upto8.4e22", "sloth_v2_upto8.4e22")
FOLDS = 5


def table(name: str) -> pd.DataFrame:
    found = pd.read_csv(REFERENCE / f"{name}.csv")
    return found.assign(n_params=1e9 * found["n_params_b"], n_tokens=1e12 * found["n_tokens_t"])


def splits(rows: pd.DataFrame, most_flops: float) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Yield the name of the held-out part, the rows to fit, and the rows to forecast."""
    families = rows["family"].unique()
    fold = rows["family"].map(
        dict(zip(families, np.random.default_rng(0).permutation(len(families)) % FOLDS, strict=True))
    )
    for which in range(FOLDS):
        yield "families", rows[fold != which], rows[fold == which]
    flops = 1e21 * rows["flops_1e21"]
    yield f"models above {most_flops:.1e}", rows[flops <= most_flops], rows[flops > most_flops]


def forecasts(fitted: pd.DataFrame, held_out: pd.DataFrame, metric: str) -> Iterator[dict[str, object]]:
    """Whether each interval contains its score, by both ways."""
    most = 100.0 if fitted[metric].max() > 1 else 1.0
    law = fit_score(fitted[["n_params", "n_tokens", "family", metric]], metric=metric, most=most)
    offset = np.log(1e27)
    curve = fit_downstream(fitted.assign(loss=offset - np.log(1e21 * fitted["flops_1e21"])), metric=metric, most=most)
    for row in held_out.to_dict("records"):
        score, ahead = row[metric], law.forecast(row["n_params"], row["n_tokens"], row["family"])
        low, high = curve.interval(offset - np.log(1e21 * row["flops_1e21"]))
        common = {"metric": metric, "seen": ahead.family is not None, "ok": not ahead.reasons}
        yield common | {
            "way": "score",
            "inside": ahead.low <= score <= ahead.high,
            "width": (ahead.high - ahead.low) / most,
        }
        yield common | {"way": "one curve", "inside": low <= score <= high, "width": (high - low) / most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-flops", type=float, default=8.4e21)
    most_flops = parser.parse_args().most_flops
    found, seconds = [], time.process_time()
    for name in TABLES:
        rows = table(name)
        metrics = [column for column in rows.columns[5:] if column not in ("n_params", "n_tokens")]
        for what, fitted, held_out in splits(rows, most_flops):
            for metric in metrics:
                known, ahead = fitted.dropna(subset=[metric]), held_out.dropna(subset=[metric])
                if len(known) >= 8 and len(ahead):
                    found += [{"held out": what, "table": name[:8], **each} for each in forecasts(known, ahead, metric)]
    scores = pd.DataFrame(found)
    for by in (
        ["held out", "way"],
        ["held out", "way", "seen"],
        ["held out", "way", "table"],
        ["held out", "way", "ok"],
    ):
        print(
            scores.groupby(by).agg(n=("inside", "size"), inside=("inside", "mean"), width=("width", "median")).round(3)
        )
    print(f"{time.process_time() - seconds:.0f} s of a core")


if __name__ == "__main__":
    main()
