"""Ray of our own: closed to others, and left within a time even where its head hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest


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
        timeout=100,
        check=False,
    )
    assert (done.returncode == 0) is is_let_in, done.stderr
    if not is_let_in:
        assert "authentication" in done.stderr.lower()


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
        ("own", 0, ["within", "left"], "its head and its node are killed"),
        ("joined", 2, ["within"], "run the same command again to resume"),
    ],
)
def test_a_head_that_hangs_on_disconnect_blocks_nobody(
    tmp_path: Path, cluster: str, code: int, printed: list[str], message: str
) -> None:
    env = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", LEAVES, cluster]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
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
