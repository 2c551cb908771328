"""Between the engine and Ray Tune: a Tune trial is a leg, and Tune's controller keeps the workers busy with them.

Nothing depends on Tune's own state files. A diverged trial has no loss in the record; only Tune gets a finite number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from muscale.actors.jobs import IDLE_SECONDS
from muscale.errors import MuscaleError, last_line, of_storage
from muscale.search.jobs import AnnealJob, TrialSegment, job_to_json
from muscale.search.record import RungResult

if TYPE_CHECKING:
    from muscale.search.engine import Engine

METRIC, MODE = "loss", "min"
LEG = "leg"  # of what a Tune trial trains, in the config that Tune carries


class _WithEngine:
    """Leaves the engine behind when Tune pickles its own state, which nobody reads."""

    _engine: Engine

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_engine"}


class EngineSearcher(_WithEngine, Searcher):
    """Gives Tune the engine's legs and endings as suggestions, and the engine what came of them.

    Attributes:
        broke: What first kept the driver from asking or telling the engine, as a ledger without room does; Tune wraps it into
            an error of its own, or trips over it.
    """

    broke: Exception | None = None

    def __init__(self, engine: Engine) -> None:
        super().__init__(metric=METRIC, mode=MODE)
        self._engine = engine
        self._in_flight: dict[str, TrialSegment | AnnealJob] = {}
        self._errors: dict[str, Exception] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The next leg or ending; None while there is none to begin, and the end once none is at work either."""
        with self.noting():
            leg = self._engine.next()
        if leg is None:
            return str(Searcher.FINISHED) if self._engine.is_idle else None
        self._in_flight[trial_id] = leg
        return {**leg.path[-1][1], LEG: job_to_json(leg)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Note a result on the way."""
        if "rung" in result:
            with self.noting():
                self._engine.arrived(arrival(result))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Note the last result and the end, or what came instead of it."""
        what = self._in_flight.pop(trial_id)
        if not error:
            if result:
                self.on_trial_result(trial_id, result)
            self._engine.finished(what)
            return
        match self._errors.pop(trial_id):
            case RayActorError() as lost if not lost.actor_init_failed:
                self._engine.lost(what, last_line(lost))
            case RayActorError() as unborn:  # no other worker will begin either
                self._engine.refuse(what, f"a worker can't start: {last_line(unborn)}")
            case RayTaskError(cause=MuscaleError() as ours):
                self._engine.refuse(what, str(ours))
            case RayTaskError(cause=cause) if told := of_storage(cause):  # what others train would not be kept either
                self._engine.refuse(what, told)
            case RayTaskError(cause=cause):
                self._engine.failed(what, f"{type(cause).__name__}: {cause}")
            case other:
                self._engine.failed(what, f"{type(other).__name__}: {other}")

    def flown(self, trial_id: str) -> TrialSegment | AnnealJob:
        """What a trial of Tune's trains."""
        return self._in_flight[trial_id]

    def on_trial_failing(self, trial_id: str, error: Exception) -> None:
        """Note what `on_trial_complete` is not told, of which it is the next to hear."""
        self._errors[trial_id] = error

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what the block raises, as `broke`."""
        try:
            yield
        except Exception as error:
            self.broke = self.broke or error
            raise

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""


class StopAtRung(_WithEngine, FIFOScheduler):
    """Lets every leg end where it is going, or at its next rung once the sweep is stopping or its trial is cancelled.

    Workers without a leg are kept warm for `IDLE_SECONDS`. Left to itself, Tune ends all but one whenever a rule waits for
    the last of many legs, and starts others, which takes seconds, when it gives out more.
    """

    def __init__(self, engine: Engine, legs: EngineSearcher, workers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine, self._legs, self._workers = engine, legs, workers
        self._finished_at = math.inf  # of the last leg; none has finished
        self._keeping = 0

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The trial that waits longest; before, how many idle workers Tune may keep."""
        keep = self._workers if time.monotonic() - self._finished_at < IDLE_SECONDS else 0
        if keep != self._keeping and (trials := tune_controller.get_trials()):
            # Tune has no setting for it; the cache of its controller counts by what a trial asks for, all ask for the same.
            cache = _unwrapped(tune_controller)._actor_cache
            cache.increase_max(trials[0].placement_group_factory, by=keep - self._keeping)
            self._keeping = keep
        return super().choose_trial_to_run(tune_controller)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Whether the leg goes on."""
        with self._legs.noting():
            ends = self._engine.ends(self._legs.flown(trial.trial_id))
        return str(TrialScheduler.STOP if ends else TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Let go of what Tune would keep of a leg that is over: queues and means of every number that was reported."""
        self._finished_at = time.monotonic()
        trial.metric_n_steps.clear()
        trial.metric_analysis.clear()

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Tell the legs what went wrong, which Tune hands to nobody but its own folder; end idle workers.

        Where a node is lost they are dead as well, and each would cost a leg another of its attempts.
        """
        _unwrapped(tune_controller)._cleanup_cached_actors(force_all=True)
        pickled = Path(trial.pickled_error_file).read_bytes()  # written a moment ago by this process
        self._legs.on_trial_failing(trial.trial_id, ray.cloudpickle.loads(pickled))


def _unwrapped(controller: Any) -> Any:
    """Tune's controller; some of a scheduler's methods are given it in a wrapper that warns of what we reach for."""
    return getattr(controller, "_tune_controller", controller)


def arrival(result: dict[str, Any]) -> RungResult:
    """What a trainable reported, as the record has it."""
    values = {name: result[name] for name in RungResult.__dataclass_fields__}
    return RungResult(**{**values, "loss": None if result["diverged"] else float(result["loss"])})
