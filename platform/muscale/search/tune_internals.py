"""The one place that reaches into Ray Tune: it has no setting for how many idle processes of its trials it keeps.

Held for Ray 2.60 by `tests/muscale/search/test_tune_internals.py`. Where a later Ray has no such cache, idle processes end as Tune
sees fit: sweeps are slower, and their results the same.
"""

from __future__ import annotations

from typing import Any


def keep_idle(controller: Any, trial: Any, count: int) -> None:
    """Let Tune keep so many idle processes of trials like this one.

    Left to itself it ends all but one whenever a scheduler waits for running trials. The process that replaces one of short trials
    is overtaken by the next free process and ended as it starts, again and again: a sweep of 16 trials took 64 s instead of 41.

    Args:
        controller: Tune's, or the wrapper of it that schedulers are given.
        trial: Any trial; all ask for the same resources.
        count: Processes, in addition to what was asked for before.
    """
    cache = getattr(getattr(controller, "_tune_controller", controller), "_actor_cache", None)
    if cache is not None:
        cache.increase_max(trial.placement_group_factory, by=count)
