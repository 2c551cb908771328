"""Variants with another tokenizer are compared on the study's held-out text, in bits per byte."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from muscale import StageError, Study, StudyConfig, StudyFileError
from muscale.actors.corpora import open_corpus
from muscale.actors.jobs import Job
from muscale.actors.worker import Worker
from muscale.proxies.compared_losses import ComparedLosses
from muscale.proxies.comparison import Comparison, compare
from muscale.proxies.variant_corpora import variant_corpora
from muscale.proxies.variants import stems_of, variants
from muscale.store.statements import find
from proxy_models.data.bits_per_byte import UNIT, bits_per_byte, held_out_bytes
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.documents import in_validation
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import EMBEDDED, Source
from proxy_models.data.tokenizer import TokenizerSettings, train_bpe
from tests.muscale.planted import planted_horizon

MakeStudy = Callable[..., Path]
STEMS = {
    "transfer.n_tokens": 4096,
    "transfer.rates": 5,
    "compare.stems": [{"width": 16, "n_tokens": 4096}, {"width": 32, "n_tokens": 4096}],
}


def write_tokenizers(path: Path, vocab_size: int = 300) -> None:
    """Write a tokenizer of the study's text next to the study file twice, the second time with other white space."""
    texts = [file.read_bytes() for file in sorted((path.parent / "text").iterdir())]
    content = train_bpe(texts, vocab_size)
    (path.parent / "first.json").write_text(content)
    (path.parent / "again.json").write_text(json.dumps(json.loads(content), indent=3))


def compared(
    path: Path, settings: dict[str, object]
) -> tuple[Comparison, dict[str, Corpus], dict[str, tuple[Job, float]]]:
    """A comparison that a worker in this process trains; the variants' corpora, and all runs with their losses by label."""
    torch.set_num_threads(1)
    study = Study.open(path, {**STEMS, **settings}, quiet=True)
    corpora = variant_corpora(study.config, study.corpus, study.directory, lambda done, total: None)
    worker, trained = Worker(study.ledger, compiled=False), dict[str, tuple[Job, float]]()

    def train(_what: str, jobs: Sequence[Job]) -> None:
        for job in jobs:
            loss = worker.reach(job.chain).loss
            trained[job.label] = job, math.nan if loss is None else loss

    numerics, best = study.config.shared_numerics(study.corpus, study.directory), study.config.hyperparameters
    found = compare(study.config, numerics, best, planted_horizon(), study.ledger, train, corpora)
    assert len(study.ledger.read(find, "segments")) > 0
    study.ledger.close()
    return found, corpora, trained


def test_the_same_tokenizer_in_another_file_has_the_multiplier_of_no_change(make_study: MakeStudy) -> None:
    path = make_study()
    write_tokenizers(path)
    tables = {"corpus.tokenizer": "first.json", "model.vocab_size": 300, "variants.same": {}}
    found, corpora, trained = compared(path, {**tables, "variants.again": {"corpus": {"tokenizer": "again.json"}}})
    assert corpora["again"].held_out != Corpus.open(path.parent / "corpus")
    table = found.outcome.table.set_index("variant").drop(columns=["reason"])
    assert found.outcome.unit == UNIT
    assert table.loc["again"].drop("verdict").astype(float).to_dict() == pytest.approx(
        table.loc["same"].drop("verdict").astype(float).to_dict(), nan_ok=True
    )
    alone, _, _ = compared(path, tables)
    assert alone.outcome.unit == "nats per token"
    assert alone.outcome.table.set_index("variant").loc["same", "multiplier"] == pytest.approx(
        table.loc["same", "multiplier"]
    )
    ends = {name: loss for name, (_, loss) in trained.items() if "seed" in name}
    assert all(loss == ends[name.replace("again", "baseline")] for name, loss in ends.items())


