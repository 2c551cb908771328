"""What a machine lacks skips the tests that need it; on CI it fails them, as nobody would see the skip."""

import os
import re
from collections.abc import Iterator
from functools import cache

# Before NumPy is imported: on a busy machine two threads take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "disabled"  # no test is shown to the owner of a key; those of tracking say otherwise

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from muscale.full_runs.lightning_import import mend_torchvision
from proxy_models.training.compilation import missing_compiler

settings.load_profile(
    "ci"
)  # the same examples everywhere, and no limit of 200 ms for one, which a busy machine exceeds


class Shares(LoadScopeScheduling):  # type: ignore[misc]
    """Where several processes run the tests, each takes whole files; those that need a pool of ranks go to one of them.

    Each process starts a Ray of its own for the first file that needs one, and keeps it.
    """

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid.partition("::")[0])


def shared_by(file: str) -> str:
    """What the tests of a file share with those of others, else the file itself."""
    return "ranks" if "gloo_ranks" in _text(file) else file


@cache
def _text(file: str) -> str:
    return (Path(__file__).parents[1] / file).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Shares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with a Ray first: they take longest, and the small ones even out the end."""
    items.sort(key=lambda item: not re.search("mark.cluster|ray_cluster", _text(item.nodeid.partition("::")[0])))


def pytest_runtest_setup(item: pytest.Item) -> None:
    gpu = item.get_closest_marker("gpu")
    if gpu and not torch.cuda.is_available():
        pytest.skip("trains on an NVIDIA GPU, and torch sees none here")
    if item.get_closest_marker("compiler") and (reason := missing_compiler("cuda" if gpu else "cpu")):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled and nothing counted; the limits that `compilation.configure` sets are put back at the end."""
    from torch._dynamo import config, reset  # slow to import, and of few tests
    from torch._dynamo.utils import counters

    # Not by pytest's monkeypatch, which deletes what it does not find in a module's `__dict__`, as torch's settings.
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    with config.patch({name: getattr(config, name) for name in names}):
        reset()
        counters.clear()
        yield
    reset()


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The library that exports are held against; it is slow to import, and of the tests only."""
    mend_torchvision()
    module = import_module("transformers")
    module.utils.logging.disable_progress_bar()
    return module
