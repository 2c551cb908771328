"""Ray Tune's trainable, which trains in its own process, on its own resources, one job after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray import tune
from ray.exceptions import RayActorError, RayTaskError

from muscale.actors.work import LOSS, WORST_LOSS, Steps
from muscale.errors import MuscaleError, TrainingFailedError, WorkerLostError, last_line, of_storage

if TYPE_CHECKING:
    from muscale.settings.tables import ResourceSettings
    from muscale.store.ledger import Ledger

PROBLEM, WHY = "problem", "why"  # of a report: the name of the `Work` method that records it, and its reason


class Training(tune.Trainable):
    """A process that trains the steps of a job, then of the next job, and keeps its models loaded.

    A training error is reported, not raised, so that the process survives. With several ranks it is raised and the process
    ends, because an error in the middle of a pass leaves the ranks unusable.
    """

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], *, steps: Steps, ledger: Ledger, resources: ResourceSettings, package: str
    ) -> None:
        """Open the study in this process and begin the first job."""
        from muscale.actors.worker import open_worker  # here, as the driver names this class and needs no torch

        self._begin, self._n_ranks = steps, resources.ranks_per_trial
        self._worker = open_worker(ledger, resources, package)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another job in this process."""
        self._steps = self._begin(new_config, self._worker)
        return True

    def step(self) -> dict[str, Any]:
        """Train the next step; returns its report, or the `PROBLEM` that came instead."""
        try:
            return next(self._steps)
        except Exception as error:
            problem, why = problem_of(error)
            if self._n_ranks > 1 or problem == "lost":
                raise
            return {LOSS: WORST_LOSS, PROBLEM: problem, WHY: why}


def problem_of(error: BaseException | None) -> tuple[str, str]:
    """Name of the `Work` method that records an error of a training or of its process, and the reason to record."""
    if isinstance(error, RayTaskError):
        error = error.cause or error
    match error:
        case RayActorError():
            return (
                ("refuse", f"a worker can't start: {last_line(error)}")
                if error.actor_init_failed
                else ("lost", last_line(error))
            )
        case WorkerLostError():
            return "lost", str(error)
        case TrainingFailedError():
            return "failed", str(error)
        case MuscaleError():
            return "refuse", str(error)
    if on_disk := of_storage(error):  # what others train would not be kept either
        return "refuse", on_disk
    return "failed", f"{type(error).__name__}: {error}"