def test_bpe_against_bytes_on_the_embedded_corpus(make_study: MakeStudy) -> None:
    path = make_study()
    root = path.parent / "part"  # all of it would take minutes
    root.mkdir()
    for file in (Source(path=EMBEDDED).files()[0] / "email").glob("*.py"):
        (root / file.name).write_bytes(file.read_bytes())
    torch.set_num_threads(1)
    settings: dict[str, object] = {"corpus.source": str(root), "variants.bpe.corpus.tokenizer": "bpe"}
    settings |= {"variants.bpe.model.vocab_size": 512, "variants.padded.model.vocab_size": 272}
    study = Study.open(path, {**STEMS, **settings}, quiet=True)
    config, first = study.config, study.corpus
    corpora = variant_corpora(config, first, study.directory, lambda done, total: None)
    assert set(corpora) == {"bpe"}, "a larger vocabulary alone needs no other tokens"
    files = Source(path=str(root)).files()[1]
    n_bytes = sum(p.stat().st_size for p in files if in_validation(p.name, 0.1))
    assert held_out_bytes(first) == held_out_bytes(corpora["bpe"]) == {"corpus": n_bytes}
    n_tokens = {"baseline": first.n_validation_tokens, "bpe": corpora["bpe"].n_validation_tokens}
    assert n_tokens["bpe"] < n_tokens["baseline"]
    losses, worker = ComparedLosses.of(study.ledger, corpora, "nats per token"), Worker(study.ledger, compiled=False)
    assert losses.unit == UNIT
    bits = {}
    for variant in variants(
        config, config.shared_numerics(first, first.folder.parent), config.hyperparameters, corpora
    ):
        if variant.name != "padded":
            job = variant.size_job(stems_of(config)[0], 0, lambda _: config.hyperparameters.learning_rate)
            outcome = worker.reach(job.chain)
            bits[variant.name] = losses.loss(variant.name, outcome)
            assert outcome.loss is not None
            by_hand = outcome.loss * n_tokens[variant.name] / n_bytes / math.log(2)
            assert bits[variant.name] == pytest.approx(by_hand)
    study.ledger.close()
    assert 1 < bits["bpe"] < bits["baseline"] < 8


def test_settings_of_another_tokenizer(make_study: MakeStudy) -> None:
    path = make_study()
    write_tokenizers(path)
    with pytest.raises(StudyFileError, match=r"variants\.a\.model\.vocab_size: .*257"):
        StudyConfig.read(path, {"variants.a.corpus.tokenizer": "bpe"})
    with pytest.raises(StudyFileError, match=r"variants\.a\.model\.context_length"):
        StudyConfig.read(path, {"variants.a.model.context_length": 64})
    with pytest.raises(StudyFileError, match=r"variants\.a\.corpus\.validation_fraction"):
        StudyConfig.read(path, {"variants.a.corpus": {"tokenizer": "bpe", "validation_fraction": 0.2}})
    study = Study.open(path, quiet=True)
    first, directory = study.corpus, study.directory

    def corpora(**tables: object) -> dict[str, Corpus]:
        config = StudyConfig.read(path, {f"variants.{name}": table for name, table in tables.items()})
        return variant_corpora(config, first, directory, lambda done, total: None)

    with pytest.raises(StageError, match=r"variants\.a\.model\.vocab_size"):
        corpora(a={"model": {"vocab_size": 200}})
    with pytest.raises(StageError, match=r"variants\.a\.model\.vocab_size"):
        corpora(a={"corpus": {"tokenizer": "first.json"}})
    sizes = {
        name: {"corpus": {"tokenizer": "bpe"}, "model": {"vocab_size": size}} for name, size in (("a", 300), ("b", 320))
    }
    found = corpora(**sizes)
    assert [found[name].vocab_size for name in "ab"] == [300, 320]
    for corpus in found.values():
        assert open_corpus(directory, corpus.key) == corpus
    study.ledger.close()


