"""Does `fit_mixture` put unseen mixtures in their order, at the runs' size and beyond, and do its intervals hold?

    python tests/benchmarks/mixtures.py [--peer PYTHON]

RegMix's public runs (2407.01492), 13 domains: fitted to the 512 at 1M, predicted are the 256 test mixtures at 1M and the order
of 128 of these at 60M; five-fold within 60M, alone and beside the 512 at 1M. Then the five domains of domain_mixture_70m_160m.
Beside it, on the same splits: least squares in the weights, and the exponential law of 2403.16952, `c + k·exp(Σ t_j w_j)`.
`--peer` names a Python that has LightGBM (`pip install lightgbm scikit-learn` in a venv of its own), which is run as in RegMix's
code: 1,000 trees at a rate of .01. Tables are read from $MUSCALE_REFERENCE_DATA or ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from scaling import fit_mixture

FOLDER = Path(os.environ.get("MUSCALE_REFERENCE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
FOLDS = 5
PEER = """
import json, sys, warnings
import lightgbm as lgb, numpy as np
warnings.simplefilter("ignore")
problem = json.load(open(sys.argv[1]))
x, new = np.array(problem["weights"]), np.array(problem["new"])
model = dict(n_estimators=1000, learning_rate=0.01, verbosity=-1, random_state=42, n_jobs=1)
print(json.dumps([list(lgb.LGBMRegressor(**model).fit(x, np.array(y)).predict(new)) for y in problem["losses"]]))
"""
Fitter = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]
"""From runs to fit and runs to predict: mixture, domain, loss, and low and high where it has them."""


def ours(runs: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """By `scaling.fit_mixture`, at the largest size of the runs."""
    return fit_mixture(runs).predict(new.drop(columns=["n_params", "n_tokens"], errors="ignore"))


def by_columns(fit: Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]) -> Fitter:

    def fitted(runs: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
        found = {name: fit(shares(runs), runs[f"loss_{name}"].to_numpy())(shares(new)) for name in targets(runs)}
        return long(pd.DataFrame(found))

    return fitted


def linear(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Least squares; the weights sum to 1, so that there is no constant."""
    numbers = np.linalg.lstsq(x, y)[0]
    return lambda new: np.asarray(new @ numbers)


