"""The adapter between `Work` and Ray Tune: a searcher that hands out jobs, and a scheduler that pauses and resumes their trials.

A suggestion is one Tune trial. After each step the trial continues, or its process stays idle until another job
takes it, because Tune itself would end all but one of the waiting processes. Nothing depends on Tune's own state files.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from ray.tune import Callback
from ray.tune import search as tune_search
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from muscale.actors.trainable import PROBLEM, WHY, problem_of
from muscale.actors.work import LOSS, Next, TuneJob, Work

MODE = "min"
_STARTS = 3  # consecutive failed starts at which the sweep ends
_OVERDUE_SECONDS = 30.0
"""Time without a process after which a trial gets the next free one, although another job would be due: its own may find no
room on the cluster. Longer than a process takes to start (3 to 5 s on a quiet machine), which would be for nothing (assumed)."""


class Dispatcher(tune_search.Searcher):
    """Source of a work's jobs as Tune trials; as Tune's searcher it creates the trials of new suggestions.

    Args:
        capacity: Returns the number of jobs that may run now.

    Attributes:
        broke: First exception of the driver's calls to the work, for example if the ledger's disk is full; Tune wraps the exception in
            another error, or fails later because of it.
        is_over: Whether the work has nothing more to do.
    """

    broke: Exception | None = None

    def __init__(self, work: Work, capacity: Callable[[], int]) -> None:
        super().__init__(metric=LOSS, mode=MODE)
        self._work, self._capacity = work, capacity
        self.is_over = False
        self.jobs: dict[str, TuneJob] = {}  # under way, by the id of their Tune trial
        self._asked: TuneJob | None = None  # has no Tune trial yet, or a trial that waits
        self._trials: dict[Hashable, Trial] = {}  # of suggestions that may be continued
        self._ids: dict[str, Hashable] = {}  # of these trials; None for a job on its own
        self.is_served = False  # whether a job was handed out in this round of Tune's loop
        self.is_holding = False  # whether no job is handed out, as a trial is overdue for a process

    def __getstate__(self) -> dict[str, Any]:
        """Return no state: Tune pickles its searcher, but the pickle is never read."""
        return {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """Return the config of the next job that needs a new Tune trial; None while there is none, and FINISHED at the end."""
        self.ask()
        if self.is_over:
            return str(tune_search.Searcher.FINISHED)
        job = self._asked
        if job is None or self.is_served or job.suggestion in self._trials:
            return None
        self._asked, self.is_served = None, True
        self.jobs[trial_id], self._ids[trial_id] = job, job.suggestion
        return job.tune_config()

    def ask(self) -> None:
        """Ask the work for a job, if there is room for one."""
        with self.noting():
            if self._asked is None and not (self.is_over or self.is_holding) and len(self.jobs) < self._capacity():
                self._asked = self._work.next()
                self.is_over = self._asked is None and not self.jobs and self._work.is_idle

    def to_continue(self) -> Trial | None:
        """The Tune trial of the next job, if that continues one; it has the job's config now."""
        job = self._asked
        if job is None or self.is_served or (trial := self._trials.get(job.suggestion)) is None:
            return None
        self._asked, self.is_served = None, True
        self.jobs[trial.trial_id] = job
        trial.set_config(job.tune_config())  # type: ignore[no-untyped-call]
        return trial

    def added(self, trial: Trial) -> None:
        """Remember the trial of a suggestion that may be continued."""
        if (suggestion := self._ids.get(trial.trial_id)) is not None:
            self._trials[suggestion] = trial

    def note(self, trial: Trial, report: dict[str, Any]) -> Next:
        """Tell the work what a step reported."""
        job = self.jobs[trial.trial_id]
        with self.noting():
            if PROBLEM in report:
                getattr(self._work, report[PROBLEM])(job, report[WHY])
                what = Next.WAIT
            else:
                what = self._work.note(job, report)
        if what is not Next.CONTINUE:
            del self.jobs[trial.trial_id]
        if what is Next.END:
            self.forget(trial)
        return what

    def note_error(self, trial: Trial, problem: str, why: str) -> None:
        """Tell the work that a job's process ended; a later job of its suggestion gets another trial."""
        self.forget(trial)
        if job := self.jobs.pop(trial.trial_id, None):
            with self.noting():
                getattr(self._work, problem)(job, why)

    def withdraw(self, trial: Trial) -> bool:
        """Whether the job of a trial without a process should not begin any more; it is then under way no longer."""
        if (job := self.jobs.get(trial.trial_id)) is None:
            return False
        with self.noting():
            withdrawn = self._work.withdraws(job)
        if withdrawn:
            del self.jobs[trial.trial_id]
            self.forget(trial)
        return withdrawn

    def may_continue(self, trial: Trial) -> bool:
        """Whether a later job may continue this trial."""
        return self._trials.get(self._ids.get(trial.trial_id)) is trial

    def forget(self, trial: Trial) -> None:
        """Let no later job continue this trial."""
        self._trials.pop(self._ids.pop(trial.trial_id, None), None)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Do nothing: the scheduler has already reported the end."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep the block's exception as `broke`."""
        try:
            yield
        except Exception as error:
            self.broke = self.broke or error
            raise

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""


