"""The sweep: Ray Tune searches the space at the base shape; its survivors and leaders are annealed into runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from muscale.config import StudyConfig
from muscale.errors import StageError
from muscale.fingerprint import package_fingerprint
from muscale.jobs import Job, cluster, finish, interrupted_later, interruptible
from muscale.ledger import Ledger
from muscale.lineage import input_key
from muscale.trial import TrialPlan
from proxy_models.hyperparameters import Hyperparameters
from proxy_models.numerics import Numerics

OnTrial = Callable[[int, float | None], None]


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        trials: A row each: number, status, configuration, loss of the averaged weights at each rung reached, and the
            loss and tokens of its longest annealed run (NaN without one). Losses in nats per token.
        best: Hyperparameters of the best annealed run of the longest horizon.
    """

    trials: pd.DataFrame
    best: Hyperparameters

    def __str__(self) -> str:
        best = self.trials.iloc[0]
        return (
            f"sweep: {len(self.trials)} trials, {int((self.trials['status'] == 'stopped').sum())} stopped early, "
            f"{int((self.trials['status'] == 'diverged').sum())} diverged; best annealed loss "
            f"{best['annealed_loss']:.4f} by trial {best['trial']}"
        )

    def _repr_html_(self) -> str:
        return str(self.trials.to_html(index=False))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"best": self.best.to_dict(), "trials": self.trials.to_dict("records")}


def sweep_key(config: StudyConfig, numerics: Numerics) -> str:
    """What makes two sweeps the same search; the number of trials may change."""
    settings = config.to_dict()["sweep"]
    return input_key(numerics.to_dict(), config.hyperparameters.to_dict(), {**settings, "trials": None})


def trial_plan(config: StudyConfig, numerics: Numerics) -> TrialPlan:
    """The trial that every suggestion is put into."""
    h = config.hyperparameters
    return TrialPlan(
        numerics=numerics, defaults=h, n_tokens=h.whole_batches(config.sweep.n_tokens), rung_tokens=config.rung_tokens()
    )


def run_sweep(
    config: StudyConfig, ledger: Ledger, numerics: Numerics, on_trial: OnTrial, on_branch: Callable[[int, int], None]
) -> SweepResult:
    """Search, or go on searching, up to the budget; then anneal.

    Raises:
        StageError: If no trial came to an annealed end.
    """
    key, plan = sweep_key(config, numerics), trial_plan(config, numerics)
    if _unfinished(config, ledger, key):
        with cluster(config.resources):
            _search(config, ledger, key, plan, on_trial)
    jobs = _branches(config, ledger, key, plan)
    done = 0

    def count(_job: Job, _outcome: object) -> None:
        nonlocal done
        done += 1
        on_branch(done, len(jobs))

    finish(jobs, ledger, config.resources, count)
    return collect(config, ledger, numerics)


def collect(config: StudyConfig, ledger: Ledger, numerics: Numerics) -> SweepResult:
    """The sweep as the ledger has it, best first.

    Raises:
        StageError: If no trial came to an annealed end.
    """
    key, plan = sweep_key(config, numerics), trial_plan(config, numerics)
    records = {
        row["number"]: {"trial": row["number"], "status": row["status"], **row["config"]} for row in ledger.trials(key)
    }
    for record in records.values():
        record.update({f"loss_at_{tokens}": None for tokens in plan.rung_tokens})
        record.update(annealed_loss=None, n_tokens=0)
    for rung in ledger.rungs(key):
        record = records[rung["trial"]]
        record[f"loss_at_{rung['tokens']}"] = rung["loss"]
        chain = plan.branch(ledger_config(record, config), rung["rung"])
        outcome = ledger.outcome(chain)
        if outcome and outcome.loss is not None and chain.last.end > record["n_tokens"]:
            record.update(annealed_loss=outcome.loss, n_tokens=chain.last.end)
    table = pd.DataFrame(list(records.values()))
    if table.empty or table["annealed_loss"].isna().all():
        raise StageError(
            f"sweep: none of the {len(table)} trials came to an annealed end; "
            "lower the upper bound of sweep.space.learning_rate or raise sweep.trials"
        )
    floats = [name for name in table if str(name).startswith("loss_at_")] + ["annealed_loss"]
    table[floats] = table[floats].astype(float)
    table = table.sort_values(["n_tokens", "annealed_loss"], ascending=[False, True], na_position="last")
    best = plan.hyperparameters(ledger_config(records[int(table.iloc[0]["trial"])], config))
    return SweepResult(trials=table.reset_index(drop=True), best=best)


