from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StudyConfig
from muscale.full_runs.promote.planned_worker import device_of


def test_the_device_is_the_accelerator_that_is_named_or_this_machine(
    make_study: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_study()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = device_of(StudyConfig.read(path))
    assert (here.name, here.workers_on_it) == ("this machine", 2)
    assert here.memory_bytes is not None
    assert here.memory_bytes > 2**28
    named = device_of(StudyConfig.read(path, ["resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"']))
    assert (named.name, named.memory_bytes) == ("H100 SXM", 80e9)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert device_of(StudyConfig.read(path)).memory_bytes is None
