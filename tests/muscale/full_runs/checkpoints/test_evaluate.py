"""A checkpoint alone has the loss that its run measured there, and nothing of it is run as a program."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from muscale import CheckpointEvaluation, StageError
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint, subject_at
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, MANIFEST, write_manifest
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.run_records import RunRecords
from muscale.full_runs.train.attempt import train
from muscale.layout import EVALUATIONS, METRICS, RUN
from proxy_models.architecture.config import as_decoder
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import Mixture
from proxy_models.evaluation.samples import Samples
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from tests.muscale.forked_ranks import BATCH, LETTERS, STEPS, rows, small_mixture, small_run
from tests.muscale.gloo_ranks import GlooRanks
from tests.muscale.test_unpickling import Planted


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small_mixture(tmp_path_factory.mktemp("mixed"), Mixture.constant({"near": 0.6, "far": 0.4}))


def of_mixture(mixed: Corpus, directory: Path) -> FullRun:
    """Evaluated where it is saved, after every four steps; multipliers and depth make the forward pass more than its weights."""
    run = small_run(
        mixed,
        directory,
        segments=chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, output_multiplier=2.0), BATCH * STEPS),
        checkpoint_every_tokens=BATCH * 4,
        evaluate_every_tokens=BATCH * 4,
        keep_last=9,
        min_unit_params=0,
    )
    model, base = (replace(as_decoder(shape), tied=True) for shape in (run.numerics.model, run.numerics.base))
    return replace(run, numerics=replace(run.numerics, model=model, base=base))


@pytest.fixture(scope="module")
def trained(mixed: Corpus, tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    run = of_mixture(mixed, tmp_path_factory.mktemp("run") / "run")
    train(run)
    return run


@pytest.fixture
def copied(trained: FullRun, tmp_path: Path) -> Path:
    """The run's directory, to be damaged; its corpus is found from the original's place."""
    directory = tmp_path / "run"
    shutil.copytree(trained.directory, directory)
    described = json.loads((directory / RUN).read_text())
    (directory / RUN).write_text(json.dumps(described | {"corpus": str(trained.corpus)}))
    return directory


def checkpoint(directory: Path, steps: int) -> Path:
    return directory / CHECKPOINTS / f"tokens={BATCH * steps}"


def hold_anew(path: Path) -> None:
    """Let the manifest hold for what lies there now, as an author of a checkpoint could."""
    import hashlib

    files = [file for file in path.iterdir() if file.name != MANIFEST]
    write_manifest(path, {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


def test_asynchronous_and_synchronous_evaluation_agree_on_every_source(trained: FullRun) -> None:
    measured = [row for row in rows(trained) if "val_loss" in row]
    assert [row["tokens"] // BATCH for row in measured] == [4, 8, 12, 16]
    for row in measured:
        found = evaluate_checkpoint(checkpoint(trained.directory, row["tokens"] // BATCH))
        assert (found.tokens, found.checkpoint) == (row["tokens"], f"tokens={row['tokens']}")
        assert found.val_loss == pytest.approx(row["val_loss"], rel=1e-6)
        assert found.source_losses == pytest.approx(row["source_losses"], rel=1e-6)
        assert found.source_losses.keys() == set(LETTERS)
    assert measured[-1]["val_loss"] < measured[0]["val_loss"]


def test_two_sharded_ranks_measure_the_same_and_the_newest_is_taken(
    mixed: Corpus, tmp_path: Path, gloo_ranks: GlooRanks
) -> None:
    run = of_mixture(mixed, tmp_path / "run")
    gloo_ranks.train(run, 2)
    found = evaluate_checkpoint(str(run.directory))
    last = rows(run)[-1]
    assert found.tokens == run.n_tokens
    assert found.val_loss == pytest.approx(last["val_loss"], rel=1e-6)
    assert found.source_losses == pytest.approx(last["source_losses"], rel=1e-6)


def test_samples_follow_their_seed_and_a_result_is_built_in_types(trained: FullRun) -> None:
    def written(**options: object) -> list[str]:
        samples = Samples(prompts=("abc", "vw"), n_tokens=20, **options)  # type: ignore[arg-type]
        found = evaluate_checkpoint(trained.directory, [samples])
        assert [sample.prompt for sample in found.samples] == ["abc", "vw"]
        assert CheckpointEvaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found
        assert f"'abc' → {found.samples[0].text!r}" in str(found)
        return [sample.text for sample in found.samples]

    assert written() == written(seed=0)
    assert written() != written(seed=1)
    assert written(temperature=0.0) == written(temperature=0.0, seed=1)
    assert all(0 < len(text) <= 20 for text in written())


def test_a_missing_or_damaged_checkpoint_is_refused(copied: Path) -> None:
    torn = next(checkpoint(copied, 8).glob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(StageError, match=r"tokens=2048:"):
        evaluate_checkpoint(checkpoint(copied, 8))
    with pytest.raises(StageError, match=f"tokens={BATCH * 7}"):
        evaluate_checkpoint(checkpoint(copied, 7))
    with pytest.raises(StageError, match="elsewhere"):
        evaluate_checkpoint(copied / "elsewhere")
    (copied / RUN).unlink()
    with pytest.raises(StageError, match=r"run.json:"):
        evaluate_checkpoint(checkpoint(copied, 4))
    shutil.rmtree(copied / CHECKPOINTS)
    (copied / CHECKPOINTS).mkdir()
    with pytest.raises(StageError, match=str(copied / CHECKPOINTS)):
        evaluate_checkpoint(copied)


def test_weights_of_another_model_and_another_corpus_are_refused(copied: Path, tmp_path: Path) -> None:
    described = json.loads((copied / RUN).read_text())
    described["numerics"]["model"]["n_layers"] = 2
    (copied / RUN).write_text(json.dumps(described))
    with pytest.raises(StageError, match=r"blocks.1\S+.*\("):
        evaluate_checkpoint(copied)
    described["numerics"]["corpus_key"] = "0123"
    (copied / RUN).write_text(json.dumps(described))
    with pytest.raises(StageError, match="0123"):
        evaluate_checkpoint(copied)
    with pytest.raises(StageError, match="corpus="):
        evaluate_checkpoint(copied, corpus=tmp_path / "nowhere")


def test_a_checkpoint_runs_no_program(copied: Path, tmp_path: Path) -> None:
    path, proof = checkpoint(copied, 4), tmp_path / "proof"
    kept = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Planted(proof)))
    hold_anew(path)
    with pytest.raises(StageError, match=r"builtins\.getattr|pathlib\.Path"):
        evaluate_checkpoint(path)
    assert not proof.exists()

    metadata = pickle.loads(kept)
    # which torch would unpickle in full
    metadata.state_dict_metadata["model.embedding.weight"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    hold_anew(path)
    with pytest.raises(StageError, match="embedding.weight"):
        evaluate_checkpoint(path)


def test_a_checkpoint_makes_way_at_once(trained: FullRun, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it finds it whole or gone: its name goes before the first of its files."""
    seen: list[list[str]] = []
    remove = shutil.rmtree

    def removing(path: Path, *, ignore_errors: bool = False) -> None:
        if path.exists():
            seen.append(sorted(found.name for found in (copied / CHECKPOINTS).glob("tokens=*[0-9]")))
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr("muscale.full_runs.checkpoints.save.shutil.rmtree", removing)
    Checkpoints(copied / CHECKPOINTS, keep_last=1)._drop(trained.n_tokens)
    assert seen == [[f"tokens={trained.n_tokens}"]] * 3
    assert [path.name for path in (copied / CHECKPOINTS).iterdir()] == [f"tokens={trained.n_tokens}"]


