"""What a machine lacks skips the tests that need it; on CI it fails them, as nobody would see the skip."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from functools import cache

# Before NumPy is imported: on a busy machine two threads take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves workers beside the tests of another process
os.environ["WANDB_MODE"] = "disabled"  # no test is shown to the owner of a key; those of tracking say otherwise

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from proxy_models.importable import mend_torchvision
from proxy_models.training.compilation import missing_compiler
from tests.muscale.conftest import SEVEN_RATES, write_text
from tests.muscale.gloo_ranks import GlooRanks

if TYPE_CHECKING:
    from muscale.actors.cluster import Cluster

# the same examples everywhere, and no limit of 200 ms for one, which a busy machine exceeds
settings.load_profile("ci")


_LONGEST = (
    "tests/muscale/test_study.py",
    "tests/notebooks/test_notebooks.py",
    "tests/muscale/test_own_family.py",
    "tests/muscale/test_cluster.py",
    "tests/muscale/search/test_sweep.py",
    "tests/muscale/full_runs/train/test_sharding.py",
    "tests/muscale/full_runs/train/test_pipelines.py",
    "tests/proxy_models/coordinates/test_measurement.py",
    "tests/proxy_models/training/test_traced_memory.py",
    "tests/muscale/full_runs/train/test_module.py",
    "tests/muscale/full_runs/promote/test_prepared.py",
    "tests/muscale/search/test_tune_run.py",
    "tests/muscale/actors/test_jobs.py",
    "tests/muscale/full_runs/promote/test_final_scores.py",
    "tests/muscale/tune/test_tune.py",
    "tests/muscale/search/test_engine.py",
    "tests/muscale/pages/test_browser_report.py",
)
"""Files that take longest, the longest first."""


class Shares(LoadFileScheduling):  # type: ignore[misc]
    """Whole files for each process: for the first one those that need a Ray, whose workers take processors of their own, while it
    has any; for the others the rest."""

    def _assign_work_unit(self, node: Any) -> None:
        is_first = node is next(iter(self.assigned_work))
        if fitting := next((file for file in self.workqueue if _needs_ray(file) == is_first), None):
            self.workqueue.move_to_end(fitting, last=False)
        super()._assign_work_unit(node)


@cache
def _needs_ray(file: str) -> bool:
    return re.search("mark.cluster|ray_cluster", (Path(__file__).parents[1] / file).read_text()) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Whole files, in the order of collection."""
    config.option.loadscopereorder = False  # by number of tests, it would put the long files last
    return Shares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that small ones even out the end."""
    order = {file: number for number, file in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    gc.collect()  # of what the test before left
    gc.freeze()  # every training collects first, and this process has a million objects
    gpu = item.get_closest_marker("gpu")
    if gpu and not torch.cuda.is_available():
        pytest.skip("trains on an NVIDIA GPU, and torch sees none here")
    if item.get_closest_marker("compiler") and (reason := missing_compiler("cuda" if gpu else "cpu")):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled and nothing counted; the settings that `compilation.configure` sets are put back at the end."""
    from torch._dynamo import config, reset  # slow to import, and of few tests
    from torch._dynamo.utils import counters

    # Not by pytest's monkeypatch, which deletes what it does not find in a module's `__dict__`, as torch's settings.
    limits = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    names = (*limits, "skip_fwd_side_effects_in_bwd_under_checkpoint")
    with config.patch({name: getattr(config, name) for name in names}):
        reset()
        counters.clear()
        yield
    reset()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """One Ray on this machine for all tests that need one."""
    from muscale.actors.cluster import cluster
    from muscale.settings.tables import ResourceSettings

    with cluster(ResourceSettings()) as joined:
        yield joined


@pytest.fixture(scope="session")
def planned_study(tmp_path_factory: pytest.TempPathFactory, ray_cluster: Cluster) -> Path:
    """The file of a micro-study that is trained up to its plan; tests copy its folder."""
    from muscale import Study

    path = tmp_path_factory.mktemp("planned") / "study.toml"
    write_text(path.with_name("text"))
    path.write_text(SEVEN_RATES)
    study = Study.open(path, quiet=True)
    study.plan()
    study.ledger.close()
    return path


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[GlooRanks]:
    """Processes that train together, for all tests that need some."""
    ranks = GlooRanks()
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The library that exports are held against; it is slow to import, and of the tests only."""
    mend_torchvision()
    module = import_module("transformers")
    module.utils.logging.disable_progress_bar()
    return module