def ledger_config(record: dict[str, Any], config: StudyConfig) -> dict[str, Any]:
    """The searched values of a trial's record."""
    return {name: record[name] for name in config.sweep.space}


def _unfinished(config: StudyConfig, ledger: Ledger, key: str) -> bool:
    recorded = ledger.trials(key)
    budget = config.sweep.trials
    if config.sweep.searcher == "grid":
        budget = min(budget, len(config.sweep.space.grid(config.sweep.grid_points)))
    return len(recorded) < budget or any(row["status"] == "running" for row in recorded)


def _search(config: StudyConfig, ledger: Ledger, key: str, plan: TrialPlan, on_trial: OnTrial) -> None:
    """Run Tune until the budget is used up.

    Raises:
        KeyboardInterrupt: If the user interrupted it; what was finished is recorded.
        StageError: If a trial failed for another reason than divergence.
    """
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints tables that `verbose=0` does not silence
    with interrupted_later():
        from ray import tune

        from muscale.actor import Trial
        from muscale.search import METRIC, MODE, RecordedScheduler, RecordedSearcher, TrialReport

    resources = config.resources
    searcher = RecordedSearcher(ledger, key, config.sweep)
    wanted = searcher.remaining

    trainable = tune.with_resources(
        tune.with_parameters(
            Trial,
            plan=plan,
            ledger=ledger,
            compiled=resources.compile,
            threads=resources.cpus_per_worker,
            device=resources.device,
            package=package_fingerprint(),
        ),
        {"cpu": resources.cpus_per_worker, "gpu": resources.gpus_per_worker},
    )
    with tempfile.TemporaryDirectory(prefix="muscale-tune-") as scratch:
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode=MODE,
                search_alg=searcher,
                scheduler=RecordedScheduler(ledger, key, config.sweep),
                num_samples=wanted,
                max_concurrent_trials=resources.workers,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=Path(scratch).name,
                storage_path=scratch,
                verbose=0,
                callbacks=[TrialReport(on_trial)],
                failure_config=tune.FailureConfig(max_failures=2),
            ),
        )
        with interruptible():
            results = tuner.fit()
    if results.errors:
        raise StageError(f"sweep: a trial failed: {results.errors[0]}")
    if _unfinished(config, ledger, key):
        raise KeyboardInterrupt


def _branches(config: StudyConfig, ledger: Ledger, key: str, plan: TrialPlan) -> list[Job]:
    """The runs that cool down from rungs: of every trial that went on, and of the leaders of each rung."""
    configs = {row["number"]: row["config"] for row in ledger.trials(key)}
    reached = pd.DataFrame(ledger.rungs(key))
    reached = reached[reached["loss"].notna()]
    jobs = []
    for rung, group in reached.groupby("rung"):
        leaders = set(group.nsmallest(config.sweep.top_k, "loss")["trial"])
        goes_on = set(group[group["decision"] == "continue"]["trial"])
        for number in sorted(leaders | goes_on):
            jobs.append(
                Job(
                    purpose="sweep",
                    label=f"trial {number}, rung {rung}",
                    hyperparameters=plan.hyperparameters(configs[number]),
                    chain=plan.branch(configs[number], int(rung)),
                )
            )
    return jobs
