"""What should a rung rank by, and what should a stopped trial report to the searcher? Measured on runs that all went to the end.

    python tests/benchmarks/rungs.py [--seeds 3] [--batch-tokens 2048] [--folder runs/benchmarks/rungs]

Each of 24 configurations (a Latin hypercube over rate, weight-decay timescale, beta2 and warmup) of one small decoder is
trained on the standard library's own source, under WSD and under linear decay, with every seed. Under WSD the stem stops
at T/8, T/4, T/2 and T(1 - f), where its loss, that of its averaged weights and that of a cooldown branched there are
measured; under linear decay the loss and that of averaged weights at T/8, T/4, T/2 and T. Early stopping is replayed
from these rows. Every finished run is kept in the folder; the same command goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from scipy.stats import qmc

from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import Constant, LinearDecay, Phase
from proxy_models.recipes.segments import Segment, branch
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import Trainer
from search_spaces import LogUniform, Space, Uniform
from tests.benchmarks.kept_runs import parser_of, trained, trainer_of
from tests.benchmarks.rung_report import correlations, halving, reporting_ways, show, tables

MODEL = ModelConfig(d_model=64, n_layers=2)
N_TOKENS = 480 * 2048
EVALUATION_TOKENS = 32_768
N_CONFIGS = 24
SPACE = Space(
    {
        "learning_rate": LogUniform(low=2.0**-10, high=2.0**-5),
        "weight_decay_tau": LogUniform(low=0.1, high=2.0),
        "beta2": Uniform(low=0.9, high=0.995),
        "warmup_fraction": LogUniform(low=0.01, high=0.08),
    }
)
SHARES = (1 / 8, 1 / 4, 1 / 2)  # of N_TOKENS, for the rungs below the last

Kind = Literal["wsd", "linear"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One configuration and seed under one schedule, with all its rungs."""

    config: int
    seed: int
    kind: Kind
    batch_tokens: int


def configurations() -> list[dict[str, Any]]:
    """The same for every seed; a Latin hypercube, so that the rates lie evenly over their octaves."""
    points = qmc.LatinHypercube(len(SPACE.searched), rng=7).random(N_CONFIGS)
    return [SPACE.decode(point) for point in points]


def tasks(n_seeds: int, batch_tokens: int) -> list[Task]:
    """All of one seed before the next, so that part of the rows is of use."""
    return [
        Task(config=config, seed=seed, kind=kind, batch_tokens=batch_tokens)
        for seed in range(n_seeds)
        for config in range(N_CONFIGS)
        for kind in get_args(Kind)
    ]


def train(corpus: Path, task: Task) -> dict[str, Any]:
    """What was measured at each rung; a divergence ends the list early."""
    trainer = trainer_of(corpus, compile=True)
    values = Hyperparameters(batch_tokens=task.batch_tokens, **configurations()[task.config])
    numerics = Numerics(
        model=MODEL, base=MODEL, corpus_key=trainer.corpus.key, seed=task.seed, evaluation_tokens=EVALUATION_TOKENS
    )
    measure = {"wsd": _wsd, "linear": _linear}[task.kind]
    return {"rungs": list(measure(trainer, numerics, values))}


def _wsd(trainer: Trainer, numerics: Numerics, values: Hyperparameters) -> Iterator[dict[str, Any]]:
    recipe = values.resolve(N_TOKENS)
    ends = [int(N_TOKENS * share) for share in SHARES] + [values.stable_tokens(N_TOKENS)]
    for rung in _rungs(trainer, numerics, values, Constant(warmup_tokens=recipe.warmup_tokens), ends):
        state = rung.pop("state")
        annealed = values.annealed_tokens(state.tokens)
        _, cooldown = branch(recipe, state.tokens, annealed)
        result = trainer.train(numerics, cooldown, state)
        yield {**rung, "annealed": result.loss, "annealed_tokens": annealed}


def _linear(trainer: Trainer, numerics: Numerics, values: Hyperparameters) -> Iterator[dict[str, Any]]:
    phase = LinearDecay(warmup_tokens=values.resolve(N_TOKENS).warmup_tokens, end=N_TOKENS)
    for rung in _rungs(trainer, numerics, values, phase, [int(N_TOKENS * share) for share in (*SHARES, 1)]):
        del rung["state"]
        yield rung


def _rungs(
    trainer: Trainer, numerics: Numerics, values: Hyperparameters, phase: Phase, ends: list[int]
) -> Iterator[dict[str, Any]]:
    recipe, state, start = values.resolve(N_TOKENS), None, 0
    for end in ends:
        segment = Segment(recipe=recipe, phase=phase, start=start, end=end)
        result = trainer.train(numerics, segment, state, averaged=True)
        if result.divergence:
            return
        state, start = result.state, end
        yield {"tokens": end, "last": result.loss, "averaged": result.averaged_loss, "state": state}


def main() -> None:
    """Train, and print every table."""
    parser = parser_of(__doc__, "rungs", seeds=3)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of which N_TOKENS / 8 is a multiple")
    options = parser.parse_args()
    rows = trained(options, tasks(options.seeds, options.batch_tokens), train)
    seeds = tables(rows.to_dict("records"))
    show("Rank correlation with the final loss of the same schedule", correlations(seeds))
    show("ASHA at equal compute", halving(seeds))
    show("What a stopped trial tells", reporting_ways(seeds))


if __name__ == "__main__":
    main()