def test_a_run_that_does_not_evaluate_within_does_so_at_its_end(mixed: Corpus, tmp_path: Path) -> None:
    run = replace(of_mixture(mixed, tmp_path / "run"), evaluate_every_tokens=None)
    result = train(run)
    assert [row["tokens"] // BATCH for row in rows(run) if "val_loss" in row] == [STEPS]
    assert result["loss"] == rows(run)[-1]["val_loss"]


def test_evaluations_of_both_kinds_are_read_as_one_in_order_and_each_once(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    assert records.evaluations().empty
    (tmp_path / METRICS).write_text(
        '{"tokens": 1, "train_loss": 3.0}\n{"tokens": 4, "train_loss": 2.0, "val_loss": 2.5}\n'
    )
    assert records.evaluations().to_dict("list") == {"tokens": [4], "val_loss": [2.5]}
    with (tmp_path / EVALUATIONS).open("w") as file:
        for tokens in (4, 2, 8):
            file.write(json.dumps({"tokens": tokens, "val_loss": float(tokens), "samples": []}) + "\n")
            file.flush()
            assert len(records.evaluations()) == {4: 1, 2: 2, 8: 3}[tokens]
    assert records.evaluations().to_dict("list") == {"tokens": [2, 4, 8], "val_loss": [2.0, 2.5, 8.0]}
    assert len(records.steps()) == 2


def test_what_is_kept_of_a_measure_belongs_to_the_weights_not_to_their_tokens(copied: Path) -> None:
    """After a rollback a checkpoint of the same tokens may have other weights."""
    first, _ = subject_at(checkpoint(copied, 4), keep_progress=True)
    assert subject_at(checkpoint(copied, 4), keep_progress=True)[0].progress == first.progress
    shutil.rmtree(checkpoint(copied, 4))
    shutil.copytree(checkpoint(copied, 8), checkpoint(copied, 4))
    assert subject_at(checkpoint(copied, 4), keep_progress=True)[0].progress != first.progress
    assert subject_at(checkpoint(copied, 4))[0].progress is None
