"""The connection to Ray: to a running cluster, or to a local one for as long as it is needed."""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from muscale.background import in_background
from muscale.errors import StageError, first_line
from muscale.formatting import counted
from muscale.interrupts import defer_sigint

if TYPE_CHECKING:
    from muscale.settings.tables import ResourceSettings

_log = logging.getLogger(__name__)
_LEAVING_SECONDS = 60.0  # Ray's own limit for waiting for a lost head
_RELEASE_SECONDS = 3.0  # until an ended worker counts as gone
# left of a path, Linux
_SOCKET_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1")
_SHORT_FOLDER = "/tmp"  # noqa: S108 -- where Ray itself puts its files if nothing names a folder
_STARTS = 3
_KILLED_SECONDS = 60.0  # further seconds after the head is killed: on a busy machine Ray was seen to take 35 s


@contextmanager
def connected(resources: ResourceSettings) -> Iterator[None]:
    """Keep Ray connected within the block, by `join` if needed; leave an existing connection open. Raise StageError if it fails."""
    with defer_sigint():
        import ray

    if ray.is_initialized():
        yield
        return
    own = join(resources)
    try:
        yield
    finally:
        _leave(own=own)


def join(resources: ResourceSettings) -> bool:
    """Join the cluster of RAY_ADDRESS, or start a local one and return True; raise StageError if Ray can't be started or joined."""
    local: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        n_ranks = resources.workers * resources.ranks_per_trial
        n_cpus = max(math.ceil(n_ranks * resources.cpus_per_worker), os.cpu_count() or 1)
        # Without "local", Ray would join any cluster on this machine and then refuse a number of CPUs.
        local = {"address": "local", "num_cpus": n_cpus, "include_dashboard": False}
        if folder := _shorter_folder():
            local["_temp_dir"] = folder
        _make_token()
    try:
        with _apart():
            if local:
                _start(local)
            else:
                connect()
    # Ray also raises plain exceptions: for a machine too busy to start it, a lost head, a wrong token.
    except Exception as error:
        what = "Ray can't be started on this machine"
        if where := os.environ.get("RAY_ADDRESS"):
            what = f"the cluster at {where} (RAY_ADDRESS) can't be joined"
        raise StageError(f"{what}: {first_line(error)}; run `muscale doctor` to find the cause") from error
    return bool(local)


def _start(options: Mapping[str, Any]) -> None:
    """Start a local Ray, up to `_STARTS` times: Ray waits 30 s for its node, and a busy machine may take longer."""
    for left in reversed(range(_STARTS)):
        before = set(psutil.Process().children(recursive=True))
        try:
            connect(**options)
            return
        except Exception as error:
            if not left:
                raise
            _log.warning("Ray did not start: %s; trying again", first_line(error))
        _kill_ray(besides=before)


def _shorter_folder() -> str | None:
    """Return another folder for Ray's files if the default is too long for its sockets; else None."""
    named = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    if named is None or sys.platform != "linux" or len(os.fsencode(folder := os.environ[named])) <= _SOCKET_BYTES:
        return None
    shorter = f"{_SHORT_FOLDER}/ray"
    _log.warning(
        "%s: must have at most %d bytes, or the paths of Ray's sockets get too long; got %s; Ray's files are in %s",
        *(named, _SOCKET_BYTES, folder, shorter),
    )
    return shorter


@contextmanager
def _apart() -> Iterator[None]:
    """Start Ray's head and node in separate process groups, so that a signal to this process's group leaves them running.

    `timeout` and shells signal the group. Without head and node no rung could finish, and no worker of a full run could save.
    Ray has no setting for this, so Ray's class for starting processes is replaced; a Ray without that class shares the group. (A
    local cluster by `ray start --block` needs no such class, but a second process of 160 MB and 3.5 s of processor time.) On
    Linux the kernel ends Ray's processes with this one. Elsewhere Ray ends them by group, so they have to share it.
    """
    from ray._private import services

    popen = getattr(services, "ConsolePopen", None)
    apart = partial(popen, process_group=0) if popen and sys.platform == "linux" else popen
    with _replaced(services, "ConsolePopen", apart):
        yield


def _make_token() -> None:
    """Create Ray's token if there is none, readable by its owner only; Ray's own would be readable by all users of the machine."""
    named = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or any(os.environ.get(name) for name in named):
        return
    path = Path.home() / ".ray" / "auth_token"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # a token exists, or Ray reports what is wrong with its path
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch(0o600)
        unfinished.write_text(secrets.token_hex(32))
        try:
            os.link(unfinished, path)
        finally:
            unfinished.unlink()


def _leave(*, own: bool) -> None:
    """Disconnect, or stop a local cluster, within `_LEAVING_SECONDS` and `_KILLED_SECONDS`."""
    import ray

    with in_background(partial(_hurry, own), "leaving Ray"):
        ray.shutdown()


