"""Workers that stay between stages train for one study after another, and record in the ledger of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import Study
from muscale.actors.cluster import staying_cluster
from muscale.actors.jobs import finish_stage
from muscale.progress import Display
from muscale.proxies import transfer


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_results_are_entered_where_they_belong_whoever_trained_before(make_study: Callable[[str], Path]) -> None:
    studies = [Study.open(make_study(name), quiet=True) for name in ("one", "another")]
    with staying_cluster():
        for study in studies:
            config, numerics = study.config, study.config.shared_numerics(study.corpus)
            (job, *_) = transfer.jobs(transfer.members(config, numerics, config.hyperparameters))
            assert study.ledger.outcome(job.chain) is None
            finish_stage("transfer", [job], study.ledger, config.resources, Display(quiet=True))
            assert study.ledger.outcome(job.chain) is not None
            assert len(study.runs()) == 1