def test_other_data_in_other_tokens_are_evaluated_on_the_study_s_text(make_study: MakeStudy) -> None:
    path = make_study()
    write_tokenizers(path)
    directory = path.parent
    (directory / "other").mkdir()
    for file in sorted((directory / "text").iterdir())[:30]:
        (directory / "other" / file.name).write_text(file.read_text())
    study = Study.open(path, quiet=True)
    first = study.corpus

    def corpus(source: str) -> Corpus:
        own = {"corpus": {"source": source, "tokenizer": "first.json"}, "model": {"vocab_size": 300}}
        config = StudyConfig.read(path, {"variants.a": own})
        return variant_corpora(config, first, directory, lambda done, total: None)["a"]

    found = corpus("other")
    assert found.held_out is not None
    assert found.held_out.folder != found.folder
    assert held_out_bytes(found.held_out) == held_out_bytes(first)
    text = found.held_out.tokenizer().decode(found.held_out.validation)
    assert text == first.tokenizer().decode(first.validation)
    assert open_corpus(directory, found.key) == found
    whole = "".join(file.read_text() for file in sorted((directory / "text").iterdir()))
    (directory / "all.txt").write_text(whole + whole)
    with pytest.raises(StageError, match=r"variants\.a\.corpus.*%"):
        corpus("all.txt")
    changed = sorted((directory / "text").iterdir())[0]
    changed.write_text(changed.read_text() + "x")
    (directory / "corpora").rename(directory / "moved")
    with pytest.raises(StageError, match=r"variants\.a\.corpus\.tokenizer"):
        corpus("other")
    study.ledger.close()


def test_bits_per_byte_of_a_mixture_weigh_sources_as_the_study_s_loss_does(tmp_path: Path) -> None:
    for name, word in (("a", "abcdefgh "), ("b", "xyz ")):
        (tmp_path / f"{name}.txt").write_text("".join(f"{word}{n % 7} " for n in range(2000)))
    sources = {name: Source(path=str(tmp_path / f"{name}.txt")) for name in "ab"}
    study = write_mixture(tmp_path / "bytes", sources, Mixture.constant({"a": 3.0, "b": 1.0}))
    tokenizer = TokenizerSettings(kind="bpe", vocab_size=270)
    other = write_mixture(tmp_path / "bpe", sources, Mixture.constant({"a": 3.0, "b": 1.0}), tokenizer=tokenizer)
    n_bytes = held_out_bytes(other)
    assert n_bytes == {name: files.n_validation_tokens - 1 for name, files in study.sources.items()}
    losses = {"a": 1.25, "b": 0.5}
    rates = {name: n_bytes[name] / study.sources[name].n_validation_tokens for name in "ab"}
    mean = (0.75 * 1.25 + 0.25 * 0.5) / (0.75 * rates["a"] + 0.25 * rates["b"]) / math.log(2)
    assert bits_per_byte(losses, study, study, n_bytes) == pytest.approx(mean)
    per_token = {
        name: losses[name] * study.sources[name].n_validation_tokens / files.n_validation_tokens
        for name, files in other.sources.items()
    }
    assert bits_per_byte(per_token, other, study, n_bytes) == pytest.approx(mean), "the same nats of the same text"


def test_a_single_text_is_cut_at_the_same_byte_by_every_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"word{n % 97} äöü " for n in range(3000)))
    first = write_corpus(tmp_path / "bytes", str(path))
    other = write_corpus(tmp_path / "bpe", str(path), tokenizer=TokenizerSettings(kind="bpe", vocab_size=300))
    assert held_out_bytes(first) == held_out_bytes(other) == {"corpus": first.n_validation_tokens - 1}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_another_vocabulary_of_a_trained_tokenizer_trains_another_one(make_study: MakeStudy, kind: str) -> None:
    settings = {"corpus.tokenizer": kind, "model.vocab_size": 270}
    sizes = {f"variants.v{size}.model.vocab_size": size for size in (280, 290)}
    study = Study.open(make_study(), {**STEMS, **settings, **sizes}, quiet=True)
    corpora = variant_corpora(study.config, study.corpus, study.directory, lambda done, total: None)
    assert {name: corpus.vocab_size for name, corpus in corpora.items()} == {"v280": 280, "v290": 290}
