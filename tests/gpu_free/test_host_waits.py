"""The host waits for the device only where figures are read, in steps of one rank of many on fake tensors."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from muscale.full_runs.train.module import FullRunModule
from tests.gpu_free.host_waits import STEPS, Steps, taken
from tests.quick import quick_and_soak


@pytest.mark.filterwarnings("ignore")  # dynamo warns about torch's own code
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "steps",
    quick_and_soak(
        [
            Steps(guarded=True),
            Steps(layout="tensor", compiled=True),
            Steps(guarded=True, experts=True),
            Steps(optimizer="soap"),
            Steps(layout="1f1b", optimizer="lamb"),
            Steps(layout="context", compiled=True, within=True),
            Steps(layout="1f1b, context", compiled=True, within=True),
        ],
        Steps(layout="tensor", compiled=True),
        Steps(guarded=True, experts=True),
        Steps(layout="1f1b, context", compiled=True, within=True),
    ),
    ids=str,
)
def test_no_step_waits_and_compiled_blocks_are_one_graph(steps: Steps) -> None:
    found = taken(steps)
    assert not found.in_steps
    assert found.at_reads >= 2 * STEPS, "a loss and a norm of each step"
    assert (found.graphs, found.breaks) == (int(steps.compiled), 0)


def test_a_step_that_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    took, reads = FullRunModule.take_step, iter(["item", "cpu", "nonzero", "__bool__"])

    def reading(self: FullRunModule) -> None:
        took(self)
        with suppress(DynamicOutputShapeException):  # as fake tensors have it
            getattr(torch.ones(()), next(reads))()

    monkeypatch.setattr(FullRunModule, "take_step", reading)
    assert {step for step, _ in taken(Steps()).in_steps} == {2, 3, 4}, "the first may prepare"
