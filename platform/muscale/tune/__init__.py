"""A study for a custom `ray.tune.Tuner`: any scheduler, searcher, stopper and callback, with results in the study's ledger.

from ray import tune
import muscale.tune

tuner = tune.Tuner(
    muscale.tune.trainable(study),
    param_space=muscale.tune.param_space(study),
    tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=16, scheduler=tune.schedulers.ASHAScheduler()),
)
grid = tuner.fit()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muscale.actors.corpus_hashes import require_unchanged
from muscale.errors import StageError
from muscale.fingerprint import package_fingerprint
from muscale.importers.tune_space import space_of
from muscale.interrupts import defer_sigint
from muscale.layout import CORPUS
from muscale.ray_connection import join, note_taken, require_room
from muscale.search.sweep import Sweep
from muscale.search.tune_methods import domain

if TYPE_CHECKING:
    from muscale.study import Study

__all__ = ["param_space", "space_of", "trainable"]


def trainable(study: Study) -> Any:
    """Return a class trainable for Tune; each iteration trains a configuration to the next rung of the study's sweep.

    It reports loss (by [sweep] rank_by), n_tokens, segment, diverged, and at the last rung the run's annealed_loss. Results in
    the ledger are returned without training. A trial that diverged reports 10 ln V from then on (1e9 if the metric is not nats per
    token), until it is stopped or copies another, and trains no further. A checkpoint names segments of the ledger: a trial
    restored from another trial's checkpoint with other values, as in PBT, is a new segment that continues from there. Each trial
    takes the resources of one worker of [resources]. Unless this process is connected to Ray, it joins the cluster at
    RAY_ADDRESS or starts one on this machine, and stays connected. If others hold
    the resources of a trial, the log says so, as Tune waits for them silently.

    Raises:
        StageError: If files of the corpus changed since they were written, Ray can't be started or joined, or no nodes could ever
            hold a trial.
    """
    with defer_sigint():
        import ray
        from ray import tune

        from muscale.tune.study_trainable import StudyTrainable

    sweep, resources = Sweep.of(study.config, study.ledger, study.corpus), study.config.resources
    require_unchanged(study.ledger.directory / CORPUS)
    if not ray.is_initialized():
        join(resources)
    require_room("tune", resources.ranks_per_trial, resources.worker)
    note_taken("tune", resources.ranks_per_trial, resources.worker)
    parameters = {  # they go to the object store: the ledger's password belongs into no file of Tune's
        "plan": sweep.plan,
        "settings": study.config.sweep,
        "ledger": study.ledger.for_worker(),
        "resources": resources,
        "package": package_fingerprint(),
    }
    return tune.with_resources(
        tune.with_parameters(StudyTrainable, **parameters),
        tune.PlacementGroupFactory([resources.worker] * resources.ranks_per_trial),
    )


def param_space(study: Study) -> dict[str, Any]:
    """The space of [sweep] as Tune's `param_space`; values that a condition makes inactive are ignored by the trainable.

    Raises:
        StageError: Naming a hyperparameter or constraint that Tune's spaces can't express.
    """
    space = study.config.sweep.space
    if space.constraints:
        raise StageError(
            f"sweep.space.constraints: Tune's spaces have none, got {', '.join(space.constraints)}; give the Tuner a "
            "param_space of your own, or use study.sweep()"
        )
    return {name: domain(f"sweep.space.{name}", distribution) for name, distribution in space.items()}
