"""Compare the estimate with the traced peak, for sizes, layouts, checkpointing and numbers of ranks; then waits and graphs of steps.

    python -m tests.gpu_free [--layers 3] [--shapes 1.3B 8B 70B] [--ranks 64 1024]

A few blocks are traced, and the whole model where the estimate for those is off by more than 5 %, or below an evaluation's peak; of a
pipeline, its first and its last rank on the smallest number of ranks. Exits with 1 if the estimate for the whole model is off, too, if
a step after the first would make the host wait for the device, or if compiled blocks have more than one graph or a break.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from typing import get_args

from proxy_models.architecture.memory import Checkpointing
from tests.gpu_free.cases import EXPERTS, LAYOUTS, PIPELINES, RANKS, SEQUENCES, SHAPES, STAGES, Case, traced
from tests.gpu_free.host_waits import CASES, STEPS, taken

TOLERANCE = 0.05
NEGLIGIBLE = 0.005
"""Most by which an evaluation may exceed its bound, which counts no tables of angles and other small buffers."""
LOOSE = 0.5
"""Most by which the estimate, an upper bound, may exceed the peak of a schedule that computes gradients of weights apart."""


def main() -> int:
    """Trace all cases and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3, help="blocks; 0: all of the model's")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 1024])
    chosen = parser.parse_args()
    print(
        "| shape, blocks | layout | checkpointing | ranks | sequences | traced, GiB | estimate | error | evaluation, GiB | error |"
    )
    print(f"|{10 * ' --- |'}")
    missed, layers = False, chosen.layers or None
    for case in (
        *(
            Case(shape=shape, layout=layout, checkpointing=checkpointing, ranks=ranks, layers=layers)
            for shape, layout, checkpointing, ranks in product(
                chosen.shapes, LAYOUTS | EXPERTS, get_args(Checkpointing), chosen.ranks
            )
            if layout not in (("tensor",) if SHAPES[shape].n_experts else EXPERTS)
        ),
        *(
            Case(
                shape=shape,
                layout=layout,
                checkpointing=checkpointing,
                ranks=min(chosen.ranks),
                layers=layers and max(layers, STAGES),
                stage=stage,
            )
            for shape, layout, checkpointing, stage in product(
                chosen.shapes, PIPELINES, get_args(Checkpointing), (0, RANKS - 1)
            )
            if checkpointing == "none" or not PIPELINES[layout].splits_backward
        ),
    ):
        missed |= not row(case) and not row(replace(case, layers=None))
    print("\n| layout, optimizer | steps | waits in steps | at their reads | graphs | breaks |")
    print("| --- | --- | --- | --- | --- | --- |")
    for steps in CASES:
        found = taken(steps)
        print(
            f"| {steps} | {STEPS} | {sum(found.in_steps.values())} | {found.at_reads} | {found.graphs} | {found.breaks} |",
            flush=True,
        )
        missed |= bool(found.in_steps) or found.graphs != steps.compiled or found.breaks > 0
    return int(missed)


def row(case: Case) -> bool:
    """Trace a case, print its row, and return whether the estimates hold."""
    peak, _, evaluation = traced(case)
    error, of_evaluation = case.estimate.total / peak - 1, case.evaluation_estimate / evaluation - 1
    print(
        f"| {case.shape}, {case.model.n_layers} | {case.place} | {case.checkpointing} | {case.ranks:,} "
        f"| {SEQUENCES[case.shape]} | {peak / 2**30:.2f} | {case.estimate.total / 2**30:.2f} | {error:+.1%} "
        f"| {evaluation / 2**30:.2f} | {of_evaluation:+.1%} |",
        flush=True,
    )
    within = 0 <= error <= LOOSE if case.parallelism.splits_backward else abs(error) <= TOLERANCE
    return within and of_evaluation >= -NEGLIGIBLE


if __name__ == "__main__":
    sys.exit(main())
