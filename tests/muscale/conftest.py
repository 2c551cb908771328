"""A micro-study: every stage for real, in seconds."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from muscale.search.sweep import Sweep
    from muscale.store.ledger import Ledger

MICRO = """
name = "micro"

[corpus]
source = "text"
evaluation_tokens = 2048

[model]
d_model = 32
n_layers = 1
context_length = 32

[hyperparameters]
learning_rate = 0.008
batch_tokens = 256

[check]
widths = [16, 32, 64, 128]

[sweep]
trials = 4
n_tokens = 16384
searcher = "random"
scheduler = "none"
rungs = 2

[sweep.space]
learning_rate = { distribution = "log_uniform", low = 0.004, high = 0.03 }
init_scale = { distribution = "log_uniform", low = 0.5, high = 2.0 }

[resources]
workers = 1  # a training process takes longer to start than these trainings

[transfer]
widths = [16, 32, 64]
n_tokens = 16384
rates = 5
horizons = [0.5, 1.0]

[ladder]
stems = [
    { width = 16, n_tokens = 16384 },
    { width = 32, n_tokens = 16384 },
    { width = 48, n_tokens = 16384 },
    { width = 64, n_tokens = 32768 },
    { width = 80, n_tokens = 32768 },
]

[fit]
max_regret = 0.05

[plan]
compute_flops = 2.5e10

[promote]
checkpoint_every_tokens = 20480
evaluate_every_tokens = 102400
"""


SEVEN_RATES = MICRO.replace("rates = 5\n", "rates = 7\n")
"""With them the drift has an error, and the gate opens."""


def write_text(folder: Path, *, documents: int = 40, words: int = 600) -> None:
    """Text with something to learn: words from a small vocabulary, some far likelier than others."""
    generator = random.Random(0)
    vocabulary = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 7))) for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    folder.mkdir(parents=True)
    for number in range(documents):
        chosen = generator.choices(vocabulary, weights, k=words)
        (folder / f"{number:03}.txt").write_text(" ".join(chosen))


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a micro-study into a folder of its own and returns its study file."""

    def make(name: str = "study") -> Path:
        directory = tmp_path / name
        write_text(directory / "text")
        path = directory / "study.toml"
        path.write_text(MICRO)
        return path

    return make


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger in the test's own folder."""
    from muscale.store.ledger import Ledger

    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def swept(make_study: Callable[[], Path]) -> Iterator[Sweep]:
    """A sweep in its study's ledger, before its first trial."""
    from muscale.store.ledger import Ledger
    from tests.muscale.planted_sweep import open_sweep

    path = make_study()
    ledger = Ledger(path.parent / "ledger.sqlite")
    yield open_sweep(path, ledger)
    ledger.close()


class PostgresServer:
    """A PostgreSQL server of the tests' own on the loopback device, with a password to be kept secret."""

    password = "pa55-word"

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._data = binaries, folder / "data"
        # Root may not run a server; Debian's package brings the user for it.
        self._as: dict[str, Any] = (
            {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        )
        if self._as:
            shutil.chown(folder, "postgres", "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        secret = folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        self._call("initdb", "-U", "muscale", f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://muscale:{self.password}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """Of the process that started all others of the server."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._call("pg_ctl", "-w", "-o", options, "-l", str(self._data / "log"), "start")

    def stop(self) -> None:
        self._call("pg_ctl", "-w", "-m", "immediate", "stop")

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), "-D", str(self._data), *arguments]
        done = subprocess.run(
            command, cwd="/", text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **self._as
        )
        assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for all tests that need one; skipped without PostgreSQL, and failed where CI=true."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    binaries = next((folder for folder in candidates if (folder / "initdb").exists()), None)
    if binaries is None:
        reason = "needs a PostgreSQL server: Debian's package postgresql (`make ci-system`)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="muscale-postgres-") as folder:
        server = PostgresServer(binaries, Path(folder))
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgres(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """The server, named by the environment as a user would."""
    monkeypatch.setenv("MUSCALE_LEDGER_URL", postgres_server.url)
    return postgres_server
