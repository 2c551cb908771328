"""One rank of many, on fake tensors: its traced peak against the estimate, and its collectives against a golden file.

Two blocks of each model, as what a block adds is the same for all; `python -m tests.gpu_free` traces every layout.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu_free.__main__ import NEGLIGIBLE
from tests.gpu_free.cases import Case, traced
from tests.quick import quick_and_soak

QUICK = (
    Case(shape="1.3B", layout="full", layers=2),
    Case(shape="1.3B", layout="tensor", checkpointing="selective", layers=2),
    Case(shape="1.3B", layout="context", checkpointing="full", ranks=1024, layers=2),
    Case(shape="64x16B", layout="context", layers=3),
    Case(shape="70B", layout="1f1b, context", checkpointing="selective", layers=4),
    Case(shape="8x7B", layout="1f1b, context", checkpointing="full", layers=4, stage=3),
    Case(shape="70B", layout="1f1b", layers=4, passes=1),
    Case(shape="1.3B", layout="1f1b", checkpointing="full", ranks=32, layers=8, stage=1, optimizer="soap"),
    Case(shape="8x7B", layout="experts", layers=2),
)
CASES = (
    *QUICK,
    Case(shape="8B", layout="hybrid", checkpointing="selective", layers=2),
    Case(shape="8B", layout="tensor", checkpointing="full", ranks=1024, layers=2),
    Case(shape="70B", layout="full", checkpointing="full", ranks=1024, layers=2),
    Case(shape="405B", layout="context", checkpointing="full", layers=2),
    Case(shape="70B", layout="1f1b", checkpointing="full", layers=4),
    Case(shape="70B", layout="1f1b", layers=4, stage=3),
    Case(shape="70B", layout="gpipe", layers=4),
    Case(shape="70B", layout="looped_bfs", checkpointing="full", layers=8),
    Case(shape="70B", layout="interleaved", layers=8, passes=1),
    Case(shape="70B", layout="1f1b", layers=4, optimizer="soap"),
    Case(shape="8x7B", layout="full", layers=3),
    Case(shape="64x16B", layout="hybrid", checkpointing="selective", layers=3),
    Case(shape="64x16B", layout="experts", checkpointing="selective", layers=2),
)
GOLDEN = Path(__file__).with_name("collectives.json")


def sent(case: Case) -> tuple[int, list[list[str | int]], int]:
    """Peak of a step in bytes, its collectives (kind, dtype, bytes of what this rank puts in, number), peak of an evaluation."""
    peak, calls, evaluation = traced(case)
    rows: list[list[str | int]] = [
        [kind, str(dtype).removeprefix("torch."), size, n] for (kind, dtype, size), n in calls.items()
    ]
    return peak, sorted(rows), evaluation


@pytest.mark.parametrize("case", quick_and_soak(CASES, *QUICK), ids=str)
def test_the_estimate_is_near_the_traced_peak_and_collectives_are_those_of_the_golden_file(case: Case) -> None:
    peak, calls, evaluation = sent(case)
    assert case.estimate.total == pytest.approx(peak, rel=0.05)
    assert (1 - NEGLIGIBLE) * evaluation <= case.evaluation_estimate <= 2 * evaluation
    assert calls == json.loads(GOLDEN.read_text())[str(case)]


def test_steps_and_evaluations_of_a_pipeline_free_their_buffers_for_each_other() -> None:
    case = Case(shape="70B", layout="1f1b", layers=4, stage=1, passes=1)
    first, _, after_a_step = traced(case, order=("step", "evaluate"))
    after_an_evaluation, _, alone = traced(case, order=("evaluate", "step"))
    assert (after_an_evaluation, after_a_step) == (first, alone)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({str(case): sent(case)[1] for case in CASES}, indent=1) + "\n")
