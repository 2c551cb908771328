"""Three promotions at ten times the compute of their largest ladder run: how good are their hyperparameters and forecasts?

    OMP_NUM_THREADS=1 python tests/benchmarks/promote.py [--seeds 3] [--folder runs/benchmarks/promote] [--simulate]

Each promotion has a study of its own (seed, sweep, transfer grids, ladder, law, plan with its registered forecast) whose proxy
has width 32: one goes where the law decides, one to three times the proxy's width, one is of another family (LayerNorm, GELU,
biases, tied tables) and goes where its own law decides. At full size, beside the promoted run: a grid of rates around its own,
whose fitted minimum is the oracle, and standard parametrization with the proxy's rate. All that are compared start from the same
weights' seed and see the same batches. The first promotion is launched through Ray, and repeated over seeds by the lean loop; the
others train in one process by the full run's own code. Every finished run is kept in the folder; the same command goes on where
it was. `--simulate` tells, once all is done, how good a forecast of such ladders could be by seed noise alone.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pandas as pd
import tomlkit

from muscale import Study, StudyConfig
from muscale.actors.cluster import staying_cluster
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.promotion import full_run_of
from muscale.plans.plan import Plan
from muscale.proxies.ladder import design as ladder_design
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from scaling import fit_optimum, simulate
from tests.benchmarks.kept_runs import do_missing, final_loss, parser_of, trainer_of

QUICKSTART = Path("platform/muscale/quickstart.toml")
RATIO = 10.2  # of the largest ladder run's compute
OCTAVES = (-1.0, 0.0, 1.0)  # around the promoted rate
LADDER_SEEDS = 2
# width, thousands of 1024 tokens
STEMS = (
    (16, 512),
    (16, 1024),
    (16, 2048),
    (16, 4096),
    (32, 512),
    (32, 1024),
    (32, 2048),
    (48, 480),
    (48, 960),
    (64, 576),
    (80, 384),
)
CASES: dict[str, dict[str, Any]] = {
    "decided": {},
    "three times as wide": {"plan": {"shapes": [{"width": 96}]}},
    "another family": {
        "model": {"norm": "layernorm", "activation": "gelu", "mlp_ratio": 4.0, "biases": True, "tied": True}
    },
}
THROUGH_RAY = "decided"

Kind = Literal["mup", "standard", "full run"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run at a promotion's full size."""

    case: str
    kind: Kind
    octave: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Promoted:
    """What the runs of a promotion share."""

    numerics: Numerics
    hyperparameters: Hyperparameters
    n_tokens: int
    proxy_rate: float
    full_run: FullRun


def write_study(folder: Path, case: str, seed: int) -> Path:
    """The quickstart with a proxy of half its width, a smaller ladder, the case's own settings and its seed."""
    values = tomllib.loads(QUICKSTART.read_text())
    values["name"] = case
    values["model"] |= {"d_model": 32} | CASES[case].get("model", {})
    values["ladder"] = {
        "seeds": [seed + k for k in range(LADDER_SEEDS)],
        "stems": [{"width": width, "n_tokens": 1024 * thousands} for width, thousands in STEMS],
    }
    values["sweep"]["seed"], values["transfer"]["seeds"] = seed, [seed]
    values["sweep"]["trials"] = 16
    values["transfer"] |= {"widths": [32, 64, 128], "horizons": [1.0, 8.0], "wide_horizon": {"width": 64}}
    values["promote"]["seed"] = seed
    values["check"] = {"widths": [16, 32, 64, 128]}
    values["plan"] = {"compute_flops": 1e18} | CASES[case].get("plan", {})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.toml"
    family = StudyConfig.from_dict(values, where=str(path)).family
    largest = max(6.0 * family.at(width=width).n_params * 1024 * thousands for width, thousands in STEMS)
    values["plan"]["compute_flops"] = RATIO * largest
    path.write_text(tomlkit.dumps(values))
    return path


