"""Forecasts by the law of one size, E + B/(D + D_0)^beta: held-out error, coverage and width, on public runs and on planted ladders.

    python tests/benchmarks/one_size.py [--sets 600]

Public runs of one size on several lengths ("from scratch") are fitted up to a half and a quarter of the longest length, and held
against the longer runs. Runs of a stable schedule (Gemstones' cooldowns, a constant rate) are also counted from a checkpoint of the
same run ("continued"): there D_0 is the tokens of the checkpoint. Planted ladders have three to eight lengths over .6 to 2 decades,
noise of .2 to .7 %, E of .5 to .95 of the least loss, beta of .2 to .7, and no D_0, one near the lengths, or a large one. Errors of
the forecast are shown next to those of the same fit with D_0 = 0 and of no change after the longest run; the latter are of the
law's base fit alone. The prior was chosen on the public runs, and the factor of the interval on both, with other planted sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from scaling import OneSize
from scaling.fits.ensemble import BaseFits, fit_ensemble
from scaling.fits.forecast import interval_factor, log_scale
from scaling.fits.support import unsupported
from scaling.forms.problem import Restricted
from tests.benchmarks.ladders import ladders, table

SIZE = 1e8
CUTS, LEVEL = (2.0, 4.0), 0.9
STARTS = (1, 3)
"""Numbers of the run from which a stable run is counted again."""
SAMPLED = np.geomspace(3000, 71000, 14)
"""Steps of a constant rate at which a loss is taken, the mean over 3 % either way."""


def public() -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Family, kind, and runs of one size: n_tokens (or steps), loss."""
    for ladder in ladders():
        if not ladder.annealed or ladder.family in ("llama3", "hoffmann"):  # these have no size with several lengths
            continue
        for _, runs in ladder.runs.groupby(["n_params", "stem"] if ladder.family == "gemstones" else "n_params"):
            yield from counted(ladder.family, runs.groupby("n_tokens", as_index=False)["loss"].mean())
    for _, runs in table("marin_optimizers_130m_best").groupby("optimizer"):
        yield from counted("optimizers", runs[["n_tokens", "loss"]].sort_values("n_tokens"))
    curves = table("mpl_loss_curves")
    for _, curve in curves[curves["run"] == "constant_72000"].groupby("model"):
        near = [curve.loc[(curve["step"] / step - 1).abs() < 0.03, "loss"].mean() for step in SAMPLED]
        yield from counted("mpl", pd.DataFrame({"n_tokens": SAMPLED, "loss": near}))


def counted(family: str, runs: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield the runs from scratch and, of a stable schedule, from checkpoints."""
    yield family, "from scratch", runs
    for start in STARTS if family in ("gemstones", "mpl") else ():
        later = runs.iloc[start:]
        yield family, "continued", later.assign(n_tokens=later["n_tokens"] - runs["n_tokens"].iloc[start - 1])


def planted(seed: int) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """Kind of D_0, runs, and two longer runs, twice and four times the longest."""
    draw = np.random.default_rng([7, seed])
    tokens = np.geomspace(1, 10 ** draw.uniform(0.6, 2), draw.choice([3, 4, 5, 6, 8]))
    kind = draw.choice(["no D_0", "D_0 near", "D_0 large"])
    near, large = 10 ** draw.uniform(-1, 1), tokens.max() * 10 ** draw.uniform(-0.5, 1)
    start = {"no D_0": 0.0, "D_0 near": near, "D_0 large": large}[kind]
    share, beta, noise = draw.uniform(0.5, 0.95), draw.uniform(0.2, 0.7), draw.choice([0.002, 0.004, 0.007])
    every = np.append(tokens, tokens.max() * np.array([2, 4]))
    loss = share / (1 - share) * (tokens.max() + start) ** -beta + (every + start) ** -beta
    rows = pd.DataFrame({"n_tokens": every, "loss": loss * np.exp(noise * draw.standard_normal(len(every)))})
    return str(kind), rows.iloc[:-2], rows.iloc[-2:]


def without_start(rows: pd.DataFrame, tokens: pd.Series) -> np.ndarray:
    """Log loss by the base fit with D_0 at its lower bound, which is as good as 0."""
    fits = BaseFits.of(rows, OneSize())
    full, basis = fits.problem, np.eye(4)[:, :3]
    offset = np.append(np.zeros(3), full.lower[3])
    plain = Restricted(
        full=full, basis=basis, offset=offset, lower=full.lower[:3], upper=full.upper[:3], kept=(0, 1, 2)
    )
    theta, _ = replace(fits, problem=plain).adaptive()
    return np.asarray(plain.elsewhere({"n_tokens": tokens.to_numpy()}).log_loss(theta[None])[0])


def forecasts(rows: pd.DataFrame, later: pd.DataFrame) -> pd.DataFrame:
    """Errors in %, and whether the interval held, for each later run."""
    rows = rows.assign(n_params=SIZE, stem=range(len(rows)))
    fits, tokens, measured = fit_ensemble(rows, form=OneSize()), later["n_tokens"], np.log(later["loss"])
    error = fits.log_loss(SIZE, tokens) - measured
    reach = interval_factor(LEVEL) * log_scale(fits, SIZE, tokens)
    return pd.DataFrame(
        {
            "times": tokens / rows["n_tokens"].max(),
            "runs": len(rows),
            "error": 100 * error.abs(),
            "bias": 100 * error,
            "D_0 = 0": 100 * (without_start(rows, tokens) - measured).abs(),
            "no change": 100 * np.abs(np.log(rows["loss"].iloc[-1]) - measured),
            "held": 100 * (error.abs() <= reach),
            "width": 200 * np.sinh(reach),
            "rising": 100.0 * ("rising" in unsupported(rows, None, SIZE, tokens.max())),
        }
    )


def main() -> None:
    """Print mean errors, share held and median width, by kind and distance, by number of runs, and by family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=600)
    sets = parser.parse_args().sets
    found = []
    for family, kind, runs in public():
        for cut in CUTS:
            known = runs["n_tokens"] <= runs["n_tokens"].max() / cut * 1.001
            if known.sum() >= 3:
                found.append(forecasts(runs[known], runs[~known]).assign(family=family, kind=kind))
    for seed in range(sets):
        kind, runs, later = planted(seed)
        found.append(forecasts(runs, later).assign(family="planted", kind=kind))
    rows = pd.concat(found, ignore_index=True)
    rows["times"] = pd.cut(rows["times"], [1, 2.02, 4.1, 10], labels=["to 2", "to 4", "beyond"])
    rows["ladders"] = np.where(rows["family"] == "planted", "planted", "public")
    shown = {name: (name, "mean") for name in ("error", "bias", "D_0 = 0", "no change", "held")}
    shown |= {"width": ("width", "median"), "rising": ("rising", "mean"), "forecasts": ("held", "size")}
    for by in (["ladders", "kind", "times"], ["ladders", "runs"], ["family"]):
        print(rows.groupby(by, observed=True).agg(**shown).round(2).to_string(), end="\n\n")


if __name__ == "__main__":
    main()
