"""What is reached of Ray Tune's inside is there, in the version that the lock names."""

from __future__ import annotations

from types import SimpleNamespace

import ray
from ray import tune
from ray.tune.execution.tune_controller import TuneController
from ray.tune.utils.object_cache import _ObjectCache

from muscale.search.tune_internals import keep_idle


def test_tune_keeps_the_configured_number_of_idle_processes() -> None:
    assert ray.__version__.startswith("2.60."), "another Ray: see whether Tune still has this cache"
    assert "_actor_cache" in TuneController.__init__.__code__.co_names
    cache: _ObjectCache = _ObjectCache(may_keep_one=True)
    trial = SimpleNamespace(placement_group_factory=tune.PlacementGroupFactory([{"CPU": 1}]))
    keep_idle(SimpleNamespace(_tune_controller=SimpleNamespace(_actor_cache=cache)), trial, 2)
    kept = [cache.cache_object(trial.placement_group_factory, process) for process in ("a", "b", "c")]
    assert kept == [True, True, False]
    assert list(cache.flush_cached_objects()) == []


def test_a_tune_without_that_cache_is_left_alone() -> None:
    keep_idle(SimpleNamespace(), None, 2)
