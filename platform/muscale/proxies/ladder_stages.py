"""Runs of the ladder that end with several shares of their tokens in the corpus's last stage, and their law."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from muscale.actors.jobs import Job
from muscale.store.ledger import Ledger
from scaling import ScalingFit, StageLaw, fit_stages


def last_stage_share(run_tokens: int, n_tokens: int, until_fraction: float) -> float:
    """Return the share of a run's tokens in the last stage, which begins at a fraction of `run_tokens`."""
    return max(0.0, 1 - until_fraction * run_tokens / n_tokens)


def stage_law(jobs: Sequence[Job], fit: ScalingFit, ledger: Ledger, until_fraction: float) -> StageLaw:
    """Fit the law of shares to the ladder's runs that have ended.

    Args:
        jobs: The ladder's runs.
        until_fraction: End of the first stage, as a fraction of the run.

    Raises:
        ScalingError: As `fit_stages`.
    """
    rows = []
    for key, outcome in ledger.outcomes(job.chain for job in jobs).items():
        if outcome.loss is not None:
            job = next(job for job in jobs if job.chain.key == key)
            run_tokens = job.chain.numerics.run_tokens or outcome.tokens
            rows.append(
                {
                    "stem": job.chain.stem,
                    "n_params": job.chain.numerics.model.n_params,
                    "n_tokens": outcome.tokens,
                    "loss": outcome.loss,
                    "share": last_stage_share(run_tokens, outcome.tokens, until_fraction),
                }
            )
    return fit_stages(pd.DataFrame(rows, columns=["stem", "n_params", "n_tokens", "loss", "share"]), fit)
