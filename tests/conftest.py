"""What a machine lacks skips the tests that need it; on CI it fails them, as nobody would see the skip."""

import os

# Before NumPy is imported: on a busy machine two threads take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib import import_module
from types import ModuleType

import pytest
import torch

from muscale.compat import mend_torchvision
from proxy_models.compilation import missing_compiler


def pytest_runtest_setup(item: pytest.Item) -> None:
    gpu = item.get_closest_marker("gpu")
    if gpu and not torch.cuda.is_available():
        pytest.skip("trains on an NVIDIA GPU, and torch sees none here")
    if item.get_closest_marker("compiler") and (reason := missing_compiler("cuda" if gpu else "cpu")):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The library that exports are held against; it is slow to import, and of the tests only."""
    mend_torchvision()
    module = import_module("transformers")
    module.utils.logging.disable_progress_bar()
    return module