def exponential(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The law of 2403.16952, by Huber's loss from five floors; k is in the t_j, as the weights sum to 1."""
    best: Any = None
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        floor = share * y.min()
        start = np.array([floor, *np.linalg.lstsq(x, np.log(y - floor))[0]])
        found = least_squares(
            lambda p: p[0] + np.exp(x @ p[1:]) - y,
            start,
            jac=lambda p: np.column_stack([np.ones(len(x)), np.exp(x @ p[1:])[:, None] * x]),
            loss="huber",
            f_scale=0.02,
            max_nfev=100,
        )
        best = found if best is None or found.cost < best.cost else best
    return lambda new: np.asarray(best.x[0] + np.exp(new @ best.x[1:]))


def peer(python: str) -> Fitter:
    """By LightGBM in another Python."""

    def fitted(runs: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
        with tempfile.TemporaryDirectory() as folder:
            problem = Path(folder) / "problem.json"
            losses = [runs[f"loss_{name}"].tolist() for name in targets(runs)]
            tables = {"weights": shares(runs).tolist(), "new": shares(new).tolist(), "losses": losses}
            problem.write_text(json.dumps(tables))
            done = subprocess.run([python, "-c", PEER, problem], capture_output=True, text=True, check=True)
        return long(pd.DataFrame(dict(zip(targets(runs), json.loads(done.stdout), strict=True))))

    return fitted


def targets(runs: pd.DataFrame) -> list[str]:
    return sorted(name.removeprefix("loss_") for name in runs if name.startswith("loss_"))


def shares(runs: pd.DataFrame) -> np.ndarray:
    """Weights over their sum."""
    weights = runs[[name for name in runs if name.startswith("weight_")]].to_numpy()
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def long(predicted: pd.DataFrame) -> pd.DataFrame:
    """From a column for each domain to a row."""
    return predicted.rename_axis("mixture").reset_index().melt(id_vars="mixture", var_name="domain", value_name="loss")


def score(found: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """By domain: order (Spearman), error (root mean square of log loss), held (share inside the intervals)."""
    rows = {}
    for name, own in found.groupby("domain"):
        own, truth = own.sort_values("mixture"), new[f"loss_{name}"].to_numpy()
        inside = ((own["low"] < truth) & (truth < own["high"])).mean() if "low" in own else np.nan
        error = np.sqrt((np.log(own["loss"].to_numpy().clip(1e-3) / truth) ** 2).mean())  # a line may go below 0
        flat = np.ptp(own["loss"]) == 0  # LightGBM with 20 runs: a leaf holds 20
        order = np.nan if flat else pd.Series(own["loss"].to_numpy()).corr(pd.Series(truth), method="spearman")
        rows[name] = {"order": order, "error": error, "held": inside}
    return pd.DataFrame.from_dict(rows, orient="index")


def folded(fit: Fitter, runs: pd.DataFrame, beside: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each run predicted from those of the other folds, with other runs beside them."""
    fold = np.random.default_rng(0).permutation(len(runs)) % FOLDS
    parts = []
    for number in range(FOLDS):
        others = runs[fold != number]
        found = fit(others if beside is None else pd.concat([beside, others]), runs[fold == number])
        parts.append(found.assign(mixture=np.flatnonzero(fold == number)[found["mixture"]]))
    return pd.concat(parts, ignore_index=True)


def line(what: str, way: str, scores: pd.DataFrame, seconds: float, own: str | None = None, scale: bool = True) -> None:
    first = f"{own} {scores.loc[own, 'order']:.4f}  " if own else ""
    held = (
        f"  90 % intervals hold {scores['held'].mean():.3f} ({scores['held'].min():.2f} to {scores['held'].max():.2f})"
    )
    print(
        f"{what:34} {way:12} {first}mean order {scores['order'].mean():.4f}, least {scores['order'].min():.3f}"
        + (f", error {scores['error'].mean():.2%}" if scale else "")
        + (held if scale and scores["held"].notna().all() else "")
        + f"  {seconds:.1f} CPU s",
        flush=True,
    )


def timed(work: Callable[[], pd.DataFrame]) -> tuple[pd.DataFrame, float]:
    """What was found, and CPU seconds of this process and its children."""
    before = os.times()
    found = work()
    now = os.times()
    return found, sum(now[:4]) - sum(before[:4])


def regmix(ways: dict[str, Fitter]) -> None:
    """RegMix's runs."""
    small, large = (pd.read_csv(FOLDER / f"{name}.csv") for name in ("regmix_1m", "regmix_60m_ids1to128"))
    small, large = (table.rename(columns={"n_params_nonembedding": "n_params"}) for table in (small, large))
    train, test = small[small["split"] == "train"], small[small["split"] == "test"]
    for way, fit in ways.items():
        both = pd.concat([test, large])
        found, seconds = timed(lambda fit=fit, both=both: fit(train, both))  # type: ignore[misc]
        line("512 at 1M, 256 at 1M", way, score(found[found["mixture"] < len(test)], test), seconds, "pile_cc")
        beyond = score(found[found["mixture"] >= len(test)], large)
        line("the same, order of 128 at 60M", way, beyond, 0.0, "pile_cc", scale=False)
        found, seconds = timed(lambda fit=fit: folded(fit, large))  # type: ignore[misc]
        line("five-fold within 128 at 60M", way, score(found, large), seconds, "pile_cc")
    found, seconds = timed(lambda: folded(ours, large, train))
    line("the same beside the 512 at 1M", "ours", score(found, large), seconds, "pile_cc")


def five_domains(ways: dict[str, Fitter]) -> None:
    """The mixtures at 70M and 160M: those at one size, then 160M from all at 70M and four at 160M."""
    runs = pd.read_csv(FOLDER / "domain_mixture_70m_160m.csv")
    runs.columns = runs.columns.str.replace("proportion_", "weight_")
    runs["n_params"] = runs["model_size"].map({"70M": 7e7, "160M": 1.6e8})
    train, test = (runs[runs["upstream_split"] == split] for split in ("train", "test"))
    for size in ("70M", "160M"):
        own, new = train[train["model_size"] == size], test[test["model_size"] == size]
        for way, fit in ways.items():
            found, seconds = timed(lambda fit=fit, own=own, new=new: fit(own, new))  # type: ignore[misc]
            line(f"20 mixtures at {size}, 6 at {size}", way, score(found, new), seconds)
    few = pd.concat([train[train["model_size"] == "70M"], train[train["model_size"] == "160M"].iloc[::5]])
    new = runs[(runs["model_size"] == "160M") & ~runs.index.isin(few.index)]
    found, seconds = timed(lambda: ours(few, new))
    line("20 at 70M and 4 at 160M, 22 at 160M", "ours", score(found, new), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer")
    options = parser.parse_args()
    ways: dict[str, Fitter] = {"ours": ours, "linear": by_columns(linear), "exponential": by_columns(exponential)}
    if options.peer:
        ways["LightGBM"] = peer(options.peer)
    regmix(ways)
    five_domains(ways)


if __name__ == "__main__":
    main()
