"""Workers that stay between stages: warm for one study, and never another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import Study
from muscale.cluster import staying_cluster
from muscale.proxies import transfer
from muscale.work.jobs import finish


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_results_are_entered_where_they_belong_whoever_trained_before(make_study: Callable[[str], Path]) -> None:
    studies = [Study.open(make_study(name), quiet=True) for name in ("one", "another")]
    with staying_cluster():
        for study in studies:
            config, numerics = study.config, study.numerics
            (job, *_) = transfer.jobs(transfer.members(config, numerics, config.hyperparameters))
            assert study.ledger.outcome(job.chain) is None
            finish([job], study.ledger, config.resources, lambda *_: None)
            assert study.ledger.outcome(job.chain) is not None
            assert len(study.runs()) == 1


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("variables", "is_let_in"),
    [({}, True), ({"RAY_AUTH_TOKEN": "wrong" * 8}, False), ({"RAY_AUTH_MODE": "disabled"}, False)],
)
def test_a_ray_of_our_own_lets_nobody_in_without_its_token(variables: dict[str, str], is_let_in: bool) -> None:
    import ray

    assert os.environ["RAY_AUTH_MODE"] == "token", "Ray sets it for its own processes where nobody did"
    address = ray.get_runtime_context().gcs_address
    code = f"import ray; print(ray._raylet.GcsClient({address!r}).get_all_node_info())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode == 0) is is_let_in, done.stderr
    if not is_let_in:
        assert "authentication" in done.stderr.lower()
