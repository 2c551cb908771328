"""Ray tasks that together call one function on the ranks of a sharded model, each on reserved resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_LIMIT_SECONDS = 86_400.0  # of a collective; ranks wait while rank 0 reads the corpus alone (assumed)


@contextmanager
def reserved(each: Mapping[str, float], ranks: int) -> Iterator[PlacementGroup]:
    """Wait until the resources of all ranks are free, and keep them within the block."""
    group = placement_group([dict(each)] * ranks)
    try:
        ray.get(group.ready())
        yield group
    finally:
        remove_placement_group(group)


class RankTasks:
    """A call of a function on each rank; the result is rank 0's, and the first error of any rank ends all."""

    def __init__(
        self, function: Callable[..., Any], *args: Any, group: PlacementGroup, name: str, max_retries: int = 0
    ) -> None:
        """Start the tasks, one in each bundle of the group, with all its resources.

        Args:
            function: Called with `args` and `mesh`: the device mesh of all ranks, or None in a single task. Picklable.
            name: Name of the tasks in Ray.
            max_retries: How often a single task is started again if its worker is lost; ranks of a mesh can't be replaced.
        """
        ranks = group.bundle_count
        if ranks > 1:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)  # where the ranks meet
            # A process that has been a rank, perhaps of a broken group, serves no other task.
            call: Any = ray.remote(max_calls=1, max_retries=0)(_call_on_rank)
            given: list[tuple[Any, ...]] = [
                (address, self._store.port, rank, ranks, function, args) for rank in range(ranks)
            ]
        else:
            call = ray.remote(max_retries=max_retries)(_call_alone)
            given = [(function, args)]
        self._tasks = [
            call.options(
                name=name,
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(*values)
            for rank, (each, values) in enumerate(zip(group.bundle_specs, given, strict=True))
        ]
        self._running = list(self._tasks)

    def ended(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for a task, and return whether all have ended; after an error, end the others and raise it."""
        try:
            ended, self._running = ray.wait(self._running, timeout=timeout)
            ray.get(ended)
        except BaseException:  # also an interruption
            self.cancel()
            raise
        return not self._running

    def result(self) -> Any:
        """Wait for all tasks, and return rank 0's result; raise as `ended`."""
        while self._running and not self.ended():
            pass
        return ray.get(self._tasks[0])

    def cancel(self) -> None:
        """End the tasks that still run."""
        for task in self._running:
            ray.cancel(task, force=True)


def _call_alone(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args, mesh=None)


def _call_on_rank(
    address: str, port: int, rank: int, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from muscale.actors.ranks import join

    device = "cuda" if ray.get_gpu_ids() else "cpu"
    store = TCPStore(address, port, is_master=False)
    return function(*args, mesh=join(store, rank, ranks, device=device, seconds=_LIMIT_SECONDS))
