"""The ledger behind one named actor: found by all, made again when it dies, never begun anew in silence."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyDirectoryError
from muscale.errors import LeaseLostError
from muscale.layout import CORPUS, LEDGER_PLACE
from muscale.settings.tables import StorageSettings
from muscale.store import lease as leases
from muscale.store.ledger import Ledger
from muscale.store.ledger_actor import ActorStorage
from muscale.store.ledger_tables import ResultKind, rungs
from muscale.store.lineage import Chain
from muscale.store.open_ledger import open_ledger
from muscale.store.statements import check_token
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
MakeStudy = Callable[..., Path]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Ledger]:
    folder = tmp_path_factory.mktemp("actor")
    (folder / "study").mkdir()
    settings = StorageSettings(ledger="actor", path=str(folder / "local" / "s.sqlite"))
    ledger = open_ledger(settings, folder / "study", "s")
    yield ledger
    import ray

    assert isinstance(ledger.storage, ActorStorage)
    ray.kill(ledger.storage.actor())
    ledger.close()


def test_every_process_reaches_the_one_actor_on_the_files_node(ledger: Ledger) -> None:
    import ray

    assert isinstance(ledger.storage, ActorStorage)
    ledger.record_result(ResultKind.CHECK, "driver", {})

    @ray.remote
    def elsewhere(own: Ledger) -> Any:
        own.record_result(ResultKind.CHECK, "worker", {})
        return own.storage.actor()._actor_id  # type: ignore[attr-defined]

    assert ray.get(elsewhere.remote(ledger)) == ledger.storage.actor()._actor_id
    assert ledger.result(ResultKind.CHECK, "worker") == {}
    node = ray.get(ledger.storage.actor().__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    assert node == ray.get_runtime_context().get_node_id()
    assert Ledger(ledger.storage.path).result(ResultKind.CHECK, "driver") == {}, "acknowledged is written"


def test_writers_outlast_the_end_of_the_actor(ledger: Ledger) -> None:
    import ray

    assert isinstance(ledger.storage, ActorStorage)

    def write(trial: int) -> None:
        for rung in range(20):
            ledger.insert(rungs, sweep="s", trial=trial, rung=rung, tokens=1, segment="", loss=1.0, seconds=1.0)

    for ended, no_restart in enumerate((False, True)):  # its process; the actor itself
        ledger.trials("s")
        writers = [threading.Thread(target=write, args=(4 * ended + n,)) for n in range(4)]
        for writer in writers:
            writer.start()
        ray.kill(ledger.storage.actor(), no_restart=no_restart)
        for writer in writers:
            writer.join(60)
        assert [row["sequence"] for row in ledger.rungs("s")] == list(range(1, 80 * (ended + 1) + 1))


def test_an_error_inside_the_actor_arrives_as_it_is(ledger: Ledger) -> None:
    ledger.claim({"model.d_model": 64}, {})
    ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    with pytest.raises(StudyDirectoryError, match="model.d_model is 32 here but 64 there"):
        ledger.claim({"model.d_model": 32}, {})
    with leases.lease(ledger, "line") as token, pytest.raises(LeaseLostError, match="held with token 0"):
        ledger.write(check_token, "line", token - 1)


def test_a_moved_or_missing_ledger_is_reported(ledger: Ledger, tmp_path: Path) -> None:
    actor = StorageSettings(ledger="actor")
    with pytest.raises(StudyDirectoryError, match="s.sqlite of .*, got storage.path = '/elsewhere'"):
        open_ledger(StorageSettings(ledger="actor", path="/elsewhere"), ledger.directory, "s")
    lost = tmp_path / "lost"
    lost.mkdir()
    place = {"ledger": "actor", "host": socket.gethostname(), "path": str(lost / "gone.sqlite")}
    (lost / LEDGER_PLACE).write_text(json.dumps(place))
    with pytest.raises(StudyDirectoryError, match=r"gone.sqlite: the study's ledger is gone"):
        open_ledger(actor, lost, "s").trials("s")
    (lost / LEDGER_PLACE).write_text(json.dumps({**place, "host": "node-7"}))
    with pytest.raises(StudyDirectoryError, match=f"node-7.*{socket.gethostname()}"):
        open_ledger(actor, lost, "s").trials("s")
    (lost / LEDGER_PLACE).write_text("{}")
    with pytest.raises(StudyDirectoryError, match=LEDGER_PLACE):
        open_ledger(actor, lost, "s")


_READS_WHILE_RAY_IS_IMPORTED = """
import sys, threading
from pathlib import Path
from muscale.settings.tables import StorageSettings
from muscale.store.open_ledger import open_ledger

folder = Path(sys.argv[1])
ledger = open_ledger(StorageSettings(ledger="actor", path=str(folder / "s.sqlite")), folder, "s")
imported, ended = threading.Event(), []

def read():
    while not imported.is_set():
        ledger.trials("s")
    ended.append(ledger.trials("s"))

reader = threading.Thread(target=read)
reader.start()
import ray
imported.set()
reader.join(60)
assert ended == [[]], ended
"""


def test_a_heartbeat_outlasts_the_import_of_ray_in_another_thread(tmp_path: Path) -> None:
    program = [sys.executable, "-c", _READS_WHILE_RAY_IS_IMPORTED, str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.soak
@pytest.mark.usefixtures("postgres", "ray_cluster")
def test_two_workers_that_reach_the_same_chain_train_it_once(make_study: MakeStudy) -> None:
    import ray

    from muscale.actors.worker import Worker

    class Listener:
        def reach(self, ledger: Ledger, chain: Chain) -> tuple[Any, list[int]]:
            reports: list[int] = []  # at each segment's end, and on the way
            return Worker(ledger, compiled=False).reach(chain, lambda tokens, _loss: reports.append(tokens)), reports

    kinds: tuple[Any, ...] = ("actor", "postgresql")
    remote: Any = ray.remote(num_cpus=1)(Listener)
    workers = [remote.remote() for _ in range(2)]
    ray.get([worker.__ray_ready__.remote() for worker in workers])
    for kind in kinds:
        directory = make_study(kind).parent
        corpus = write_corpus(directory / CORPUS, str(directory / "text"))
        ledger = open_ledger(StorageSettings(ledger=kind), directory, "s")
        model = ModelConfig(d_model=16, n_layers=1, context_length=32)
        numerics = Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
        recipe = Hyperparameters(learning_rate=0.01, batch_tokens=128).resolve(40 * 128)
        chain = Chain(numerics=numerics, segments=branch(recipe, 30 * 128, 40 * 128))
        (first, reports), (second, others) = ray.get(
            [worker.reach.remote(ledger.for_worker(), chain) for worker in workers]
        )
        assert first == second == ledger.outcome(chain)
        assert sorted(reports + others) == [30 * 128, 40 * 128]
        if isinstance(ledger.storage, ActorStorage):
            ray.kill(ledger.storage.actor())
        ledger.close()
    for worker in workers:
        ray.kill(worker)
