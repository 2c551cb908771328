"""Forecasts of amended full runs against their losses: one ladder, a full run for each of three seeds, and children of each.

    OMP_NUM_THREADS=1 python tests/benchmarks/amended_runs.py [--seeds 0 1 2] [--folder runs/benchmarks/amended_runs] [--report]

The text is the standard library's source and the headers of torch, half of each, in bytes. Seven changes are made to each full run of
about 2 million tokens; every forecast is registered before the run that it forecasts begins. The study keeps what is finished, and
the same command continues; `--report` only prints the table. An hour on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from muscale import Study
from muscale.actors.cluster import staying_cluster
from muscale.full_runs.amend.train import Amended
from muscale.store.ledger_tables import ResultKind

STUDY = """
name = "amended runs"

[corpus]
evaluation_tokens = 32_768

[corpus.sources.python]
path = "python-stdlib"
weight = 1

[corpus.sources.headers]
path = "{headers}"
weight = 1

[model]
d_model = 48
n_layers = 2
head_dim = 16
context_length = 64

[hyperparameters]
learning_rate = 0.01
batch_tokens = 1024
warmup_floor_tokens = 10_240
cooldown_fraction = 0.2

[check]
widths = [16, 32, 64, 128]

[sweep]
trials = 6
n_tokens = 131_072
searcher = "random"
scheduler = "none"
top_k = 1
n_finalists = 1
n_seeds = 1

[sweep.space]
learning_rate = {{ distribution = "log_uniform", low = 0.005, high = 0.03 }}

[transfer]
widths = [32, 48, 64]
n_tokens = 131_072
rates = 5
horizons = [1.0, 2.0]

[ladder]
stems = [
  {{ width = 32, n_tokens = 655_360, branches = 3 }},
  {{ width = 32, n_tokens = 1_310_720, branches = 3 }},
  {{ width = 48, n_tokens = 655_360, branches = 3 }},
  {{ width = 48, n_tokens = 1_310_720, branches = 3 }},
  {{ width = 64, n_tokens = 655_360, branches = 3 }},
]

[fit]
max_regret = 0.05

[plan]
compute_flops = 2.2e12
shapes = [{{ width = 80 }}]

[promote]
checkpoint_every_tokens = 65_536
evaluate_every_tokens = 65_536
keep_every_tokens = 65_536
workers = 1

[tracking]
wandb = "off"
"""
CHANGES: dict[str, tuple[float, dict[str, Any]]] = {
    "no change": (0.5, {}),
    "cooldown at 60 % instead of 80 %": (0.6, {"hyperparameters.cooldown_fraction": 0.4}),
    "rate × ½": (0.5, {"hyperparameters.learning_rate_factor": 0.5}),
    "rate × 2": (0.5, {"hyperparameters.learning_rate_factor": 2.0}),
    "batch × 2": (0.5, {"hyperparameters.batch_tokens": 2048}),
    "headers 1 : 9 instead of 1 : 1": (0.6, {"mixture.python": 9, "mixture.headers": 1}),
    "twice the tokens": (0.5, {"n_tokens": 2.0}),
}
"""Share of the run at which each change is made, and the change; `n_tokens` as a multiple of the parent's."""


Changes = Mapping[str, tuple[float, Mapping[str, Any]]]


def amend(path: Path, seed: int, all_changes: Changes) -> None:
    """Train a full run and its children."""
    study = Study.open(path, [f"promote.seed={seed}"], trains=True)
    study.run(force=True)
    plan = study.plan()
    folder = study.directory / "full_runs" / plan.key / "checkpoints"
    kept = sorted(int(place.name.removeprefix("tokens=")) for place in folder.glob("tokens=*"))
    for reason, (share, stated) in all_changes.items():
        at = min(kept, key=lambda tokens: abs(tokens - share * plan.n_tokens))
        changes = dict(stated)
        if "n_tokens" in changes:
            changes["n_tokens"] = int(changes["n_tokens"] * plan.n_tokens)
        print(study.amend(run=plan.key, at=at, reason=reason, changes=changes))


def report(path: Path) -> pd.DataFrame:
    """A row for each finished child: the second forecast with its parts, the loss, its error and whether the interval holds it."""
    study = Study.open(path)
    rows = []
    for row in study.ledger.results(ResultKind.AMENDMENT):
        done = Amended.from_dict(row["payload"])
        forecast = done.forecast
        rows.append(
            {
                "change": done.reason,
                "run": done.lineage[0].run,
                "loss": done.after.own,
                **(
                    {
                        "forecast": forecast.loss,
                        "error": forecast.loss / done.after.own - 1,
                        "half width": forecast.high / forecast.loss - 1,
                        "inside": done.inside,
                        "schedule": forecast.by_schedule,
                        "stages": forecast.by_stages,
                        "widening": forecast.widening,
                        "reasons": len(forecast.reasons),
                    }
                    if forecast
                    else {"no forecast": done.no_forecast}
                ),
            }
        )
    return pd.DataFrame(rows)


def main(description: str, study: str, changes: Changes, folder: str) -> None:
    """Train the study with a full run for each seed and its children, and print their table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    path = options.folder / "study.toml"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(study.format(headers=Path(torch.__file__).parent / "include"))
    if not options.report:
        with staying_cluster():
            for seed in options.seeds:
                amend(path, seed, changes)
    table = report(path)
    print(table.sort_values(["change", "run"]).to_string(index=False, float_format="{:.4f}".format, na_rep="–"))
    print(table.groupby("change")[["error", "half width"]].agg(lambda column: column.abs().mean()))
    print(f"{table['inside'].sum()} of {table['inside'].notna().sum()} losses are inside their 90 % interval")


if __name__ == "__main__":
    main(__doc__, STUDY, CHANGES, "runs/benchmarks/amended_runs")
