"""Runs that a stage needs; runs that the ledger does not have are trained as Ray Tune trials."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muscale.actors.corpus_hashes import require_unchanged
from muscale.actors.trial_retries import Attempts
from muscale.actors.tune_run import run_with_tune
from muscale.actors.work import LOSS, Next, Trains, report
from muscale.layout import CORPUS
from muscale.progress import Display
from muscale.settings.tables import ResourceSettings
from muscale.store.evaluations import Evaluated, missing
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import runs
from muscale.store.lineage import Chain, stems
from muscale.store.outcome import Outcome
from proxy_models.recipes.hyperparameters import Hyperparameters


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to its annealed end, and its purpose.

    Attributes:
        evaluated: Points of the run at which measures are taken, ascending; the last may be its end.
    """

    purpose: str
    label: str
    hyperparameters: Hyperparameters
    chain: Chain
    evaluated: tuple[Evaluated, ...] = ()

    def row(self, key: str) -> dict[str, Any]:
        """The run as a row of the ledger, with the key of the segment that ends it."""
        model = self.chain.numerics.model
        return {
            "purpose": self.purpose,
            "key": key,
            "stem": self.chain.stem,
            "d_model": model.d_model,
            "n_layers": model.n_layers,
            "n_params": model.n_params,
            "n_tokens": self.chain.last.end,
            "seed": self.chain.numerics.seed,
            "learning_rate": self.hyperparameters.learning_rate,
            "hyperparameters": self.hyperparameters.to_dict(),
            "label": self.label,
        }


def finish_stage(
    stage: str, jobs: Sequence[Job], ledger: Ledger, resources: ResourceSettings, display: Display
) -> None:
    """Train what the ledger does not know of these runs, the largest first, and note every one.

    Progress counts all the runs of the stage, and its bar moves by their compute. Runs that share a stem are one Tune trial,
    the shortest first. Ray starts only where there is something to train.

    Raises:
        KeyboardInterrupt: If the user interrupted it; the runs under way have been finished.
        StageError: If a run failed at every attempt or no worker can train; all other runs have been trained.
    """
    wanted = {job.chain.key: job for job in jobs}
    known = _finished(wanted, ledger)
    for key, outcome in known.items():
        ledger.insert(runs, **wanted[key].row(outcome.key))
    unknown = {key: job for key, job in wanted.items() if key not in known}
    if not unknown:
        return
    require_unchanged(ledger.directory / CORPUS)
    total = sum(job.chain.compute_flops for job in wanted.values())
    with display.stage(stage) as update:
        progress = _Progress(update, n_wanted=len(wanted), n_done=len(known), total=total, unknown=unknown)
        work = StageRuns(stage, unknown, ledger, progress)
        run_with_tune(work, RunSteps(unknown), ledger, resources)


def _finished(jobs: Mapping[str, Job], ledger: Ledger) -> dict[str, Outcome]:
    """The outcomes of the jobs of which nothing is left to train or to evaluate, by key."""
    known = ledger.outcomes(job.chain for job in jobs.values())
    left = {point.chain.key for point in missing(ledger, [point for job in jobs.values() for point in job.evaluated])}
    return {
        key: outcome
        for key, outcome in known.items()
        if outcome.diverged or left.isdisjoint(point.chain.key for point in jobs[key].evaluated)
    }


@dataclass(frozen=True, kw_only=True)
class StemRuns:
    """The runs of one stem that are still to be trained, by key, the shortest first; one Tune trial trains them."""

    keys: tuple[str, ...]
    label: str
    suggestion: None = None

    def tune_config(self) -> dict[str, Any]:
        """Config of the Tune trial."""
        return {"runs": list(self.keys), "label": self.label}


@dataclass(frozen=True)
class RunSteps:
    """Trains the runs of a stem one after the other, in a worker's process, and evaluates them on the way."""

    jobs: Mapping[str, Job]

    def __call__(self, config: Mapping[str, Any], worker: Trains) -> Iterator[dict[str, Any]]:
        """A report for each run, and before and after each evaluation, so that an interrupted stage can end there."""
        for key in config["runs"]:
            job = self.jobs[key]
            for point in job.evaluated:
                outcome = worker.reach(point.chain, goes_on=True)
                yield report(outcome.loss, run=key, segment=None)
                worker.evaluate(point)
                yield report(outcome.loss, run=key, segment=None)
            outcome = worker.reach(job.chain)
            yield report(outcome.loss, run=key, segment=outcome.key)


