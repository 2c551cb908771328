"""Branches of the ladder's runs with other shares of their tokens in the corpus's last stage, and the law of that share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from muscale.actors.jobs import Job
from muscale.settings.corpus import CorpusSettings
from muscale.store.ledger import Ledger
from proxy_models.recipes.segments import branch
from scaling import ScalingFit, StageLaw, fit_stages


def shares(corpus: CorpusSettings, number: int) -> list[float]:
    """Return the shares of so many branches in the last stage, and that of their run: equally spaced from 0."""
    until = corpus.stages[0].until_fraction or 1.0
    return [*np.linspace(0, 1 - until, number, endpoint=False).tolist(), 1 - until]


def stage_branches(corpus: CorpusSettings, number: int, job: Job) -> list[Job]:
    """Return so many branches of a run's stem, which read the data of the run and end earlier: the first with the first stage."""
    h, chain, jobs = job.hyperparameters, job.chain, []
    *others, planned = shares(corpus, number)
    for share in others:
        n_tokens = h.whole_batches((1 - planned) * chain.last.end / (1 - share))
        segments = branch(chain.segments[0].recipe, h.stable_tokens(n_tokens), n_tokens, h.schedule)
        jobs.append(replace(job, label=f"{job.label}, branch of {n_tokens}", chain=replace(chain, segments=segments)))
    return jobs


def stage_law(jobs: Sequence[Job], fit: ScalingFit, ledger: Ledger, corpus: CorpusSettings, number: int) -> StageLaw:
    """Fit the law of the share to the ladder's runs that have ended.

    Args:
        jobs: The ladder's runs.
        number: Branches of each.

    Raises:
        ScalingError: As `fit_stages`.
    """
    known, rows = shares(corpus, number), []
    by_key = {job.chain.key: job for job in jobs}
    for key, outcome in ledger.outcomes(job.chain for job in jobs).items():
        if outcome.loss is not None:
            chain = by_key[key].chain
            begins = (1 - known[-1]) * (chain.numerics.run_tokens or outcome.tokens)
            share = max(0.0, 1 - begins / outcome.tokens)
            rows.append(
                {
                    "stem": chain.stem,
                    "n_params": chain.numerics.model.n_params,
                    "n_tokens": outcome.tokens,
                    "loss": outcome.loss,
                    "share": min(known, key=lambda nominal: abs(nominal - share)),  # runs end with whole batches
                }
            )
    return fit_stages(pd.DataFrame(rows, columns=["stem", "n_params", "n_tokens", "loss", "share"]), fit)