def tasks(case: str, seed: int, n_seeds: int) -> list[Task]:
    """The runs of one promotion, but what Ray trains."""
    own = [] if case == THROUGH_RAY else [Task(case=case, kind="full run", octave=0.0, seed=seed)]
    for one in range(seed, seed + n_seeds):
        own += [Task(case=case, kind="mup", octave=octave, seed=one) for octave in OCTAVES if octave or one != seed]
    return [*own, Task(case=case, kind="standard", octave=0.0, seed=seed)]


def train(corpus: Path, all_promoted: Mapping[str, Promoted], task: Task) -> dict[str, Any]:
    """The loss of one run, by the lean loop that trains proxies, or by the full run's code in one process."""
    promoted, began = all_promoted[task.case], perf_counter()
    if task.kind == "full run":
        from muscale.full_runs.train.attempt import train as train_full

        return {"loss": train_full(promoted.full_run)["loss"], "seconds": perf_counter() - began}
    numerics = replace(promoted.numerics, seed=task.seed)
    values = promoted.hyperparameters
    values = replace(values, learning_rate=values.learning_rate * 2.0**task.octave)
    if task.kind == "standard":
        numerics, values = replace(numerics, scheme="standard"), replace(values, learning_rate=promoted.proxy_rate)
    trainer = trainer_of(corpus, compile=True)
    loss = final_loss(trainer, numerics, values, promoted.n_tokens)
    return {"loss": loss, "seconds": perf_counter() - began}


def plan_of(study: Study) -> tuple[Plan, Promoted]:
    """The plan of a study, whose searches are done where they are not, and what its runs share."""
    plan = study.plan()
    directory = study.directory / "full_run" / plan.key
    chain = plan.chain(study.config.shared_numerics(study.corpus, study.directory))
    return plan, Promoted(
        numerics=chain.numerics,
        hyperparameters=plan.hyperparameters,
        n_tokens=plan.n_tokens,
        proxy_rate=study.sweep().best.learning_rate,
        full_run=replace(
            full_run_of(
                plan,
                study.config,
                study.config.shared_numerics(study.corpus, study.directory),
                directory,
                study.corpus.folder,
            ),
            compile="auto",
        ),
    )