class StageRuns:
    """The runs of a stage as work for Ray Tune: stem after stem, the largest first."""

    def __init__(self, stage: str, unknown: Mapping[str, Job], ledger: Ledger, progress: _Progress) -> None:
        self.stage, self.interrupted, self.refusal = stage, False, None
        self._jobs, self._ledger, self._progress = unknown, ledger, progress
        groups = stems([job.chain for job in unknown.values()]).values()
        ordered = sorted(groups, key=lambda group: group[-1].compute_flops, reverse=True)
        self._waiting = deque(self._stem_runs([chain.key for chain in group]) for group in ordered)
        self._attempts = Attempts()
        self._left: dict[StemRuns, list[str]] = {}  # keys of the jobs under way that have not ended
        progress.show("waiting for workers")

    refusal: str | None

    @property
    def failure(self) -> str:
        """Number of runs that failed, and why the first did; "" if none."""
        return self._attempts.describe("run", str)

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return not self._left

    def next(self) -> StemRuns | None:
        """The runs of the next stem."""
        if self.interrupted or self.refusal or not self._waiting:
            return None
        job = self._waiting.popleft()
        self._left[job] = list(job.keys)
        return job

    def note(self, job: StemRuns, report: Mapping[str, Any]) -> Next:
        """Record a run that has ended; the Tune trial continues, until the stem ends or the user interrupts the stage."""
        key, left = report["run"], self._left[job]
        if report["segment"]:
            left.remove(key)
            self._attempts.succeeded(self._jobs[key].label)
            self._ledger.insert(runs, **self._jobs[key].row(report["segment"]))
            self._progress.done(self._jobs[key], None if report["diverged"] else report[LOSS])
        if left and not self.interrupted:
            return Next.CONTINUE
        del self._left[job]
        return Next.END

    def withdraws(self, job: StemRuns) -> bool:
        """Whether runs that wait for a process should not begin, as the user interrupted the stage."""
        return self.interrupted and self._left.pop(job, None) is not None

    def lost(self, job: StemRuns, why: str) -> None:
        """Train what is left again, unless its first run lost too many processes."""
        self._again(job, self._attempts.lost, why)

    def failed(self, job: StemRuns, why: str) -> None:
        """Train what is left again, unless its first run failed before."""
        self._again(job, self._attempts.failed, why)

    def refuse(self, job: StemRuns, why: str) -> None:
        """Begin nothing more."""
        self._left.pop(job)
        self.refusal = self.refusal or why

    def _again(self, job: StemRuns, tries: Callable[[str, str, str], bool], why: str) -> None:
        left = self._left.pop(job)
        label = self._jobs[left[0]].label
        if tries(label, label, why):
            self._waiting.appendleft(self._stem_runs(left))
        else:
            _log.warning("%s: %s", label, self._attempts.failures[label])
            if left[1:]:
                _log.warning("%s: the %d longer runs of its stem are not trained", label, len(left) - 1)

    def _stem_runs(self, keys: Sequence[str]) -> StemRuns:
        return StemRuns(keys=tuple(keys), label=self._jobs[keys[0]].label)


class _Progress:
    """Shows how many of a stage's runs are done; the bar shows their share of the compute."""

    def __init__(
        self, update: Callable[..., None], *, n_wanted: int, n_done: int, total: float, unknown: Mapping[str, Job]
    ) -> None:
        self._update, self._n_wanted, self._n_done, self._total = update, n_wanted, n_done, total
        self._left, self._best = sum(job.chain.compute_flops for job in unknown.values()), math.inf

    def show(self, note: str) -> None:
        """Show what is known, with a note."""
        self._update(self._n_done, self._n_wanted, f"runs; {note}", share=1 - self._left / self._total)

    def done(self, job: Job, loss: float | None) -> None:
        """Show that a run has ended."""
        self._left, self._n_done = self._left - job.chain.compute_flops, self._n_done + 1
        self._best = min(self._best, math.inf if loss is None else loss)
        self.show(f"last {job.label}" + (f", best loss {self._best:.4f}" if self._best < math.inf else ""))


_log = logging.getLogger(__name__)
