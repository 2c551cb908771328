"""A `map` that calls as Ray tasks, for work on text that takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from muscale.errors import StageError
from muscale.ray_connection import connected

if TYPE_CHECKING:
    from muscale.settings.tables import ResourceSettings

_AHEAD = 2  # tasks that are submitted per CPU


@contextmanager
def cluster_map(
    resources: ResourceSettings,
) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]]:
    """Yield a `map` that calls as Ray tasks and keeps the order; it connects to Ray at its first call with several items."""
    with ExitStack() as stack:

        def parallel_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            given = list(items)
            if len(given) < 2:
                return map(function, given)
            stack.enter_context(connected(resources))
            return _in_tasks(function, given)

        yield parallel_map


def _in_tasks(function: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
    import ray

    task = ray.remote(num_cpus=1)(_call)
    shared, left = ray.put(function), iter(items)
    n_cpus: float = ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    running = [task.remote(shared, item) for item in islice(left, _AHEAD * int(n_cpus))]
    while running:
        try:
            yield ray.get(running.pop(0))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise StageError(
                f"a task on text failed in Ray, which tries again when a worker dies: {error}; the same command continues from the "
                "finished files; if memory ran out, give each task more by a smaller resources.workers"
            ) from error
        running += [task.remote(shared, item) for item in islice(left, 1)]


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)
