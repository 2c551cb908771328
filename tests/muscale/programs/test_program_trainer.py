"""A worker whose study's trainer is a program: segments, states and branches as of the built-in loop, by real processes."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from muscale.actors.worker import Worker
from muscale.errors import TrainerError, TrainingFailedError, WorkerLostError
from muscale.layout import CORPUS, CURVES, LEDGER, PROGRAM_RUNS, STALLS
from muscale.programs.job import job_of
from muscale.programs.program_family import Program, digest_of
from muscale.programs.program_trainer import read_files, write_files
from muscale.programs.protocol import Description
from muscale.proxies.ladder_curves import read_curves
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from proxy_models.architecture.member import Counts, ModuleConfig
from proxy_models.architecture.parametrization import ForwardMultipliers, Parametrization
from proxy_models.data.corpus_writing import write_own_data
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState

DOCS = Path(__file__).parents[3] / "docs"
BATCH = 64
FAILS_ONCE = """
import sys
from contextlib import closing
from pathlib import Path
if "--describe" not in sys.argv and not Path("failed").exists():
    import threading, os, time
    def end():
        rows = Path(sys.argv[4]) / "rows.jsonl"
        while not rows.exists() or rows.read_text().count("\\n") < 4:
            time.sleep(0.001)
        Path("failed").write_text(rows.read_text())
        os._exit(3)
    threading.Thread(target=end, daemon=True).start()
    import numpy
    savez = numpy.savez
    numpy.savez = lambda *a, **k: (savez(*a, **k), time.sleep(0.02))
"""


class Trained:
    """A study's folder with a program, and a worker for it."""

    def __init__(self, folder: Path, before: str = "", *, stops: bool = True) -> None:
        folder.mkdir()
        program = before + (DOCS / "own_metric.py").read_text()
        (folder / "train.py").write_text(
            program if stops else program.replace("            break\n", "            pass\n")
        )
        words = (sys.executable, "train.py", "--config", "{config}", "--state", "{state}")
        self.program = Program(command=shlex.join(words), digest=digest_of(words, folder))
        self.program.allow(folder)
        self.corpus = write_own_data(folder / CORPUS, "planted")
        self.folder, self.ledger = folder, Ledger(folder / LEDGER)
        self.worker = Worker(self.ledger, compiled=False)

    def chain(self, stable: int, n_tokens: int, *, width: int = 16, rate: float = 0.5) -> Chain:
        base, model = self.program.member(16, 1), self.program.member(width, 1)
        numerics = Numerics(model=model, base=base, corpus_key=self.corpus.key, seed=0, evaluation_tokens=1)
        recipe = Hyperparameters(learning_rate=rate, batch_tokens=BATCH).resolve(160 * BATCH)
        return Chain(numerics=numerics, segments=branch(recipe, stable * BATCH, n_tokens * BATCH))


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path / "study")