def _hurry(own: bool, left: threading.Event) -> None:
    """Stop a disconnection that takes too long: Ray's last calls to its head have no time limit.

    Ray's own limit covers only the time before these calls. Without this function a head that hangs or dies during a call would
    block the process.
    """
    if left.wait(_LEAVING_SECONDS):
        return
    if own:  # the calls fail once the head is dead rather than silent
        _log.warning("Ray has not stopped after %.0f s; killing its head and its node", _LEAVING_SECONDS)
        _kill_ray()
        if left.wait(_KILLED_SECONDS):
            return
    _log.error("Ray's head does not answer; finished work is recorded, run the same command again to resume")
    sys.stdout.flush()
    os._exit(2)  # like Ray, which ends a process whose head is gone


def _kill_ray(besides: Set[psutil.Process] = frozenset()) -> None:
    """Kill head and node of a Ray that this process started; Ray's other processes end with them."""
    for process in set(psutil.Process().children(recursive=True)) - besides:
        with suppress(psutil.NoSuchProcess):
            if process.name() in ("gcs_server", "raylet"):
                process.kill()


def connect(**options: Any) -> None:
    """Start Ray or join a cluster, without Ray's log lines.

    An interruption takes effect afterwards: while Ray starts processes, Python may run a signal's handler in a hook of a fork, which
    swallows exceptions. Ray's own handler of SIGTERM, which exits with 15 at any point, is not set. (Ray sets none in another thread,
    but the kernel would end a local cluster with that thread.)
    """
    with defer_sigint():
        import ray
        from ray._private import utils

        logging.getLogger("ray").setLevel(logging.ERROR)
        with _replaced(utils, "set_sigterm_handler", lambda _handler: None):
            ray.init(logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **options)


@contextmanager
def in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block: Ray reads its settings from them, and a notebook's own Tuner would, too."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one of Ray's private modules within the block; a Ray that lacks it stays as it is."""
    before = getattr(module, name, None)
    if before is not None:
        setattr(module, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(module, name, before)


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's description of the nodes in the connected cluster."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def require_room(stage: str, workers: int, each: Mapping[str, float]) -> None:
    """Refuse a stage whose workers do not fit into the cluster, by the total resources of its nodes.

    If an autoscaler may add nodes, the stage waits for them, and the log says so.

    Raises:
        StageError: If they do not fit; the message names the required and the available resources.
    """
    nodes = [node["Resources"] for node in alive_nodes()]
    if room_for(nodes, each) >= workers:
        return
    kinds = Counter(format_resources({name: node.get(name, 0.0) for name in each}) for node in nodes)
    there = ", ".join(f"{counted(count, 'node')} with {kind}" for kind, count in kinds.items()) or "no node"
    wanted = f"{workers} workers with" if workers > 1 else "a worker with"
    found = f"{stage}: no room for {wanted} {format_resources(each)}{' each' * (workers > 1)}: the cluster has {there}"
    if not may_grow():
        raise StageError(f"{found}; request less in [resources], or start nodes that have it and run the command again")
    _log.warning("%s; waiting for its autoscaler to add nodes, Ctrl-C stops", found)


def note_taken(stage: str, workers: int, each: Mapping[str, float]) -> None:
    """Log that a stage waits because others hold the resources that its workers need, with the total and the free amounts."""
    with defer_sigint():
        import ray

    cluster: Any = ray  # two of its functions are untyped
    wanted = {name: workers * amount for name, amount in each.items() if amount}
    until = time.monotonic() + _RELEASE_SECONDS
    while any((free := cluster.available_resources()).get(name, 0.0) < amount for name, amount in wanted.items()):
        if time.monotonic() > until:
            there = cluster.cluster_resources()
            has, left = ({name: amounts.get(name, 0.0) for name in wanted} for amounts in (there, free))
            _log.warning(
                "%s: waiting for %s: the cluster has %s, of which %s are free; Ctrl-C stops",
                *(stage, *map(format_resources, (wanted, has, left))),
            )
            return
        time.sleep(0.1)


def may_grow() -> bool:
    """Whether an autoscaler may add nodes: on clusters of Ray's launcher, by whose file Ray Tune knows them, and KubeRay's."""
    launched = Path("~/ray_bootstrap_config.yaml").expanduser().exists()
    return launched or "RAY_USAGE_STATS_KUBERAY_IN_USE" in os.environ


def format_resources(amounts: Mapping[str, float]) -> str:
    """Format amounts of Ray's resources: 2 CPU and 0.5 GPU."""
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def room_for(nodes: Iterable[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """Return the number of workers that fit into the nodes' total resources, counted like Ray Train.

    Args:
        each: Resources of a worker; at least one is above 0.
    """
    needed = {name: amount for name, amount in each.items() if amount}
    # 1.0 // 0.2 is 4 in floats; Ray itself counts in ten-thousandths.
    return sum(int(min(node.get(name, 0.0) / amount for name, amount in needed.items()) + 1e-9) for node in nodes)
