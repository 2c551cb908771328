"""Ray of our own: closed to others, and left within a time even where its head hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from muscale import ray_connection
from muscale.errors import StageError
from muscale.ray_connection import note_taken, require_room
from muscale.settings.tables import ResourceSettings


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("variables", "is_let_in"),
    [({}, True), ({"RAY_AUTH_TOKEN": "wrong" * 8}, False), ({"RAY_AUTH_MODE": "disabled"}, False)],
)
def test_a_ray_of_our_own_lets_nobody_in_without_its_token(variables: dict[str, str], is_let_in: bool) -> None:
    import ray

    assert os.environ["RAY_AUTH_MODE"] == "token", "Ray sets it for its own processes where nobody did"
    address = ray.get_runtime_context().gcs_address
    code = f"import ray; print(ray._raylet.GcsClient({address!r}).get_all_node_info())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode == 0) is is_let_in, done.stderr
    if not is_let_in:
        assert "authentication" in done.stderr.lower()


IMPOSSIBLE = [
    (ResourceSettings(gpus_per_worker=1), r"1 CPU and 1 GPU: the cluster has 1 node with \d+ CPU and 0 GPU;"),
    (ResourceSettings(cpus_per_worker=999), r"999 CPU: the cluster has 1 node with \d+ CPU;"),
]


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("resources", "message"), IMPOSSIBLE)
def test_devices_that_no_node_has_are_refused_before_a_worker_is_awaited(
    resources: ResourceSettings, message: str
) -> None:
    with pytest.raises(StageError, match=f"^resources: no room for a worker with {message}"):
        require_room("resources", 1, resources.worker)
    with pytest.raises(StageError, match="^promote: no room for 4 workers with "):
        require_room("promote", 4, resources.full_run_worker)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("sign", ["RAY_USAGE_STATS_KUBERAY_IN_USE", "ray_bootstrap_config.yaml"])
def test_devices_that_an_autoscaler_may_bring_are_awaited_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sign: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if sign.isupper():
        monkeypatch.setenv(sign, "1")
    else:
        (tmp_path / sign).touch()
    require_room("resources", 1, ResourceSettings(gpus_per_worker=1).worker)
    assert "waiting for its autoscaler" in caplog.text


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_stage_says_that_it_waits_for_what_others_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    there = ray.cluster_resources()["CPU"]  # type: ignore[no-untyped-call]
    monkeypatch.setattr(ray_connection, "_RELEASE_SECONDS", 0.5)
    held = placement_group([{"CPU": there - 0.5}])
    try:
        assert held.wait(60)
        note_taken("resources", 1, {"CPU": 0.5, "GPU": 0.0})
        assert caplog.text == ""
        note_taken("promote", 2, {"CPU": 0.5, "GPU": 0.0})
    finally:
        remove_placement_group(held)
    assert f"promote: waiting for 1 CPU: the cluster has {there:g} CPU, of which 0.5 CPU are free" in caplog.text


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, None),
        ({"TMPDIR": "/scratch/job"}, None),
        ({"TMPDIR": "/" + 90 * "x"}, "/tmp/ray"),
        ({"TMPDIR": "/" + 18 * "ü"}, None),
        ({"TMPDIR": "/" + 19 * "ü"}, "/tmp/ray"),
        ({"TMPDIR": "/" + 90 * "x", "RAY_TMPDIR": "/scratch/job"}, None),
        ({"TMPDIR": "/scratch/job", "RAY_TMPDIR": "/" + 90 * "x"}, "/tmp/ray"),
    ],
)
def test_a_folder_too_long_for_sockets_is_replaced(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str | None
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ray_connection._shorter_folder() == folder


STARTS = """
import ray
from muscale.ray_connection import connected
from muscale.settings.tables import ResourceSettings

with connected(ResourceSettings(workers=1)):
    print(ray.get(ray.remote(lambda: 7).remote()))
"""


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.parametrize("length", [ray_connection._SOCKET_BYTES, ray_connection._SOCKET_BYTES + 1, 120])
def test_ray_starts_whatever_the_length_of_tmpdir(tmp_path: Path, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        folder = Path(short) / ((length - len(short) - 1) * "x")
        folder.mkdir()
        env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
        done = subprocess.run(
            [sys.executable, "-c", STARTS],
            env={**env, "TMPDIR": str(folder), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
        assert (folder / "ray").exists() is (length <= ray_connection._SOCKET_BYTES)


HANGS_ONCE = """
import threading, time, psutil

def suspend_the_first_node():
    while not (found := [one for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]):
        time.sleep(0.01)
    found[0].suspend()

threading.Thread(target=suspend_the_first_node, daemon=True).start()
"""


@pytest.mark.soak
@pytest.mark.cluster
def test_a_node_that_is_slow_to_start_is_started_again(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", HANGS_ONCE + STARTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


TERMINATED = """
import os, signal, threading, time, psutil
from muscale.ray_connection import connected
from muscale.settings.tables import ResourceSettings

def terminate_while_ray_starts():
    while not any(one.name() == "gcs_server" for one in psutil.Process().children(recursive=True)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, signal.default_int_handler)
threading.Thread(target=terminate_while_ray_starts, daemon=True).start()
try:
    with connected(ResourceSettings(workers=1)):
        print("within")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.soak
@pytest.mark.cluster
def test_sigterm_while_ray_starts_interrupts_and_does_not_exit(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", TERMINATED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


LEAVES = """
import logging, sys, psutil
from muscale import ray_connection
from muscale.settings.tables import ResourceSettings

logging.basicConfig()
ray_connection._LEAVING_SECONDS, own = 4.0, sys.argv[1] == "own"
leave, ray_connection._leave = ray_connection._leave, lambda **_: leave(own=own)
with ray_connection.connected(ResourceSettings(workers=1)):
    print("within", *(one.pid for one in psutil.Process().children(recursive=True)))
    (head,) = [one for one in psutil.Process().children(recursive=True) if one.name() == "gcs_server"]
    head.suspend()
print("left")
"""


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("cluster", "code", "printed", "message"),
    [
        ("own", 0, ["within", "left"], "killing its head and its node"),
        ("joined", 2, ["within"], "run the same command again to resume"),
    ],
)
def test_a_head_that_hangs_on_disconnect_blocks_nobody(
    tmp_path: Path, cluster: str, code: int, printed: list[str], message: str
) -> None:
    env = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", LEAVES, cluster]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    started = [int(pid) for line in done.stdout.splitlines() for pid in line.split()[1:]]
    for pid in started:
        with suppress(ProcessLookupError):  # of a cluster that is not its own, whose head hangs
            os.kill(pid, signal.SIGKILL)
    assert done.returncode == code, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == printed
    assert message in done.stderr
    token = tmp_path / ".ray" / "auth_token"  # of the first Ray that this home has seen
    assert (len(token.read_text()), token.stat().st_mode & 0o777) == (64, 0o600)
    assert list(token.parent.iterdir()) == [token]