class RungScheduler(TrialScheduler):
    """Leaves a process idle when its job has ended, and gives it to the next job.

    At most one job is handed out in a round of Tune's loop, because Tune keeps only one process that belongs to no trial.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatcher = dispatcher
        self._resting: dict[str, Trial] = {}  # by id, the one whose job ended last at the end
        self._since: dict[str, float] = {}  # by id of trials that wait for a process
        self._died_starting = 0  # processes, one after the other

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Nothing to set: the work ranks by its own record."""
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """A trial was made from a suggestion."""
        self._since[trial.trial_id] = time.monotonic()
        self._dispatcher.added(trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Whether the trial takes its next step at once, or leaves its process at rest."""
        what = self._dispatcher.note(trial, result)
        if what is Next.CONTINUE:
            return str(TrialScheduler.CONTINUE)
        self._resting[trial.trial_id] = trial
        return str(TrialScheduler.NOOP)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The trial that the next job continues; called in each round of Tune's loop, after `Dispatcher.suggest`."""
        dispatcher = self._dispatcher
        for waiting in tune_controller.get_live_trials().copy():
            if dispatcher.is_over or (waiting.trial_id in self._since and dispatcher.withdraw(waiting)):
                self._resting.pop(waiting.trial_id, None)
                self._since.pop(waiting.trial_id, None)
                tune_controller.stop_trial(waiting)
        dispatcher.ask()
        trial = dispatcher.to_continue()
        if trial is not None:
            self._since[trial.trial_id] = time.monotonic()
        dispatcher.is_holding = any(since < time.monotonic() - _OVERDUE_SECONDS for since in self._since.values())
        if dispatcher.is_served or dispatcher.is_holding:
            self._release(tune_controller, trial)
        dispatcher.is_served = False
        return trial

    def _release(self, tune_controller: Any, trial: Trial | None) -> None:
        """Take a process at rest from its trial, for whichever is to run next; from this trial if it rests itself."""
        if not self._resting:
            return
        at = trial.trial_id if trial is not None and trial.trial_id in self._resting else next(reversed(self._resting))
        resting = self._resting.pop(at)
        if self._dispatcher.may_continue(resting):
            tune_controller.pause_trial(resting, should_checkpoint=False)
        else:
            tune_controller.stop_trial(resting)

    def started(self, trial: Trial) -> None:
        """A trial has its process."""
        self._since.pop(trial.trial_id, None)
        self._died_starting = 0

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """The process of a trial died, or raised and is ended."""
        self._resting.pop(trial.trial_id, None)
        was_starting = self._since.pop(trial.trial_id, None) is not None
        error = _error_of(trial)
        problem, why = problem_of(error)
        if isinstance(error, RayActorError) and was_starting:
            self._died_starting += 1
            if self._died_starting == _STARTS:
                problem, why = "refuse", f"a worker can't start: {why}"
        self._dispatcher.note_error(trial, problem, why)

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Drop the queues and means that Tune would keep of every number of a trial that has ended."""
        trial.metric_n_steps.clear()
        trial.metric_analysis.clear()

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Nothing: a trial that waited was stopped."""

    def debug_string(self) -> str:
        """Nothing: Tune's tables are not shown."""
        return ""


def _error_of(trial: Trial) -> BaseException | None:
    """The error that Tune has just written for a trial; `Trial.get_pickled_error` looks where the file is copied later."""
    path = trial.pickled_error_file
    return pickle.loads(Path(path).read_bytes()) if path else None  # noqa: S301


class NoteStarts(Callback):
    """Tells the scheduler which trials have a process."""

    def __init__(self, scheduler: RungScheduler) -> None:
        self._scheduler = scheduler

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial's process has started, or was taken from another."""
        self._scheduler.started(trial)
