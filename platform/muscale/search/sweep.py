"""A sweep: its search at the base shape, the runs that it needs, and its result; `run_sweep` searches.

A sweep anneals the trials that advance and the best of each rung, and repeats the finalists under other seeds.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from muscale.actors.jobs import Job
from muscale.importers.imported_space import place_of
from muscale.importers.results import is_outside, outside_results
from muscale.search.across_scales import AcrossScales
from muscale.search.budget import SweepBudget
from muscale.search.engine import Engine
from muscale.search.methods import make_scheduler, make_searcher, resolve_searcher
from muscale.search.own_methods import identity_of, noted_methods
from muscale.search.prior_runs import runs_of, usable_runs
from muscale.search.protocols import Scheduler, Searcher
from muscale.search.record import Record, Round, RungResult
from muscale.search.record_view import RecordView
from muscale.search.sweep_conclusion import make_result
from muscale.search.sweep_jobs import AnnealJob, history_to_json
from muscale.search.sweep_result import SweepResult
from muscale.search.trial import TrialPlan
from muscale.search.tune_methods import require_known_arguments
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import runs
from muscale.store.lineage import input_key
from proxy_models.data.corpus import Corpus
from proxy_models.training.numerics import Numerics
from scaling.fits.as_found import NO_COLUMNS

if TYPE_CHECKING:
    from ray.tune import Callback

OnResult = Callable[[RungResult], None]
OnRun = Callable[[int, int, str], None]  # runs done, runs wanted, their kind
_HOW_MUCH = (
    "trials",
    "max_tokens",
    "max_flops",
    "max_device_hours",
    "top_k",
    "n_finalists",
    "n_seeds",
    "cost_weight",
    "learn_from",
)
"""Settings of the search's extent and of the use of its results: the same sweep continues if they change."""


def trial_plan(config: StudyConfig, numerics: Numerics) -> TrialPlan:
    """Return the plan of every trial of a study's sweep."""
    settings, h = config.sweep, config.hyperparameters
    batch = config.largest_batch  # so that rungs fall on whole batches in every trial
    return TrialPlan(
        numerics=numerics,
        defaults=replace(h, schedule=settings.schedule or h.schedule, batch_tokens=batch),
        n_tokens=replace(h, batch_tokens=batch).whole_batches(settings.n_tokens),
        rung_tokens=config.rung_tokens(),
    )


def budget(config: StudyConfig, plan: TrialPlan) -> SweepBudget:
    """Return the budget that the study file gives a sweep."""
    settings, resources = config.sweep, config.resources
    branches = [plan.run_tokens(k) - plan.rung_tokens[k] if plan.has_branch(k) else 0 for k in range(plan.top + 1)]
    return SweepBudget(
        trials=settings.trials,
        rung_tokens=plan.rung_tokens,
        branch_tokens=tuple(branches),
        top_k=sys.maxsize
        if settings.rank_by == "annealed"
        else settings.top_k,  # ranking by annealed loss anneals every trial
        n_finalists=settings.n_finalists,
        repeat_tokens=settings.n_seeds * plan.run_tokens(plan.top),
        n_params=config.model.n_params,
        devices=resources.ranks_per_trial * (resources.gpus_per_worker or resources.cpus_per_worker),
        max_tokens=settings.max_tokens,
        max_flops=settings.max_flops,
        max_device_hours=settings.max_device_hours,
    )


