"""Ray: a cluster that is joined, or one of our own for as long as it is needed."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from muscale.errors import StageError, first_line
from muscale.interrupts import interrupted_later
from muscale.settings.config import ResourceSettings

_staying: ContextVar[ExitStack | None] = ContextVar("staying", default=None)


def staying() -> ExitStack | None:
    """What is done when the cluster goes, within `staying_cluster`; None where each stage has a cluster of its own."""
    return _staying.get()


@contextmanager
def cluster(resources: ResourceSettings) -> Iterator[None]:
    """Ray: the cluster this process is connected to or that RAY_ADDRESS names, else one of our own on this machine.

    Raises:
        StageError: If Ray can't be started, or the cluster not be joined.
    """
    with interrupted_later():
        import ray

    if ray.is_initialized():
        yield
        return
    local: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        n_cpus = max(math.ceil(resources.workers * resources.cpus_per_worker), os.cpu_count() or 1)
        # Without "local", Ray would join any cluster of this machine, and then refuse a number of CPUs.
        local = {"address": "local", "num_cpus": n_cpus, "include_dashboard": False}
    try:
        connect(**local)
    except (
        Exception
    ) as error:  # Ray raises bare ones, too: a machine too busy to start it, a head that is gone, a wrong token
        what = "Ray can't be started on this machine"
        if where := os.environ.get("RAY_ADDRESS"):
            what = f"the cluster at {where} (RAY_ADDRESS) can't be joined"
        raise StageError(f"{what}: {first_line(error)}; `muscale doctor` looks why") from error
    if stays := _staying.get():
        stays.callback(ray.shutdown)
        yield
        return
    try:
        yield
    finally:
        ray.shutdown()


def connect(**options: Any) -> None:
    """Start Ray, or join a cluster, without its log lines."""
    with interrupted_later():
        import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    on_term = signal.getsignal(signal.SIGTERM)
    ray.init(logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **options)
    if callable(on_term) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_term)  # Ray's own exits with 15 in the middle of anything


@contextmanager
def staying_cluster() -> Iterator[None]:
    """Within it, cluster and workers of one stage serve the later ones too; without a stage that trains, none starts."""
    if _staying.get():
        yield
        return
    with ExitStack() as stays:
        token = _staying.set(stays)
        try:
            yield
        finally:
            _staying.reset(token)
