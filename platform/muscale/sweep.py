"""The sweep: Ray Tune searches the space at the base shape, survivors and leaders are annealed, the best are repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from muscale.config import StudyConfig
from muscale.fingerprint import package_fingerprint
from muscale.jobs import Job, cluster, finish, interrupted_later, staying_cluster
from muscale.lease import lease
from muscale.ledger import Ledger
from muscale.lineage import input_key
from muscale.search.budget import Budget
from muscale.search.engine import Engine
from muscale.search.lessons import lessons, runs_of
from muscale.search.methods import make_rule, make_sampler, resolve_searcher
from muscale.search.observations import KnownOf
from muscale.search.record import Arrival, Record, Round
from muscale.search.tune_run import run_legs
from muscale.sweep_result import SweepResult, make_result
from muscale.trial import TrialPlan
from proxy_models.numerics import Numerics
from search_spaces import narrow

OnArrival = Callable[[Arrival], None]
OnRun = Callable[[int, int, str], None]  # done, wanted, of which kind
_HOW_MUCH = (
    "trials",
    "max_tokens",
    "max_flops",
    "max_device_hours",
    "top_k",
    "leaders",
    "repeats",
    "cost_weight",
    "learn_from",
)
"""Settings that say how much is searched, or what is made of it: with another value the same sweep goes on."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One search of a study: what is searched, how, and under which name it stands in the ledger."""

    config: StudyConfig
    ledger: Ledger
    numerics: Numerics
    learn_from: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What makes two sweeps the same search."""
        settings = self.config.to_dict()["sweep"]
        searched = {name: value for name, value in settings.items() if name not in _HOW_MUCH}
        return input_key(self.numerics.to_dict(), self.config.hyperparameters.to_dict(), searched)

    @property
    def plan(self) -> TrialPlan:
        """The trial that every suggestion is put into."""
        settings, h = self.config.sweep, self.config.hyperparameters
        return TrialPlan(
            numerics=self.numerics,
            defaults=replace(h, schedule=settings.schedule or h.schedule),
            n_tokens=h.whole_batches(settings.n_tokens),
            rung_tokens=self.config.rung_tokens(),
        )

    def record(self) -> Record:
        """What the ledger has of it."""
        return Record(self.ledger, self.key)

    def engine(self, record: Record, on_arrival: OnArrival) -> Engine:
        """The search, where the record left it; a sweep that was not begun begins its first round."""
        settings, plan = self.config.sweep, self.plan
        if not record.rounds:
            record.begin_round(settings.trials, resolve_searcher(settings, self.taught()), settings.space)
        part = record.rounds[-1]
        n_params, n_tokens = self.config.model.n_params, plan.rung_tokens[-1]
        sampler = make_sampler(part, settings, n_params=n_params, n_tokens=n_tokens, taught=self.taught)
        rule = make_rule(settings, part.space)
        return Engine(record, rule, sampler, self._budget(part), top=plan.top, on_arrival=on_arrival)

    def taught(self) -> pd.DataFrame:
        """Runs of this study and of those that it learns from, which tell where the optimum lies at other scales."""
        settings = self.config.sweep
        tables = [self.ledger.runs(), *(runs_of(Path(file)) for file in (*settings.learn_from, *self.learn_from))]
        return lessons(tables, self.plan.defaults, settings.space, self.numerics)

    def _budget(self, part: Round) -> Budget:
        """What it may cost, up to the end of a round."""
        settings, plan, resources = self.config.sweep, self.plan, self.config.resources
        branches = [plan.run_tokens(k) - plan.rung_tokens[k] if plan.has_branch(k) else 0 for k in range(plan.top + 1)]
        trials = settings.trials if part.first_trial == 0 else part.trials
        if part.searcher == "grid":
            trials = min(trials, len(part.space.grid(settings.grid_points)))
        return Budget(
            trials=part.first_trial + trials,
            rung_tokens=plan.rung_tokens,
            branch_tokens=tuple(branches),
            top_k=settings.top_k,
            reserved_tokens=settings.leaders * settings.repeats * plan.run_tokens(plan.top),
            n_params=self.config.model.n_params,
            devices=resources.gpus_per_worker or resources.cpus_per_worker,
            max_tokens=settings.max_tokens,
            max_flops=settings.max_flops,
            max_device_hours=settings.max_device_hours,
        )

    def branches(self, record: Record) -> list[tuple[int, int, Job]]:
        """(trial, rung, run) of the runs that end from rungs: of every trial that went on, and of each rung's leaders."""
        jobs = []
        for rung in range(self.plan.top + 1):
            if self.plan.has_branch(rung):
                arrived = [trial for loss, trial in record.ranking(rung) if math.isfinite(loss)]
                gone = {trial for trial in arrived if (trial, rung) in record.went_on}
                chosen = sorted({*arrived[: self.config.sweep.top_k], *gone})
                jobs += [(trial, rung, self._job(record, trial, rung)) for trial in chosen]
        return jobs

    def repetitions(self, record: Record, leading: Sequence[tuple[int, int]]) -> list[tuple[int, int, Job]]:
        """(trial, seed, run) of the leading trials under seeds that the search did not see."""
        first = self.config.sweep.seed + 1
        seeds = range(first, first + self.config.sweep.repeats)
        return [(trial, seed, self._job(record, trial, rung, seed=seed)) for trial, rung in leading for seed in seeds]

    def _job(self, record: Record, trial: int, rung: int, *, seed: int | None = None) -> Job:
        path = record.path_towards(trial, rung)
        return Job(
            purpose="sweep",
            label=f"trial {trial}, rung {rung}" + ("" if seed is None else f", seed {seed}"),
            hyperparameters=self.plan.hyperparameters(path[-1][1]),
            chain=self.plan.branch(path, rung, seed=seed),
        )


