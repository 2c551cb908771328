"""A Ray cluster as a user starts one, token and all: a head and further nodes, each a process group that ends by its id."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_SECONDS = 600.0  # for anything that is waited for, on a loaded machine


class RayNodes:
    """A head and as many nodes as are added, with a CPU each.

    On one machine the nodes share Ray's folder of shipped packages, and would install a wheel over each other: it is shipped
    while the head is alone, and to several nodes the package comes from PYTHONPATH, as if it were installed on each.

    Args:
        first: A folder that comes before all others in PYTHONPATH.
    """

    def __init__(self, *first: Path) -> None:
        self._path = (*first, _ROOT, _ROOT / "platform")
        self.folder = Path(tempfile.mkdtemp(prefix="muscale-ray-"))  # short: sockets lie below it
        self._token = self.folder / "token"
        self._token.write_text("5ecret" * 8)
        self._token.chmod(0o600)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port, dashboard = free_port(), free_port()
        self._host = f"127.0.0.1:{dashboard}"
        try:
            self._start(
                *("--head", "--port", self._port, "--dashboard-host=127.0.0.1", "--dashboard-port", dashboard),
                *("--temp-dir", self.folder / "ray", "--num-cpus=1", "--ray-client-server-port", free_port()),
            )
            wait(self._answers, "the job server to answer")
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What the cluster's nodes and its users have set."""
        unset = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "MUSCALE_LEDGER_URL"}
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        return {
            **kept,
            # As an activated environment has it: a job's `python` is the one that runs here.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join(map(str, self._path)),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_API_SERVER_ADDRESS": f"http://{self._host}",
        }

    def add_node(self) -> subprocess.Popen[bytes]:
        """Start a node of one CPU; the process that started it leads its group."""
        # On one machine each node needs ports of its own, which it picks where it is given 0.
        ports = ("--min-worker-port=0", "--max-worker-port=0")
        return self._start("--address", f"127.0.0.1:{self._port}", "--num-cpus=1", *ports)

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End a node as a machine ends that loses its power."""
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def job(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """`ray job …`, as a user calls it."""
        command = [*RAY, "job", *map(str, arguments)]
        return subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )

    def request(self, path: str, *, method: str = "GET", token: str | None = None) -> Any:
        """One call of the job API, with the cluster's token, another, or ("") none."""
        token = self._token.read_text() if token is None else token
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"http://{self._host}{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def has_ended(self, job: str) -> bool:
        """Whether a job runs no more, however it ended."""
        return self.request(f"/api/jobs/{job}")["status"] in ("SUCCEEDED", "FAILED", "STOPPED")

    def logs(self, job: str) -> str:
        """What a job has printed so far; `ray job logs` would take seconds to start."""
        return str(self.request(f"/api/jobs/{job}/logs")["logs"])

    def ends(self, job: str, seconds: float = _SECONDS) -> dict[str, Any]:
        """Wait for a job's end; returns the job API's details."""
        wait(lambda: self.has_ended(job), f"job {job} to end", seconds)
        return dict(self.request(f"/api/jobs/{job}"))

    def reaches(self, job: str, happened: Callable[[], bool], what: str) -> None:
        """Wait for something that a running job does; a job that ended without it shows its log."""
        wait(lambda: happened() or self.has_ended(job), what)
        assert happened(), f"job {job} ended before {what}: {self.logs(job)}"

    def close(self) -> None:
        """End every node, the head last; gently, each would first drain for half a minute."""
        for process in reversed(self._processes):
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a node in a process group of its own."""
        own = ("--block", "--disable-usage-stats", "--object-store-memory=200000000")
        command = [*RAY, "start", *own, "--dashboard-agent-listen-port", str(free_port()), *map(str, arguments)]
        with (self.folder / f"node-{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)
        # One after another: nodes that start at the same moment on one machine take the same names for their sockets.
        up = log.name
        wait(lambda: b"Ray runtime started" in Path(up).read_bytes() or process.poll() is not None, "a node to start")
        assert process.poll() is None, Path(up).read_text()
        return process

    def _answers(self) -> bool:
        try:
            return isinstance(self.request("/api/jobs/"), list)
        except OSError:
            return False


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait(happened: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)
