"""A manifest of tokens that somebody edited is refused by file, key, rule and value, and leads out of no folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import CorpusError, Source
from proxy_models.data.token_files import MANIFEST
from tests.proxy_models.prompted import prompted_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.write_text("some text to be held " * 100)
    write_corpus(tmp_path / "corpus", str(text))
    return tmp_path / "corpus"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("dtype", "object", "must be a type of token files, got 'object'"),
        ("dtype", {}, "must be a type of token files, got {}"),
        ("tokens", {"train": 1e400, "validation": 2}, "must be counts of train and validation"),
        ("tokens", {"train": -1, "validation": 2}, "must be counts of train and validation"),
        ("tokens", [], "must be counts of train and validation, got []"),
        ("vocab_size", "256", "must be a whole number of at least 1, got '256'"),
        ("key", None, "must be a hash, got None"),
        ("text", {"documents": "x"}, "must be null or counts"),
        ("files", {}, "must be a list of files, got {}"),
        ("format", [2], "format must be 2, got [2]"),
    ],
)
def test_an_invalid_manifest_is_reported_with_its_key(folder: Path, key: str, value: Any, rule: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(CorpusError) as refusal:
        Corpus.open(folder)
    assert str(folder / MANIFEST) in str(refusal.value)
    assert rule in str(refusal.value)
    if key != "format":
        del manifest[key]
        (folder / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(CorpusError, match=f"{key}: missing"):
            Corpus.open(folder)


@pytest.mark.parametrize("value", [None, [], {"train": 1, "validation": 1}, 0])
def test_a_mask_needs_its_counts(tmp_path: Path, value: Any) -> None:
    folder = prompted_corpus(tmp_path).folder
    manifest = json.loads((folder / MANIFEST).read_text())
    for counted in (value, manifest["counted"] | {"validation": 0}):
        (folder / MANIFEST).write_text(json.dumps({**manifest, "counted": counted}))
        with pytest.raises(CorpusError, match="counted: must be"):
            Corpus.open(folder)
    del manifest["counted"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="counted: missing"):
        Corpus.open(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b'"x"', b"null", b"\xff"])
def test_a_manifest_that_is_no_table_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CorpusError, match=r"manifest.json: not a corpus manifest"):
        Corpus.open(folder)


def test_a_mixture_s_source_lies_in_its_folder(folder: Path, tmp_path: Path) -> None:
    sources = {name: Source(path=str(tmp_path / "text")) for name in ("a", "b")}
    write_mixture(tmp_path / "mixed", sources, Mixture.constant({"a": 1.0, "b": 1.0}))
    path = tmp_path / "mixed" / MANIFEST
    text = path.read_text()
    key = Corpus.open(folder).key
    path.write_text(
        text.replace('"a"', '"../../corpus"').replace(Corpus.open(tmp_path / "mixed").sources["a"].key, key)
    )
    with pytest.raises(CorpusError, match=r"got '../../corpus'"):
        Corpus.open(tmp_path / "mixed")


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "a/b.arrow"])
def test_a_saved_data_set_s_files_lie_in_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(CorpusError, match=r"state.json:"):
        Source(path=str(tmp_path), kind="huggingface").files()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x", "end_of_document": 3}'])
def test_an_invalid_tokenizer_manifest_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.manifest.json").write_text(content)
    with pytest.raises(CorpusError, match=r"tokenizer.manifest.json: "):
        Corpus.open(folder).tokenizer()
