"""Forecasts of public models' scores: how often 90 % intervals contain them, for families left out and for larger models.

    python tests/benchmarks/scores.py [--most-flops 8.4e21]
    python tests/benchmarks/scores.py --planted 120

The tables are observational (Open LLM leaderboards, 28 scores): N, D and scores of public models, nothing trained here. `score` is
`fit_score`, with an offset for each family; `one curve` is `fit_downstream` in the logarithm of the compute, one sigmoid for all
families, as is usual.

With --planted, tasks of one recipe instead: a ladder of 20 runs with five evaluations each, and a full run of 10 to 30 times the
largest run's compute. Half of the scores are sigmoids of the task's loss, half of ln N and ln D. `fit_task` chooses between the direct
law and two steps; the table also has each law alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from scaling import Chinchilla, ScalingError, fit_downstream, fit_score, fit_task, fit_two_step

REFERENCE = Path(os.environ.get("MUSCALE_REFERENCE_DATA", Path(__file__).parents[3] / "shared/data"))
TABLES = ("obsscaling_base_upto8.4e22", "sloth_v1_upto8.4e22", "sloth_v2_upto8.4e22")
FOLDS = 5
SHARES = (0.25, 0.5, 0.7, 0.85, 1.0)
"""Shares of a planted run at which it is evaluated."""


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


def planted_task(seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Evaluations of a planted ladder, and of the full run."""
    rng = np.random.default_rng(seed)
    law = Chinchilla().law(
        E=rng.uniform(0.8, 1.8), A=400.0, B=2000.0, alpha=rng.uniform(0.3, 0.38), beta=rng.uniform(0.3, 0.38)
    )
    sizes, ratios = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0]))
    flops, ratio = 6 * 80 * 4e16 * np.exp(rng.uniform(np.log(10), np.log(30))), rng.uniform(20, 60)
    n_params = np.append(sizes, np.sqrt(flops / 6 / ratio))
    runs = pd.DataFrame({"n_params": n_params, "n_tokens": n_params * np.append(ratios, ratio), "run": range(21)})
    rows = pd.concat([runs.assign(tokens=share * runs["n_tokens"]) for share in SHARES], ignore_index=True)
    at_end = rows["tokens"] == rows["n_tokens"]
    of_run = 0.003 * rng.standard_normal(21)[rows["run"]]
    rows["task_loss"] = law.loss(rows["n_params"], rows["tokens"]) * np.where(at_end, 1, 1.05) * np.exp(of_run)
    chance, top, noise = rng.choice([0.0, 0.25, 0.5]), rng.uniform(0.8, 1), np.exp(rng.uniform(*np.log([0.003, 0.02])))
    best = rows.loc[at_end & (rows["run"] < 20), ["n_params", "n_tokens", "task_loss"]]
    reached = rng.uniform(-2, 1)  # logit of the ladder's best score
    if seed % 2:
        a, b = rng.uniform(0.2, 0.5, 2)
        eta = a * np.log(rows["n_params"]) + b * np.log(rows["tokens"])
        eta += reached - (a * np.log(best["n_params"]) + b * np.log(best["n_tokens"])).max()
    else:
        width = rng.uniform(0.1, 0.3) * np.ptp(best["task_loss"])
        eta = reached + (best["task_loss"].min() - rows["task_loss"]) / width
    scattered = chance + (top - chance) / (1 + np.exp(-eta)) + noise * rng.standard_normal(len(rows))
    rows["accuracy"] = np.clip(scattered, 0, 1)
    return rows[rows["run"] < 20].assign(chance=chance), rows[(rows["run"] == 20) & at_end]


def planted_forecasts(n_tasks: int) -> pd.DataFrame:
    """A row for each planted task and law: whether its 90 % interval has the full run's score, its width and error."""
    found = []
    for seed in range(n_tasks):
        table, full = planted_task(seed)
        (run,) = full.to_dict("records")
        chance, size = float(table["chance"].iloc[0]), (run["n_params"], run["n_tokens"])
        chosen = fit_task(table, n_params_convention="planted", chance=chance)
        at_end = table["tokens"] == table["n_tokens"]
        columns = ["n_params", "n_tokens", "task_loss", "accuracy"]
        two_steps = fit_two_step(
            table.loc[at_end, columns].assign(stem=table["run"]),
            n_params_convention="planted",
            checkpoints=table.loc[~at_end, columns].assign(stem=table["run"]),
            chance=chance,
        )
        assert chosen.direct is not None
        common = {"planted": "by N and D" if seed % 2 else "by loss", "task": seed}
        for way, law in (("chosen", chosen), ("direct law", chosen.direct), ("two steps", two_steps)):
            try:
                ahead = law.forecast(*size)
            except ScalingError:
                found.append(common | {"way": "too little signal"})
                break
            inside, error = ahead.low <= run["accuracy"] <= ahead.high, abs(ahead.value - run["accuracy"])
            of_law = {"way": way, "took": chosen.method, "ok": not ahead.reasons, "inside": inside, "error": error}
            found.append(common | of_law | {"width": ahead.high - ahead.low})
    return pd.DataFrame(found)


def print_planted(n_tasks: int) -> None:
    scores = planted_forecasts(n_tasks)
    for by in (["way"], ["way", "planted"], ["way", "took"], ["way", "ok"]):
        print(
            scores.groupby(by)
            .agg(n=("task", "size"), inside=("inside", "mean"), width=("width", "median"), error=("error", "mean"))
            .round(3)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-flops", type=float, default=8.4e21)
    parser.add_argument("--planted", type=int, default=0, help="planted tasks instead of the public tables")
    arguments = parser.parse_args()
    most_flops = arguments.most_flops
    found, seconds = [], time.process_time()
    if arguments.planted:
        print_planted(arguments.planted)
        return
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
