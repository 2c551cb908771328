"""Held-out losses of mixtures of experts: our forecast, a dense form in effective parameters, and the form of Clark et al.

python tests/benchmarks/routed_law.py

Each router of Clark et al.'s public table (2202.01169; S-Base and Hash, with the dense runs) is one ladder of one length. Sizes,
numbers of experts and k are held out in turn. The rivals have the same columns and are fitted by robust least squares of log loss.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from scaling import MixtureOfExperts, fit
from scaling.fits.sparsity import with_sparsity
from tests.benchmarks.ladders import table

ROUTERS = ("S-Base", "Hash")
TOKENS_PER_STEP = 524288.0
STEPS = 249000.0
"""Length of all runs but one, which is .4 % longer."""
DELTA = 0.005
CENTRE = np.log(6e7)


@dataclass(frozen=True)
class Rival:
    """Log loss of parameters and of log N and log sparsity, and where its least squares begin."""

    log_loss: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    start: tuple[float, ...]

    def predict(self, known: pd.DataFrame, unknown: pd.DataFrame) -> np.ndarray:
        rng, measured = np.random.default_rng(0), np.log(known["loss"].to_numpy())

        def residual(theta: np.ndarray) -> np.ndarray:
            off = self.log_loss(theta, *_columns(known)) - measured
            return np.asarray(np.nan_to_num(off, nan=1e3, posinf=1e3, neginf=-1e3))

        starts = [np.array(self.start) + (i > 0) * rng.normal(0, 0.3, len(self.start)) for i in range(4)]
        with np.errstate(all="ignore"):
            found = [least_squares(residual, start, loss="huber", f_scale=DELTA, max_nfev=500) for start in starts]
        return np.asarray(self.log_loss(min(found, key=lambda each: each.cost).x, *_columns(unknown)))


def _columns(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    return np.log(rows["n_params"].to_numpy()) - CENTRE, np.log(rows["sparsity"].to_numpy())


def dense(theta: np.ndarray, log_n: np.ndarray, log_s: np.ndarray) -> np.ndarray:
    """E + A/(N·S^gamma)^alpha."""
    e, a, alpha, gamma = theta
    return np.asarray(np.logaddexp(e, a - np.exp(alpha) * (log_n + gamma * log_s)))


def geometric(theta: np.ndarray, log_n: np.ndarray, log_s: np.ndarray) -> np.ndarray:
    """E + A/(N·T)^(alpha/2)."""
    return dense(np.append(theta, 0.5), log_n, log_s)


def clark(theta: np.ndarray, log_n: np.ndarray, log_s: np.ndarray) -> np.ndarray:
    """a·log N + b·log S' + c·log N·log S' + d, with S' saturating between two bounds (2202.01169, eq. 2 and 6, with T/N for B)."""
    a, b, c, d, first, further = theta
    least = 1 + np.exp(first)
    most = least + np.exp(further)
    saturating = -np.log(1 / (np.exp(log_s) - 1 + 1 / (1 / least - 1 / most)) + 1 / most)
    return np.asarray(a * log_n + b * saturating + c * log_n * saturating + d)


RIVALS = {
    "dense in N·S^gamma": Rival(dense, (0.5, 0.3, -1.5, 0.4)),
    "dense in √(N·T)": Rival(geometric, (0.5, 0.3, -1.5)),
    "Clark et al.": Rival(clark, (-0.08, -0.05, 0.005, 1.0, -1.0, 5.5)),
}


def ladder(router: str) -> pd.DataFrame:
    """The runs of one router and the dense runs, with N, D and sparsity."""
    runs = table("dm_routing_upto370m")
    runs = runs[runs["router_type"].isin(["Dense", router])].reset_index(drop=True)
    return with_sparsity(runs.assign(n_tokens=STEPS * TOKENS_PER_STEP, size=runs["n_params_active"]))


def held_out(runs: pd.DataFrame) -> Iterator[tuple[str, np.ndarray]]:
    """Name and mask of each set of runs that is held out."""
    yield "size 370M", (runs["size"] > 3e8).to_numpy()
    yield "experts, most", (runs["num_experts"] >= 512).to_numpy()
    yield "experts, two most", (runs["num_experts"] >= 256).to_numpy()
    for n_experts in sorted(runs["num_experts"].unique())[1:-1]:
        yield f"experts, {n_experts}", (runs["num_experts"] == n_experts).to_numpy()
    if ((runs["k"] > 1) & (runs["num_experts"] > 1)).any():
        yield "k above 1", ((runs["k"] > 1) & (runs["num_experts"] > 1)).to_numpy()


def errors_of(runs: pd.DataFrame, split: str, out: np.ndarray) -> pd.DataFrame:
    """One row for each held-out run: split, error of log loss by method, inside (90 % interval), width, supported."""
    known, unknown = runs[~out], runs[out]
    fitted = fit(known, n_params_convention="active", form=MixtureOfExperts(), n_bootstrap=20, loss_unit="nats")
    ahead = [fitted.forecast(row.n_params, row.n_tokens, sparsity=row.sparsity) for row in unknown.itertuples()]
    measured = unknown["loss"].to_numpy()
    found = {
        "forecast": np.log([each.loss for each in ahead]),
        "law": np.log(fitted.predict(**unknown[["n_params", "n_tokens", "sparsity"]])),
        **{rival: each.predict(known, unknown) for rival, each in RIVALS.items()},
    }
    part = pd.DataFrame({method: log_loss - np.log(measured) for method, log_loss in found.items()})
    part["inside"] = [each.low <= loss <= each.high for each, loss in zip(ahead, measured, strict=True)]
    part["width"] = [each.high / each.low - 1 for each in ahead]
    part["supported"] = [each.supported for each in ahead]
    return part.assign(split=split)


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Mean |log error| in % by split and method, and the share of losses inside the 90 % interval."""
    methods = ["forecast", "law", *RIVALS]
    split = found.groupby("split", sort=False)
    means = 100 * found[methods].abs().groupby(found["split"], sort=False).mean()
    return means.assign(
        runs=split.size(),
        inside=split["inside"].mean(),
        width=100 * split["width"].median(),
        supported=split["supported"].mean(),
    )


def main() -> None:
    every = []
    for router in ROUTERS:
        runs = ladder(router)
        found = pd.concat([errors_of(runs, name, out) for name, out in held_out(runs)], ignore_index=True)
        every.append(found)
        print(f"\n{router}\n{summary(found).round(2).to_string()}")
    found = pd.concat(every)
    kinds = found.assign(split=found["split"].str.split(",").str[0])
    print(f"\nboth\n{summary(kinds).round(2).to_string()}")
    print(
        f"inside 90 %: {found['inside'].mean():.1%} of {len(found)}, supported: {found.loc[found['supported'], 'inside'].mean():.1%}"
    )


if __name__ == "__main__":
    main()