def gaps(rows: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Loss of the promoted rate above the minimum fitted to each seed's grid, a share of it, [seeds]."""
    found = []
    for _, of_seed in rows[rows["kind"] != "standard"].groupby("seed"):
        rate, loss = 2.0 ** of_seed["octave"], of_seed["loss"]
        found.append(float(loss[of_seed["octave"] == 0].iloc[0]) / fit_optimum(rate, loss).loss - 1)
    return np.array(found)


def report(case: str, study: Study, plan: Plan, rows: pd.DataFrame, spread: float) -> None:
    """One promotion. `spread` is the standard deviation of the gap between seeds, for where there is one seed only."""
    forecast, largest = plan.forecast, float((6 * study.fit().rows["n_params"] * study.fit().rows["n_tokens"]).max())
    measured = float(rows[rows["kind"] == "full run"]["loss"].iloc[0])
    own = rows[rows["kind"] != "standard"]
    losses = own[own["octave"] == 0].sort_values("seed")["loss"]
    inside = "inside" if forecast.low <= measured <= forecast.high else "OUTSIDE"
    print(f"\n{case}: width {study.config.model.d_model} -> {plan.model.d_model}, N = {plan.n_params:,}, ", end="")
    print(f"D = {plan.n_tokens:,}, {plan.compute_flops / largest:.1f} x the largest run fitted")
    print(
        f"  forecast        {forecast.loss:.4f} [{forecast.low:.4f}, {forecast.high:.4f}], measured {measured:.4f}: "
        f"{inside}, error {1 - forecast.loss / measured:+.2%}; by seed",
        ", ".join(f"{loss:.4f}" for loss in losses),
    )
    optima = [fit_optimum(2.0 ** part["octave"], part["loss"]) for _, part in own.groupby("seed")]
    for _, part in own.sort_values("octave").groupby("seed"):
        grid = zip(part["octave"], part["loss"], strict=True)
        print("  grid of rates  ", ", ".join(f"{octave:+.2f}: {loss:.4f}" for octave, loss in grid))
    print(
        "  oracle         ",
        ", ".join(f"{one.loss:.4f} at {one.log2_rate:+.2f} octaves ({one.status})" for one in optima),
    )
    found = gaps(rows)
    error = (float(found.std(ddof=1)) if len(found) > 1 else spread) / math.sqrt(len(found))
    print(f"  gap to oracle   {found.mean():+.2%} ± {error:.2%}", end="")
    print(f" ({len(found)} seeds)" if len(found) > 1 else " (one seed; error from the seeds of the first)")
    standard = float(rows[rows["kind"] == "standard"]["loss"].iloc[0])
    promoted = float(losses.iloc[0])
    shown = (
        "diverged" if math.isnan(standard) else f"{standard:.4f}, {standard / promoted - 1:+.2%} of the promoted run's"
    )
    print(f"  standard        {shown}")


def simulated(study: Study, plan: Plan) -> None:
    """How far forecasts of the ladder would lie off if what it forecast were the truth, by how many seeds it has.

    The noise is that between its own seeds: of a stem's two branches together, and of each alone.
    """
    runs = study.runs().query("purpose == 'ladder'").drop_duplicates("key")
    cells = np.log(runs["loss"]).groupby([runs["n_params"], runs["n_tokens"]])
    off = cells.transform(lambda losses: losses - losses.mean()).to_numpy()
    per_seed = LADDER_SEEDS / (LADDER_SEEDS - 1)
    branches = [off[at] for at in runs.groupby("stem").indices.values() if len(at) == 2]
    variance = per_seed * float((off**2).mean())
    shared = max(0.0, per_seed * float(np.mean([a * b for a, b in branches])))
    design = ladder_design(study.config)
    one = design[design["stem"] % LADDER_SEEDS == 0]
    for n_seeds in (1, 2, 4, 8):
        ladder = pd.concat([one.assign(stem=one["stem"] + k * len(design)) for k in range(n_seeds)])
        print(f"{n_seeds} seeds of the ladder")
        print(
            simulate(
                ladder.reset_index(drop=True),
                study.fit().ensemble.law,
                n_params=plan.n_params,
                n_tokens=plan.n_tokens,
                noise=math.sqrt(max(0.0, variance - shared)),
                stem_noise=math.sqrt(shared),
            )
        )


def main() -> None:
    """Search, plan, train, report."""
    parser = parser_of(__doc__, "promote", seeds=3)  # of the first promotion's runs
    parser.add_argument("--simulate", action="store_true", help="how good the forecasts could be")
    options = parser.parse_args()
    began, cpu = perf_counter(), os.times()
    studies, plans, promoted = {}, {}, {}
    wanted: list[Task] = []
    with staying_cluster():
        for seed, case in enumerate(CASES):
            studies[case] = Study.open(write_study(options.folder / case.replace(" ", "_"), case, seed))
            plans[case], promoted[case] = plan_of(studies[case])
            print(plans[case])
            if case == THROUGH_RAY:
                launched = {"case": case, "kind": "full run", "octave": 0.0, "seed": seed}
                launched["loss"] = studies[case].promote().loss
            wanted += tasks(case, seed, options.seeds if case == THROUGH_RAY else 1)
    print(f"{perf_counter() - began:.0f} s until the last plan, of one promotion through Ray")
    done = do_missing(
        wanted,
        partial(train, studies[THROUGH_RAY].corpus.folder, promoted),
        options.folder / "runs.jsonl",
        workers=options.workers,
    )
    rows = pd.DataFrame([launched, *done])
    spread = float(gaps(rows[rows["case"] == THROUGH_RAY]).std(ddof=1)) if options.seeds > 1 else math.nan
    for case in CASES:
        report(case, studies[case], plans[case], rows[rows["case"] == case], spread)
        if options.simulate:
            simulated(studies[case], plans[case])
    now = os.times()
    spent = sum(now[:4]) - sum(cpu[:4])
    print(f"\n{(perf_counter() - began) / 60:.1f} minutes, {spent / 60:.1f} CPU minutes but those of Ray's workers")


if __name__ == "__main__":
    main()
