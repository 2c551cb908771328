"""Does the best learning rate stay put as a mixture of experts grows? Four axes, three schemes for the experts.

    nice -n 15 python tests/benchmarks/expert_rules.py [--seeds 3] [--axis granularity sparsity] [--scheme fan_in] [--hours 1] [--time]

Decoders of depth 2 with heads of 16 (bytes, context 128) are trained on the standard library's own source in steps of 8 sequences, at
seven rates .75 octaves apart; the base has width 16 and 8 experts, of which a token passes 2. The axes:

- width: 16 to 128.
- experts: 8 to 64 at width 32, of which a token passes a quarter.
- granularity: experts of a half and a quarter of the size, with 2 and 4 times as many of them and as many passed, at width 32.
- sparsity: 8 to 32 experts at width 32, of which a token passes 2.

Along width and experts a token's computation grows, and every run has 163,840 tokens. Granularity and sparsity change it by the
router only, and every run has the FLOPs that the base's member of width 32 has with these tokens (router and attention counted). With
`--time` the runs of these two axes have that member's processor time instead, measured once on this machine and kept in the folder.
Schemes have the same FLOPs. "mean_field" equals "fan_in" as long as the experts' ratio is the base's, so such a run is trained once.

Each axis is judged by the verdict of `muscale transfer`; `given up` is the loss that the smallest member's best rate costs at the
largest. The folder keeps every finished run, and the same command continues; `--hours` ends a slice. A
run takes 7 to 60 s of a processor: all 504 about 2.5 h, 168 for each seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

import pandas as pd

from proxy_models.architecture.config import ExpertScheme, ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import ScalingError, fit_transfer
from tests.benchmarks.kept_runs import parser_of, row_of, trained

BASE = ModelConfig(d_model=16, n_layers=2, n_experts=8, experts_per_token=2, expert_ratio=1.0)
MIDDLE = replace(BASE, d_model=32)
BATCH_TOKENS, N_TOKENS = 1024, 163_840
RATES = [-7.0 + 0.75 * k for k in range(7)]  # log2


def _mixture(n_experts: int, per_token: int, ratio: float = 1.0) -> ModelConfig:
    return replace(MIDDLE, n_experts=n_experts, experts_per_token=per_token, expert_ratio=ratio)


AXES: dict[str, dict[int, ModelConfig]] = {
    "width": {width: replace(BASE, d_model=width) for width in (16, 32, 64, 128)},
    "experts": {n: _mixture(n, n // 4) for n in (8, 16, 32, 64)},
    "granularity": {g: _mixture(8 * g, 2 * g, 1 / g) for g in (1, 2, 4)},
    "sparsity": {n // 2: _mixture(n, 2) for n in (8, 16, 32)},
}
"""Members of each axis by their size; that of sparsity is experts over experts passed."""
GROWING = ("width", "experts")
NO_SHARES: Mapping[ModelConfig, float] = MappingProxyType({})
SCHEMES: tuple[ExpertScheme, ...] = get_args(ExpertScheme)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run; equal runs of several axes or schemes are one task."""

    scheme: ExpertScheme
    width: int
    n_experts: int
    per_token: int
    ratio: float
    n_tokens: int
    log2_rate: float
    seed: int


Shares: TypeAlias = Mapping[ModelConfig, float]
"""Tokens of a member's runs over those of `MIDDLE`."""


def task_of(
    axis: str, model: ModelConfig, scheme: ExpertScheme, log2_rate: float, seed: int, shares: Shares = NO_SHARES
) -> Task:
    """The run of a member of an axis, with equal FLOPs unless its share of tokens is given."""
    same = model.expert_ratio == BASE.expert_ratio
    of_flops = MIDDLE.train_flops_per_token / model.train_flops_per_token
    share = 1.0 if axis in GROWING else shares.get(model, of_flops)
    return Task(
        scheme="fan_in" if scheme == "mean_field" and same else scheme,
        width=model.d_model,
        n_experts=model.n_experts or 0,
        per_token=model.experts_per_token,
        ratio=model.expert_ratio or 0.0,
        n_tokens=round(N_TOKENS * share / BATCH_TOKENS) * BATCH_TOKENS,
        log2_rate=log2_rate,
        seed=seed,
    )