def test_branches_go_on_from_a_rung_and_end_where_one_piece_ends(trained: Trained) -> None:
    short, long = trained.chain(80, 96), trained.chain(136, 160)
    losses = [trained.worker.reach(chain).loss for chain in (short, long)]
    rows = trained.ledger.line(long.parent.line) if long.parent else []
    assert [(row["trained_from"], row["tokens"]) for row in rows] == [(80 * BATCH, 136 * BATCH), (0, 80 * BATCH)]
    again = Worker(trained.ledger, compiled=False)
    assert [again.reach(chain).loss for chain in (short, long)] == losses

    shutil.copytree(trained.folder, other := trained.folder.parent / "other")
    for part in (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm"):
        (other / part).unlink(missing_ok=True)
    shutil.rmtree(other / "states")
    trained.program.allow(other)
    assert Worker(Ledger(other / LEDGER), compiled=False).reach(long).loss == losses[1]

    assert not any((trained.folder / PROGRAM_RUNS).iterdir())
    curves = read_curves(trained.ledger, [long.key])
    assert curves[0].final_loss == losses[1]
    assert len(list((trained.folder / CURVES).iterdir())) == 4


def test_a_program_that_failed_goes_on_from_its_state_when_it_is_tried_again(trained: Trained, tmp_path: Path) -> None:
    expected = trained.worker.reach(trained.chain(136, 160)).loss
    failing = Trained(tmp_path / "failing", before=FAILS_ONCE)
    with pytest.raises(TrainingFailedError, match="exit code 3.*output.log"):
        failing.worker.reach(failing.chain(136, 160))
    (left,) = (failing.folder / PROGRAM_RUNS).iterdir()
    before = (left / "state" / "rows.jsonl").read_text()
    assert failing.worker.reach(failing.chain(136, 160)).loss == expected
    stem = failing.chain(136, 160).parent
    assert stem is not None
    (curve,) = read_curves(failing.ledger, [stem.key])
    assert len(curve.train_loss) >= before.count("\n") >= 4, "rows of the first attempt are in the curve"


def test_a_divergence_is_recorded_and_never_a_loss(trained: Trained) -> None:
    outcome = trained.worker.reach(trained.chain(80, 96, rate=100.0))
    assert outcome.diverged
    assert outcome.loss is None
    assert trained.ledger.outcome(trained.chain(136, 160, rate=100.0)) == outcome, "a longer run of it is not tried"


def test_a_program_that_goes_on_after_a_divergence_diverged_at_its_first_row_without_a_loss(
    trained: Trained, tmp_path: Path
) -> None:
    steps = []
    for case in (trained, Trained(tmp_path / "on", stops=False)):
        assert case.worker.reach(case.chain(80, 96, rate=100.0)).diverged
        with closing(sqlite3.connect(case.folder / LEDGER)) as database:
            ((step,),) = database.execute("SELECT diverged_at_step FROM segments").fetchall()
        steps.append(step)
    assert 0 < steps[0] == steps[1] < 20


def test_the_command_is_part_of_every_key(trained: Trained, tmp_path: Path) -> None:
    other = Trained(tmp_path / "other", before="# another file\n")
    assert other.chain(80, 96).key != trained.chain(80, 96).key
    assert Trained(tmp_path / "moved").chain(80, 96).key == trained.chain(80, 96).key


def test_a_job_has_the_schedule_of_the_loop(trained: Trained) -> None:
    chain = trained.chain(136, 160)
    job = job_of(chain.numerics, chain.segments)
    assert (job.start, job.end) == (0, 160 * BATCH)
    tokens, factors = zip(*job.schedule, strict=True)
    for segment in chain.segments:
        for at, _ in segment.steps():
            assert np.interp(at, tokens, factors) == pytest.approx(segment.rate_factor(at), abs=1e-6)
    assert factors[-1] == 0


def test_a_state_is_its_files_and_none_lies_outside(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "inner").mkdir(parents=True)
    contents = {"saved.bin": bytes(range(256)), "inner/empty": b""}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "rows.jsonl").write_text("{}\n")
    ones = ForwardMultipliers(embedding=1.0, branch=1.0, readout=1.0, attention=1.0)
    table = Parametrization(scheme="mup", optimizer="adamw", rules={}, multipliers=ones)
    TrainState(tokens=8, parametrization=table, tensors=read_files(folder)).save(tmp_path / "state.pt")
    write_files(loaded := TrainState.load(tmp_path / "state.pt"), tmp_path / "two")
    assert {name: (tmp_path / "two" / name).read_bytes() for name in loaded.tensors} == contents
    outside = TrainState(tokens=8, parametrization=table, tensors={"../out": torch.zeros(1, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="in its folder, got ../out"):
        write_files(outside, tmp_path / "three")
    assert not (tmp_path / "out").exists()


SLEEPS = "import sys, time\nif '--describe' not in sys.argv:\n    print('loading', flush=True)\n    time.sleep(60)\n"
NO_ROW = """import sys
from contextlib import closing
from pathlib import Path
if "--describe" not in sys.argv:
    (Path(sys.argv[4]) / "rows.jsonl").write_text("loss: 3\\n")
"""


@pytest.mark.parametrize(
    ("before", "seconds", "named"), [(SLEEPS, 1.0, "output.log"), (NO_ROW, 60.0, "rows.jsonl, line 1")]
)
def test_a_program_without_a_row_for_too_long_or_with_a_bad_one_fails_its_training_alone(
    tmp_path: Path, before: str, seconds: float, named: str
) -> None:
    trained = Trained(tmp_path / "study", before=before)
    worker = Worker(trained.ledger, compiled=False, stall_seconds=seconds)
    with pytest.raises(TrainingFailedError) as failed:
        worker.reach(trained.chain(80, 96))
    (left,) = (trained.folder / PROGRAM_RUNS).iterdir()
    assert str(left) in str(failed.value)
    assert named in str(failed.value)
    pid, created = json.loads((left / "process.json").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).create_time() != created
    assert not (trained.folder / STALLS).exists()


def test_a_program_that_a_signal_ended_may_be_tried_again(tmp_path: Path) -> None:
    killed = "import os, sys\nif '--describe' not in sys.argv:\n    os.kill(os.getpid(), 9)\n"
    trained = Trained(tmp_path / "study", before=killed)
    with pytest.raises(WorkerLostError):
        trained.worker.reach(trained.chain(80, 96))


@pytest.mark.parametrize(
    ("given", "unit"),
    [
        ({}, "nats per token"),
        ({"metric": "loss", "unit": "nats per token"}, "nats per token"),
        ({"metric": "squared error"}, "squared error"),
        ({"metric": "error", "unit": "m²"}, "m² of error"),
        ({"unit": "bits per token"}, "bits per token of loss"),
    ],
)
def test_a_description_names_the_unit_and_its_record_keeps_it(given: dict[str, str], unit: str) -> None:
    found = Description.parse(json.dumps({"n_params": 1000, "flops_per_token": 6000} | given))
    assert found.loss_unit == unit
    counts = Counts(n_params=1000, n_params_total=1000, train_flops_per_token=6e3, loss_unit=found.loss_unit)
    member = ModuleConfig(d_model=8, n_layers=1, family="a:B", source="", counts=counts)
    plain = member.to_dict()
    assert ("loss_unit" in plain["counts"]) == (unit != "nats per token"), "keys of known runs stay"
    assert ModuleConfig.from_dict(plain).loss_unit == unit


@pytest.mark.parametrize("given", [{"unit": 3}, {"metric": ""}])
def test_a_unit_that_is_no_text_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(TrainerError):
        Description.parse(json.dumps({"n_params": 1000, "flops_per_token": 6000} | given))
