"""Forecasts of runs whose data change on the way, against their losses: one ladder, full runs of three seeds, children of each.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.staged_data [--seeds 0 1 2] [--folder runs/benchmarks/staged_data] [--report]

The text is the standard library's source and the headers of torch, in bytes: nine to one in the first 60 % of each run, then one to
nine. The ladder's runs are also annealed with 0, 13 and 27 % of their tokens in the second stage, from the same stems. Children of
each full run of about 2 million tokens begin the second stage earlier, later or never; every forecast is registered before the run
that it forecasts begins. The study keeps what is finished, and the same command continues; `--report` only prints the tables. An hour
on two cores.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.amended_runs import STUDY as CONSTANT
from tests.benchmarks.amended_runs import main

STUDY = (
    CONSTANT.replace("amended runs", "staged data")
    .replace("weight = 1\n", "")
    .replace(
        "[model]",
        """[[corpus.stages]]
weights = {{ python = 9, headers = 1 }}
until_fraction = 0.6

[[corpus.stages]]
weights = {{ python = 1, headers = 9 }}

[model]""",
    )
    .replace("branches = 3", "branches = 2")
    .replace("[ladder]\n", "[ladder]\nstage_branches = 3\n")
)
CHANGES: dict[str, tuple[float, dict[str, Any]]] = {
    "no change": (0.5, {}),
    "the second stage from 70 % on": (0.5, {"until_fraction": 0.7}),
    "the second stage from 80 % on": (0.5, {"until_fraction": 0.8}),
    "the second stage from 93 % on": (0.5, {"until_fraction": 0.93}),
    "never": (0.5, {"until_fraction": 1.0}),
    "the second stage from half the run on": (0.5, {"until_fraction": 0.51}),
}
"""Share of the run at which each change is made, and the change; the last is earlier than the law of stages covers."""


if __name__ == "__main__":
    main(__doc__, STUDY, CHANGES, "runs/benchmarks/staged_data")