def run_sweep(sweep: Sweep, on_arrival: OnArrival, on_run: OnRun, *, narrower: bool = False) -> SweepResult:
    """Search, or go on searching, up to the budget; then anneal, then repeat the leaders.

    Another process that runs the same sweep is waited for.

    Args:
        sweep: What to search.
        on_arrival: Called with each new result at a rung.
        on_run: Called with how many of the annealed runs of a kind are done, and how many there are.
        narrower: Once nothing is left to do, begin another round of as many trials in the space around the best region.

    Raises:
        KeyboardInterrupt: If the user interrupted it; what was finished is recorded.
        StageError: If no trial came to an annealed end, or a leg failed for another reason than divergence.
    """
    with lease(sweep.ledger, f"sweep {sweep.key}"), staying_cluster():
        record = sweep.record()
        engine = sweep.engine(record, on_arrival)
        if narrower and engine.is_finished:
            _narrow(sweep, record)
            engine = sweep.engine(record, on_arrival)
        if not engine.is_finished:
            _search(sweep, engine)
        _finish([job for *_, job in sweep.branches(record)], sweep, on_run, "annealed")
        leaders = leading(sweep, record)
        _finish([job for *_, job in sweep.repetitions(record, leaders)], sweep, on_run, "leaders repeated")
        return collect(sweep, record)


def _narrow(sweep: Sweep, record: Record) -> None:
    """Begin a round in the space around the best region."""
    part, settings = record.rounds[-1], sweep.config.sweep
    seen = KnownOf(record, sweep.plan.top).observations
    results = pd.DataFrame([{**dict.fromkeys(part.space), **one.config, "loss": one.loss} for one in seen])
    narrowed = narrow(part.space, results)
    record.begin_round(settings.trials, part.searcher, narrowed.space, narrowed.to_dict())


def _search(sweep: Sweep, engine: Engine) -> None:
    """Let Tune run the engine's legs."""
    resources = sweep.config.resources
    with cluster(resources):
        with interrupted_later():
            from muscale.actor import TrialLeg
        parameters = {
            "plan": sweep.plan,
            "rank_by": sweep.config.sweep.rank_by,
            "ledger": sweep.ledger,
            "compiled": resources.compile,
            "threads": resources.threads,
            "device": resources.device,
            "package": package_fingerprint(),
        }
        run_legs(engine, TrialLeg, parameters, resources)


def _finish(jobs: Sequence[Job], sweep: Sweep, on_run: OnRun, kind: str) -> None:
    done = 0

    def count(_job: Job, _outcome: object) -> None:
        nonlocal done
        done += 1
        on_run(done, len(jobs), kind)

    finish(jobs, sweep.ledger, sweep.config.resources, count)


def annealed_runs(sweep: Sweep, record: Record) -> pd.DataFrame:
    """The sweep's annealed runs under its own seed, a row each: trial, rung, n_tokens, loss (NaN: diverged, or not known)."""
    jobs = sweep.branches(record)
    losses = sweep.ledger.run_losses([job.chain.key for *_, job in jobs])
    rows = [(trial, rung, job.chain.last.end, losses.get(job.chain.key, math.nan)) for trial, rung, job in jobs]
    return pd.DataFrame(rows, columns=["trial", "rung", "n_tokens", "loss"])


def leading(sweep: Sweep, record: Record) -> list[tuple[int, int]]:
    """(trial, rung) of the trials with the best annealed losses of the longest horizon, best first.

    With a weight on cost, what a token took on average counts as well: log loss + cost_weight · log seconds.
    """
    settings = sweep.config.sweep
    runs = annealed_runs(sweep, record).dropna()
    longest = runs[runs["n_tokens"] == runs["n_tokens"].max()]
    seconds = longest["trial"].map(lambda trial: max(record.cost(trial)[1], 1e-9))
    score = np.log(longest["loss"]) + settings.cost_weight * np.log(seconds.astype(float))
    best = longest.assign(score=score).nsmallest(settings.leaders, "score")
    return [(int(row["trial"]), int(row["rung"])) for row in best.to_dict("records")]


def collect(sweep: Sweep, record: Record | None = None) -> SweepResult:
    """The sweep as the ledger has it, best first; trains nothing.

    Raises:
        StageError: If no trial came to an annealed end.
    """
    record = record or sweep.record()
    repetitions = sweep.repetitions(record, leading(sweep, record))
    losses = sweep.ledger.run_losses([job.chain.key for *_, job in repetitions])
    repeated = pd.DataFrame(
        [(trial, seed, losses[job.chain.key]) for trial, seed, job in repetitions if job.chain.key in losses],
        columns=["trial", "seed", "loss"],
    )
    return make_result(sweep.config, sweep.plan, record, annealed_runs(sweep, record), repeated)
