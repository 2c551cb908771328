"""A worker trains on a variant's corpus and evaluates on the study's."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError, Study, StudyConfig
from muscale.actors.corpora import note, open_corpus
from muscale.actors.worker import Worker
from muscale.layout import CORPORA
from muscale.proxies.variant_corpora import variant_corpora
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.documents import in_validation
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics

MakeStudy = Callable[..., Path]
CLEANED = {
    "copies": {"exact_duplicates": "global"},
    "leaks": {"leaks": True},
    "nothing": {"exact_duplicates": "none"},
}


def run(key: str, rate: float) -> Chain:
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    numerics = Numerics(model=model, base=model, corpus_key=key, seed=0, evaluation_tokens=512)
    recipe = Hyperparameters(learning_rate=rate, batch_tokens=128).resolve(20 * 128)
    return Chain(numerics=numerics, segments=branch(recipe, 16 * 128, 20 * 128))


def test_a_worker_changes_its_corpus_and_back(worker: Worker) -> None:
    own, directory = worker.trainer.corpus, worker.directory
    again = write_corpus(directory / CORPORA / "again", str(directory / "text"), validation_fraction=0.1)
    (directory / "noise.txt").write_text("".join(random.Random(0).choices("abcdefghijklmnop ", k=40_000)))
    noise = write_corpus(directory / CORPORA / "noise", str(directory / "noise.txt"))
    keys = [own.key]
    for other in (again.evaluated_on(own), noise.evaluated_on(own)):
        note(directory, other)
        keys.append(other.key)
        assert open_corpus(directory, other.key) == other
    assert len({*keys}) == 3
    losses = [worker.reach(run(key, 0.01)).loss for key in keys]
    assert losses[1] == losses[0], "the same text, evaluated on the same"
    assert losses[2] is not None
    assert losses[0] is not None
    assert losses[2] > losses[0] + 0.05
    assert worker.reach(run(own.key, 0.011)).loss != worker.reach(run(keys[2], 0.011)).loss
    assert open_corpus(directory, "unknown") is None


def test_a_variant_s_corpus_is_in_the_study_s_tokens_and_apart_from_what_is_evaluated(worker: Worker) -> None:
    directory, first = worker.directory, worker.trainer.corpus
    (directory / "other").mkdir()
    for path in sorted((directory / "text").iterdir())[:30]:
        (directory / "other" / path.name).write_text(path.read_text())

    def corpora(**tables: object) -> list[str]:
        config = StudyConfig.read(directory / "study.toml", {"variants.a.corpus": tables})
        return [c.key for c in variant_corpora(config, first, directory, lambda done, total: None).values()]

    assert corpora(source="other") == corpora(source="other")
    whole = "".join(path.read_text() for path in sorted((directory / "text").iterdir()))
    (directory / "all.txt").write_text(whole + whole)
    with pytest.raises(StageError, match=r"variants\.a\.corpus.*%"):
        corpora(source="all.txt")
    with pytest.raises(StageError, match=r"variants\.a\.corpus\.source.*nowhere"):
        corpora(source="nowhere")


def test_a_cleaned_variant_has_less_training_text_and_the_study_s_held_out_text(make_study: MakeStudy) -> None:
    path = make_study()
    folder = path.parent / "text"
    training, held_out = (
        [file for file in sorted(folder.iterdir()) if in_validation(file.name, 0.1) == side] for side in (False, True)
    )
    copies = [name for n in range(99) if not in_validation(name := f"copy {n}.txt", 0.1)][:3]
    for file, copy in zip([*training[:2], *held_out[:1]], copies, strict=True):
        (folder / copy).write_text(file.read_text())
    tables = {name: {"corpus": {"clean": steps}} for name, steps in CLEANED.items()}
    study = Study.open(path, {"variants": tables, "corpus.most_leaked": 1.0}, quiet=True)
    found = variant_corpora(study.config, study.corpus, study.directory, lambda done, total: None)
    sizes = {copy: len((folder / copy).read_bytes()) + 1 for copy in copies}
    assert {name: study.corpus.n_tokens - corpus.n_tokens for name, corpus in found.items()} == {
        "copies": sum(sizes.values()),
        "leaks": sizes[copies[2]],
        "nothing": 0,
    }
    assert all(corpus.held_out == study.corpus for name, corpus in found.items() if name != "nothing")
    study.ledger.close()


def test_a_mixture_is_changed_key_by_key(worker: Worker) -> None:
    sources = {"a": {"path": "text", "weight": 1.0}, "b": {"path": "text", "weight": 3.0}}
    path = worker.directory / "study.toml"
    path.write_text(path.read_text().replace('source = "text"\n', ""))
    settings = {"corpus.sources": sources, "variants.x.corpus": {"sources": {"b": {"weight": 1.0}}}}
    config = StudyConfig.read(path, settings | {"variants.y.corpus": {"source": "text"}})
    mixed = config.variants["x"].corpus_of(config.corpus)
    assert mixed == replace_weight(config, 1.0)
    alone = config.variants["y"].corpus_of(config.corpus)
    assert (alone.source, alone.sources) == ("text", {})


def replace_weight(config: StudyConfig, weight: float) -> object:
    """The study's corpus with another weight of its second source."""
    changed = {**config.corpus.sources, "b": config.corpus.sources["b"].model_copy(update={"weight": weight})}
    return config.corpus.model_copy(update={"sources": changed})
