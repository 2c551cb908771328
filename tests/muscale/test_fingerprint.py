"""A process that runs another muscale is refused, and the driver says why."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from muscale import StageError, StudyDirectoryError
from muscale.actors import tune_run
from muscale.actors.jobs import Job, finish_stage
from muscale.errors import MuscaleError, PackageMismatchError
from muscale.fingerprint import package_fingerprint, require_same_package, write_wheel
from muscale.layout import CORPUS, LEDGER
from muscale.progress import Display
from muscale.settings.tables import ResourceSettings, StorageSettings
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from muscale.store.open_ledger import open_ledger
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from tests.muscale.conftest import write_text

OTHER = "0.0.1+000000000000"


def test_the_same_package_passes_and_another_is_refused_with_both_named() -> None:
    require_same_package(package_fingerprint())
    with pytest.raises(PackageMismatchError, match=f"runs muscale .*{package_fingerprint()[-12:]}.*driver runs 0.0.1"):
        require_same_package(OTHER)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_of_another_package_ends_the_stage_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_run, "package_fingerprint", lambda: OTHER)
    write_text(tmp_path / "text")
    corpus = write_corpus(tmp_path / CORPUS, str(tmp_path / "text"))
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    numerics = Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
    hyperparameters = Hyperparameters(learning_rate=0.01, batch_tokens=128)
    run = Chain(numerics=numerics, segments=chain(hyperparameters, 40 * 128))
    job = Job(purpose="ladder", label="", hyperparameters=hyperparameters, chain=run)
    with pytest.raises(StageError, match=f"runs muscale .*, the driver runs {OTHER.replace('+', '.')}: ship"):
        finish_stage("ladder", [job], Ledger(tmp_path / LEDGER), ResourceSettings(workers=1), Display(quiet=True))


def test_a_study_in_rays_own_copy_of_a_working_directory_is_refused(tmp_path: Path) -> None:
    copied = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    copied.mkdir(parents=True)
    with pytest.raises(StudyDirectoryError, match="by its absolute path"):
        open_ledger(StorageSettings(), copied, "s")
    assert list(copied.iterdir()) == []


def test_a_wheel_of_this_package_needs_nothing_else_and_fingerprints_its_sources(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "dist")
    assert wheel.name == f"muscale-{package_fingerprint()}-py3-none-any.whl"
    content = wheel.read_bytes()
    assert write_wheel(tmp_path / "dist").read_bytes() == content, "equal sources, equal file"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--target", str(tmp_path / "there")]
    subprocess.run([*install, str(wheel)], check=True)
    code = "from muscale import fingerprint; print(fingerprint.__file__, fingerprint.package_fingerprint())"
    output = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "there")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == [str(tmp_path / "there" / "muscale" / "fingerprint.py"), package_fingerprint()]
    assert (tmp_path / "there" / "muscale" / "quickstart.toml").exists()


def test_an_unwritable_place_for_a_wheel_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MuscaleError, match="file/dist: can't hold a wheel: Not a directory"):
        write_wheel(tmp_path / "file" / "dist")


def test_a_worker_on_another_machine_never_begins_a_ledger_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger.trials("s")
    pickled = pickle.dumps(ledger.storage)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    with pytest.raises(StudyDirectoryError, match='the worker runs on node-7.*set storage.ledger to "actor"'):
        pickle.loads(pickled)
