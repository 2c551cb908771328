"""Runs at several sizes and lengths: the learning-rate grid that shows what transfers, and the ladder that tells the law.

One policy holds for the ladder and for the full run: muP across size, the horizon law across tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from muscale.config import StudyConfig
from muscale.jobs import Job
from muscale.lineage import Chain
from proxy_models.hyperparameters import Hyperparameters, branch
from proxy_models.numerics import Numerics
from scaling import HorizonLaw

MAX_WARMUP = 2.1
"""Warmup of a run that tells the law, in units of the study's own fraction: a branch at half its stem's length has twice
the fraction (and a batch of rounding); a shorter one is mostly warmup, and its loss is of another recipe (assumed)."""


def branches(
    numerics: Numerics, hyperparameters: Hyperparameters, lengths: Sequence[float], *, purpose: str, label: str
) -> list[Job]:
    """Runs of these lengths that share one stem, its warmup and decay resolved for the longest."""
    h = hyperparameters
    recipe = h.resolve(h.whole_batches(max(lengths)))
    jobs = []
    for length in sorted(lengths):
        n_tokens = h.whole_batches(length)
        segments = branch(recipe, h.stable_tokens(n_tokens), n_tokens)
        chain = Chain(numerics=numerics, segments=segments)
        jobs.append(Job(purpose=purpose, label=f"{label}, {n_tokens} tokens", hyperparameters=h, chain=chain))
    return jobs


def rate_grid(config: StudyConfig, centre: float) -> list[float]:
    """Rates of the transfer check, evenly spaced in octaves around the sweep's best."""
    half = config.transfer.octaves / 2
    return [float(rate) for rate in centre * 2 ** np.linspace(-half, half, config.transfer.rates)]


def transfer_jobs(config: StudyConfig, numerics: Numerics, best: Hyperparameters) -> list[Job]:
    """The grid: widths × rates × seeds, each annealed at every horizon."""
    settings = config.transfer
    jobs = []
    for width in settings.widths:
        for seed in settings.seeds:
            member = replace(numerics, model=config.family.at(width=width), seed=seed)
            for rate in rate_grid(config, best.learning_rate):
                lengths = [settings.n_tokens * fraction for fraction in settings.horizons]
                label = f"width {width}, rate {rate:.4g}"
                tuned = replace(best, learning_rate=rate)
                jobs += branches(member, tuned, lengths, purpose="transfer", label=label)
    return jobs


def tuned_for(best: Hyperparameters, horizon: HorizonLaw, n_tokens: float) -> Hyperparameters:
    """The sweep's best with the rate that the horizon law gives for a run of `n_tokens`."""
    return replace(best, learning_rate=float(horizon.rate(n_tokens)))


def ladder_jobs(config: StudyConfig, numerics: Numerics, best: Hyperparameters, horizon: HorizonLaw) -> list[Job]:
    """The ladder: each stem at the rate of its branches' geometric mean length, so that none is far from its own."""
    jobs = []
    for stem in config.ladder.stems:
        lengths = [stem.n_tokens / 2**k for k in range(stem.branches)]
        tuned = tuned_for(best, horizon, float(np.exp(np.mean(np.log(lengths)))))
        member = replace(numerics, model=config.family.at(width=stem.width), seed=config.ladder.seed)
        jobs += branches(member, tuned, lengths, purpose="ladder", label=f"width {stem.width}")
    return jobs


def grid_rows(runs: pd.DataFrame, jobs: Sequence[Job]) -> pd.DataFrame:
    """The grid's runs as `scaling` wants them: width, rate, n_tokens, seed, loss (NaN where the run diverged)."""
    outcome = runs[runs["purpose"] == "transfer"].set_index(["stem", "n_tokens"])["loss"]
    return pd.DataFrame(
        [
            {
                "width": job.chain.numerics.model.d_model,
                "rate": job.hyperparameters.learning_rate,
                "n_tokens": job.chain.last.end,
                "seed": job.chain.numerics.seed,
                "loss": outcome.get((job.chain.stem, job.chain.last.end), np.nan),
            }
            for job in jobs
        ]
    )


def law_rows(runs: pd.DataFrame, jobs: Sequence[Job], horizon: HorizonLaw) -> pd.DataFrame:
    """Every annealed run, with what `scaling.fit` needs, and in `left_out` why it can't tell the law ("" if it can).

    `regret` is the relative loss above the best rate's that the horizon law predicts. It is known for the grid and the
    ladder, which share all other hyperparameters; the sweep's rows differ in those too.
    """
    policy = {(job.chain.stem, job.chain.last.end) for job in jobs}
    rows = runs[runs["loss"].notna() & (runs["purpose"] != "full")].drop_duplicates("key").copy()
    rows["regret"] = horizon.regret(rows["learning_rate"].to_numpy(), rows["n_tokens"].to_numpy())
    rows["annealed"] = True
    rows["left_out"] = [
        _left_out(row, in_policy=(row["stem"], row["n_tokens"]) in policy) for row in rows.to_dict("records")
    ]
    columns = ["key", "purpose", "stem", "d_model", "learning_rate", "n_params", "n_tokens", "loss", "regret"]
    return rows[[*columns, "annealed", "left_out"]].reset_index(drop=True)


def _left_out(row: dict[str, Any], *, in_policy: bool) -> str:
    if not in_policy:
        return "the regret of its searched hyperparameters is not known"
    share = row["segment"]["recipe"]["warmup_tokens"] / row["n_tokens"]
    allowed = MAX_WARMUP * row["hyperparameters"]["warmup_fraction"]
    if share > allowed:
        return f"its warmup takes {share:.0%} of its tokens, more than {allowed:.0%}"
    return ""