def distinct(record: Record, ends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (trial, rung) pairs, except repeats of an earlier pair's training, which are common in a discrete space."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for trial, rung in ends:
        path = json.dumps(history_to_json(record.path_towards(trial, rung)), sort_keys=True)
        found.setdefault((path, rung), (trial, rung))
    return [*found.values()]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One search of a study: its settings, its methods, and its key in the ledger.

    Attributes:
        learn_from: Sources of prior runs in addition to those of the study file.
        columns: Names of the columns in tables of `learn_from`, by muscale's names.
        searcher, scheduler: Objects that replace the methods of the study file.
        callbacks: Ray Tune callbacks that run during the search.
        own_methods: Identities of a custom searcher or scheduler. Without the objects the sweep can be read but not searched.
    """

    config: StudyConfig
    ledger: Ledger
    numerics: Numerics
    learn_from: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    searcher: Searcher | None = None
    scheduler: Scheduler | None = None
    own_methods: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callback, ...] = ()

    @classmethod
    def of(cls, config: StudyConfig, ledger: Ledger, corpus: Corpus) -> Self:
        """Return the sweep of a study file or its custom replacement; raise StageError if the corpus holds out too little."""
        sweep = cls(config=config, ledger=ledger, numerics=config.shared_numerics(corpus, ledger.directory))
        return replace(sweep, own_methods=noted_methods(ledger, sweep.key))

    def by(self, searcher: Searcher | None, scheduler: Scheduler | None) -> Self:
        """Return the same search with another searcher or scheduler; raise StageError if one has no identity (`identity_of`)."""
        given = {"searcher": searcher, "scheduler": scheduler}
        own = {role: identity_of(role, method) for role, method in given.items() if method is not None}
        return replace(self, searcher=searcher, scheduler=scheduler, own_methods=own)

    @cached_property
    def key(self) -> str:
        """Key of the search: sweeps with the same key share their record."""
        settings = self.config.to_dict()["sweep"]
        searched = {name: value for name, value in settings.items() if name not in _HOW_MUCH}
        own = [dict(self.own_methods)] if self.own_methods else []
        return input_key(self.numerics.to_dict(), self.config.hyperparameters.to_dict(), searched, *own)

    def how_much(self, record: Record) -> str:
        """Return a key of the search's extent."""
        settings = self.config.to_dict()["sweep"]
        return input_key({name: settings.get(name) for name in _HOW_MUCH}, len(record.rounds))

    @cached_property
    def plan(self) -> TrialPlan:
        """Plan of every trial."""
        return trial_plan(self.config, self.numerics)

    def record(self) -> Record:
        """Return the record of the search in the ledger."""
        return Record(self.ledger, self.key)

    def engine(self, record: Record, on_result: OnResult, on_run: OnRun, search_round: Round | None = None) -> Engine:
        """Return an engine that continues from the record, or with a round to come; a new sweep begins its first round."""
        settings, plan = self.config.sweep, self.plan
        if not record.rounds:
            own = self.own_methods.get("searcher")
            record.begin_round(own["name"] if own else resolve_searcher(settings, self.prior_runs()), settings.space)
        search_round = search_round or record.rounds[-1]
        allowed = self._budget(record, search_round)
        searcher = self.searcher or self._named_searcher(search_round)
        scheduler = self.scheduler or make_scheduler(settings, search_round.space, self.config.model.loss_unit)
        if settings.tune:
            require_known_arguments(settings, search_round.searcher)
        anneal_jobs = partial(self.anneal_jobs, record, on_run)
        return Engine(
            record,
            scheduler,
            searcher,
            allowed,
            top=plan.top,
            on_result=on_result,
            anneal_jobs=anneal_jobs,
            copies=settings.is_population,
        )

    def anneal_jobs(self, record: Record, on_run: OnRun) -> list[AnnealJob]:
        """Return the wanted annealed runs without a result: first those that branch off, then the repetitions of finalists.

        Runs whose result is in the ledger are recorded as runs of this sweep, and so are trials that diverged on the way.
        """
        self._note_divergences(record)
        wanted: tuple[tuple[str, Callable[[], list[tuple[AnnealJob, Job]]]], ...] = (
            ("annealed", lambda: self.branches(record)),
            (
                "finalists repeated",  # once all the others are recorded
                lambda: self.repetitions(record, self.finalists(record, self.annealed_runs(record))),
            ),
        )
        for kind, find in wanted:
            jobs = [(annealed, job) for annealed, job in find() if not record.has_failed(annealed)]
            noted = self.ledger.run_losses([job.chain.key for _, job in jobs])
            unknown, left = [], [(annealed, job) for annealed, job in jobs if job.chain.key not in noted]
            ended = self.ledger.outcomes(job.chain for _, job in left)
            for annealed, job in left:
                if outcome := ended.get(job.chain.key):
                    self.ledger.insert(runs, **job.row(outcome.key))
                else:
                    unknown.append(annealed)
            if jobs:
                on_run(len(jobs) - len(unknown), len(jobs), kind)
            if unknown:
                return unknown
        return []

    def _note_divergences(self, record: Record) -> None:
        """Record each trial that diverged before its annealing as a run of the length that it did not reach."""
        diverged = [trial for (trial, _), result in record.results.items() if result.loss is None]
        jobs = [job for _, job in (self._anneal_job(record, trial, self.plan.top) for trial in diverged)]
        ended = self.ledger.outcomes(job.chain for job in jobs)
        noted = self.ledger.run_losses([outcome.key for outcome in ended.values()])
        for job in jobs:
            if (outcome := ended.get(job.chain.key)) and outcome.key not in noted:
                self.ledger.insert(runs, **job.row(outcome.key))

    def prior_runs(self) -> pd.DataFrame:
        """Return runs that locate the optimum at other scales; source: the file of results from outside, "" for ledgers.

        A ledger's runs are checked to belong to the study's family; results from outside can't be checked.
        """
        ledgers = [self.ledger.runs(), *(runs_of(file) for file in self.sources() if not is_outside(file))]
        space, numerics = self.config.sweep.space, self.numerics
        tables = [usable_runs(runs, self.plan.defaults, space, numerics).assign(source="") for runs in ledgers]
        tables += [self.results_from(file).assign(source=str(file)) for file in self.sources() if is_outside(file)]
        known = pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)
        return known.drop_duplicates(known.columns.drop("source"), ignore_index=True)

    def results_from(self, file: Path) -> pd.DataFrame:
        """Return the results in a table or an Optuna storage, whose columns may have the user's names."""
        n_params, n_tokens = self.config.model.n_params, self.plan.rung_tokens[-1]
        columns = self.columns if str(file) in self.learn_from else NO_COLUMNS
        return outside_results(file, self.config.sweep.space, n_params=n_params, n_tokens=n_tokens, columns=columns)

    def sources(self) -> list[Path]:
        """Return the studies and outside results that the search learns from, those of the study file relative to its directory."""
        return [*(self.ledger.directory / file for file in self.config.sweep.learn_from), *map(Path, self.learn_from)]

    def describe_disagreements(self, record: Record) -> list[str]:
        """Return messages about the sources that disagree with the sweep's own runs; none if a source is missing."""
        sources = [Path(place_of(str(source))[0]) for source in self.sources()]
        ours = bool(record.rounds) and "searcher" not in self.own_methods
        searcher = self._named_searcher(record.rounds[-1]) if ours else None
        if not isinstance(searcher, AcrossScales) or not sources or not all(source.exists() for source in sources):
            return []
        return searcher.describe_disagreements(RecordView(record, self.plan.top))

    def _named_searcher(self, search_round: Round) -> Searcher:
        model = self.config.model
        return make_searcher(
            search_round,
            self.config.sweep,
            n_params=model.n_params,
            n_tokens=self.plan.rung_tokens[-1],
            prior_runs=self.prior_runs,
            loss_unit=model.loss_unit,
        )

    def _budget(self, record: Record, search_round: Round) -> SweepBudget:
        """Return the budget up to the end of a round."""
        settings = self.config.sweep
        trials = settings.trials
        if search_round.searcher == "grid":
            trials = min(trials, len(search_round.space.grid(settings.grid_points)))
        allowed = replace(budget(self.config, self.plan), trials=search_round.first_trial + trials)
        if allowed.is_limited:
            allowed = replace(allowed, repeated_tokens=self._repeated_tokens(record))
        return allowed.for_population() if settings.is_population else allowed

    def _repeated_tokens(self, record: Record) -> int:
        """Tokens of the finished repetitions, of present finalists and of earlier ones."""
        annealed = self.annealed_runs(record)
        longest = annealed[annealed["n_tokens"] == annealed["n_tokens"].max()]
        led = [(int(row["trial"]), int(row["rung"])) for row in longest.to_dict("records")]
        jobs = [job for _, job in self.repetitions(record, led)]
        known = self.ledger.run_losses([job.chain.key for job in jobs])
        return sum(job.chain.last.end for job in jobs if job.chain.key in known)

    def branches(self, record: Record) -> list[tuple[AnnealJob, Job]]:
        """Return the annealed runs from rungs: of every trial that advanced, and of each rung's best."""
        wanted: list[tuple[int, int]] = []
        for rung in range(self.plan.top + 1):
            if self.plan.has_branch(rung):
                alive = [trial for loss, trial in record.ranking(rung) if math.isfinite(loss)]
                arrived = [trial for trial in alive if trial not in record.cancelled]
                gone = {trial for trial in arrived if (trial, rung) in record.advanced}
                best = distinct(record, [(trial, rung) for trial in arrived])[: self.config.sweep.top_k]
                wanted += sorted({*best, *((trial, rung) for trial in gone)})
        return [self._anneal_job(record, trial, rung) for trial, rung in wanted]

    def repetitions(self, record: Record, finalists: Sequence[tuple[int, int]]) -> list[tuple[AnnealJob, Job]]:
        """Return the repetitions of finalists (trial, rung) under seeds that the search did not use."""
        first = self.config.sweep.seed + 1
        seeds = range(first, first + self.config.sweep.n_seeds)
        return [self._anneal_job(record, trial, rung, seed) for trial, rung in finalists for seed in seeds]

    def _anneal_job(self, record: Record, trial: int, rung: int, seed: int | None = None) -> tuple[AnnealJob, Job]:
        path = record.path_towards(trial, rung)
        job = Job(
            purpose="sweep",
            label=f"trial {trial}, rung {rung}" + ("" if seed is None else f", seed {seed}"),
            hyperparameters=self.plan.followed(path, rung),
            chain=self.plan.branch(path, rung, seed=seed),
        )
        return AnnealJob(trial=trial, path=path, rung=rung, seed=seed), job

    def annealed_runs(self, record: Record) -> pd.DataFrame:
        """Return a row per finished annealed run under the sweep's seed: trial, rung, n_tokens, loss (NaN: diverged or failed)."""
        jobs = self.branches(record)
        losses = {job.chain.key: math.nan for annealed, job in jobs if record.has_failed(annealed)}
        losses |= self.ledger.run_losses([job.chain.key for _, job in jobs])
        known = [(annealed, job.chain) for annealed, job in jobs if job.chain.key in losses]
        rows = [(e.trial, e.rung, chain.last.end, losses[chain.key]) for e, chain in known]
        return pd.DataFrame(rows, columns=["trial", "rung", "n_tokens", "loss"]).astype({"loss": float})

    def annealed_figures(self, record: Record) -> dict[int, dict[str, Any]]:
        """Return loss and tokens of each trial's longest annealed run, which may be shorter than the trial."""
        annealed = self.annealed_runs(record).dropna().sort_values("n_tokens").drop_duplicates("trial", keep="last")
        return {
            int(row["trial"]): {"annealed_loss": float(row["loss"]), "annealed_tokens": int(row["n_tokens"])}
            for row in annealed.to_dict("records")
        }

    def finalists(self, record: Record, annealed: pd.DataFrame) -> list[tuple[int, int]]:
        """Return (trial, rung) of the best annealed losses at the longest horizon, best first, each configuration once.

        With a weight on cost, the seconds of the trial's stem count as well: log loss + cost_weight · log seconds.

        Args:
            annealed: Table of `annealed_runs`.
        """
        settings, finished = self.config.sweep, annealed.dropna()
        longest = finished[finished["n_tokens"] == finished["n_tokens"].max()]
        seconds = longest["trial"].map(lambda trial: max(record.cost(trial)[1], 1e-9))
        score = np.log(longest["loss"]) + settings.cost_weight * np.log(seconds.astype(float))
        ranked = longest.assign(score=score).sort_values("score", kind="stable")
        best = [(int(row["trial"]), int(row["rung"])) for row in ranked.to_dict("records")]
        return distinct(record, best)[: settings.n_finalists]

    def result(self, record: Record | None = None) -> SweepResult:
        """Return the result from the ledger, best first, without training; raise StageError if no trial has a loss after annealing."""
        record = record or self.record()
        annealed = self.annealed_runs(record)
        repetitions = self.repetitions(record, self.finalists(record, annealed))
        outcomes = self.ledger.outcomes(job.chain for _, job in repetitions)
        losses = {job.chain.key: math.nan for annealed, job in repetitions if record.has_failed(annealed)}
        losses |= {key: math.nan if outcome.loss is None else outcome.loss for key, outcome in outcomes.items()}
        ended = [(e.trial, e.seed, losses[job.chain.key]) for e, job in repetitions if job.chain.key in losses]
        repeated = pd.DataFrame(ended, columns=["trial", "seed", "loss"]).astype({"loss": float})
        other_runs = self.ledger.runs(but_of=("sweep", "full"))
        notes = self.describe_disagreements(record)
        notes += [
            f"its {role} was {identity['name']}, given to study.sweep()" for role, identity in self.own_methods.items()
        ]
        return make_result(self.config, self.plan, record, annealed, repeated, other_runs, notes)
