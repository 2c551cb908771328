"""Cost and loss of LAMB and SOAP next to AdamW and Muon at one size, or the drift of their best rates over width.

    python tests/benchmarks/optimizers.py [--seeds 1] [--transfer lamb soap] [--folder runs/benchmarks/optimizers]

A decoder on the standard library's own source, with three rates an octave apart, values given at width 32. With `--transfer`, each
named optimizer has five rates an octave apart at each width from 16 to 128, judged like `muscale transfer`. The folder keeps every
finished run, so that the same command resumes. Steps are timed in seconds of a processor, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.parametrization import OptimizerName, parametrize
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import clip, initialize, make_optimizer
from scaling import fit_transfer
from tests.benchmarks.kept_runs import parser_of, row_of, trained

BASE = ModelConfig(d_model=32, n_layers=2, head_dim=16, context_length=128)
WIDTH = 128
WIDTHS = (16, 32, 64, 128)
BATCH_TOKENS, N_TOKENS = 1024, 163_840
CENTRES: dict[OptimizerName, float] = {"adamw": -6.0, "muon": -5.0, "lamb": -5.0, "soap": -6.0}
"""Log2 of the rate in the middle of each grid."""
N_TIMED = 20


@dataclass(frozen=True, kw_only=True)
class Task:
    optimizer: OptimizerName
    width: int
    log2_rate: float
    seed: int


def grids(optimizers: Sequence[OptimizerName], n_seeds: int) -> list[Task]:
    """The runs over width, seed after seed."""
    return [
        Task(optimizer=optimizer, width=width, log2_rate=CENTRES[optimizer] + offset, seed=seed)
        for seed in range(n_seeds)
        for optimizer in optimizers
        for width in WIDTHS
        for offset in (0, -1, 1, -2, 2)
    ]


def tasks(n_seeds: int) -> list[Task]:
    """The runs at one size."""
    return [
        Task(optimizer=optimizer, width=WIDTH, log2_rate=centre + offset, seed=seed)
        for offset in (0, -1, 1)
        for optimizer, centre in CENTRES.items()
        for seed in range(n_seeds)
    ]


def train(corpus: Path, task: Task) -> dict[str, Any]:
    values = Hyperparameters(
        learning_rate=2.0**task.log2_rate, batch_tokens=BATCH_TOKENS, optimizer=task.optimizer, schedule="wsd"
    )
    model = replace(BASE, d_model=task.width)
    return row_of(corpus, values, N_TOKENS, model=model, base=BASE, seed=task.seed, evaluation_tokens=131_072)


def seconds_a_step(optimizer: OptimizerName) -> tuple[float, float]:
    """The mean time of a whole step and of the optimizer in it, over steps that contain renewals of eigenbases."""
    model = replace(BASE, d_model=WIDTH)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH_TOKENS, optimizer=optimizer).resolve(N_TOKENS)
    decoder, table = Decoder(model), parametrize(model, BASE, optimizer=optimizer)
    initialize(decoder, table, recipe, seed=0)
    made = make_optimizer(decoder, table, recipe)
    sequences = torch.randint(256, (BATCH_TOKENS // model.context_length, model.context_length + 1))
    whole = of_optimizer = 0.0
    for step in range(2 + N_TIMED):
        begin = time.process_time()
        next_token_loss(decoder, sequences).backward()  # type: ignore[no-untyped-call]
        clip(decoder.parameters(), 1.0)
        before = time.process_time()
        made.step()
        end = time.process_time()
        made.zero_grad()
        if step >= 2:
            whole, of_optimizer = whole + end - begin, of_optimizer + end - before
    return whole / N_TIMED, of_optimizer / N_TIMED


def main() -> None:
    parser = parser_of(__doc__, "optimizers", seeds=1)
    parser.add_argument("--transfer", nargs="+", choices=CENTRES, help="drift of the best rate over width")
    options = parser.parse_args()
    if options.transfer:
        rows = trained(options, grids(options.transfer, options.seeds), train).assign(
            rate=lambda rows: 2.0 ** rows["log2_rate"]
        )
        for optimizer, grid in rows.groupby("optimizer"):
            print(f"{optimizer}\n{fit_transfer(grid[['width', 'rate', 'loss', 'seed']], along='width')}")
        return
    rows = trained(options, tasks(options.seeds), train)
    torch.set_num_threads(1)
    table = rows.pivot_table("loss", index="optimizer", columns="log2_rate").round(4)
    for optimizer in CENTRES:
        step, of_optimizer = seconds_a_step(optimizer)
        table.loc[optimizer, ["ms a step", "of it the optimizer"]] = round(1e3 * step, 1), round(1e3 * of_optimizer, 1)
    print(table.to_string())


if __name__ == "__main__":
    main()