def grids(
    axes: Sequence[str], schemes: Sequence[ExpertScheme], n_seeds: int, shares: Shares = NO_SHARES
) -> list[tuple[str, int, str, Task]]:
    """Axis, size, scheme and run of every entry of the grids; one seed after the other, so that a slice has whole grids."""
    return [
        (axis, size, scheme, task_of(axis, model, scheme, rate, seed, shares))
        for seed in range(n_seeds)
        for axis in axes
        for scheme in schemes
        for size, model in AXES[axis].items()
        for rate in RATES
    ]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Training of a member by which its time is measured."""

    n_experts: int
    per_token: int
    ratio: float


def timed(corpus: Path, timing: Timing) -> dict[str, Any]:
    """Processor seconds of a step, the median of several trainings of 40 steps."""
    found = []
    for _ in range(5):
        began = time.process_time()
        task = Task(
            scheme="fan_in", width=MIDDLE.d_model, **asdict(timing), n_tokens=40 * BATCH_TOKENS, log2_rate=-5, seed=0
        )
        train(corpus, task, evaluation_tokens=BATCH_TOKENS)
        found.append((time.process_time() - began) / 40)
    return {"seconds": statistics.median(found)}


def equal_time(options: argparse.Namespace) -> dict[ModelConfig, float]:
    """Shares of tokens with which the members of the axes that do not grow take the time of `MIDDLE`."""
    models = [MIDDLE, *(model for axis in AXES.keys() - {*GROWING} for model in AXES[axis].values())]
    timings = {
        model: Timing(
            n_experts=model.n_experts or 0, per_token=model.experts_per_token, ratio=model.expert_ratio or 0.0
        )
        for model in models
    }
    rows = trained(options, [*timings.values()], timed, "seconds.jsonl", workers=1)
    seconds = {
        Timing(**{name: row[name] for name in asdict(timings[MIDDLE])}): row["seconds"]
        for row in rows.to_dict("records")
    }
    return {model: seconds[timings[MIDDLE]] / seconds[timing] for model, timing in timings.items()}


def train(corpus: Path, task: Task, **numerics: Any) -> dict[str, Any]:
    base = replace(BASE, expert_scheme=task.scheme)
    model = replace(
        base,
        d_model=task.width,
        n_experts=task.n_experts,
        experts_per_token=task.per_token,
        expert_ratio=task.ratio,
    )
    values = Hyperparameters(learning_rate=2.0**task.log2_rate, batch_tokens=BATCH_TOKENS)
    return row_of(corpus, values, task.n_tokens, model=model, base=base, seed=task.seed, **numerics)


def report(entries: Sequence[tuple[str, int, str, Task]], rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each axis and scheme, from the sizes and seeds whose grids are finished."""
    names = list(asdict(entries[0][3]))
    losses = {tuple(row[name] for name in names): row["loss"] for row in rows.to_dict("records")}
    table = pd.DataFrame(
        [
            {
                "axis": axis,
                "size": size,
                "scheme": scheme,
                "rate": 2.0**task.log2_rate,
                "seed": task.seed,
                "finished": (key := tuple(asdict(task).values())) in losses,
                "loss": losses.get(key),
            }
            for axis, size, scheme, task in entries
        ]
    )
    found = []
    for (axis, scheme), grid in table.groupby(["axis", "scheme"], sort=False):
        whole = grid[grid.groupby(["size", "seed"])["finished"].transform("all")]
        sizes = sorted(whole["size"].unique())
        line: dict[str, Any] = {"axis": axis, "scheme": scheme, "seeds": whole["seed"].nunique()}
        line["sizes"] = ", ".join(map(str, sizes))
        if len(sizes) > 1:
            kept = whole.rename(columns={"size": axis})[[axis, "rate", "loss", "seed"]]
            try:
                transfer = fit_transfer(kept, along=str(axis))
            except ScalingError as error:
                line["verdict"] = str(error)
            else:
                largest = list(transfer.optima.values())[-1]
                low, high = transfer.interval
                line |= {
                    "log2 best rate": ", ".join(f"{o.log2_rate:+.2f}" for o in transfer.optima.values()),
                    "loss": ", ".join(f"{o.loss:.3f}" for o in transfer.optima.values()),
                    "drift": f"{transfer.drift_octaves:+.2f} [{low:+.2f}, {high:+.2f}]",
                    "given up": f"{transfer.regret_transferred * largest.loss:.4f}",
                    "verdict": "; ".join((transfer.verdict, *transfer.reasons)),
                }
        found.append(line)
    return pd.DataFrame(found).fillna("")


def main(options: argparse.Namespace) -> None:
    shares = equal_time(options) if options.time else NO_SHARES
    entries = grids(options.axis, options.scheme, options.seeds, shares)
    rows = trained(options, [task for *_, task in entries], train)
    for model, share in shares.items():
        shape = f"{model.n_experts} experts of ratio {model.expert_ratio}, {model.experts_per_token} passed"
        print(f"{shape}: {1 / share:.2f} times the time of a step")
    print(report(entries, rows).to_string(index=False))


if __name__ == "__main__":
    parser = parser_of(__doc__, "expert_rules", seeds=3, workers=1)
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--time", action="store_true", help="equal processor time instead of equal FLOPs")
    main(parser.parse_args())
