from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from proxy_models.corpus import EMBEDDED, MANIFEST, Corpus, CorpusError, in_validation, source_files, write_corpus

TEXTS = {f"part/{number:02}.txt": f"text number {number}\n" * (number + 1) for number in range(20)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "source"


@pytest.fixture
def written(source: Path, tmp_path: Path) -> Corpus:
    return write_corpus(tmp_path / "tokens", str(source), validation_fraction=0.3)


def test_every_document_is_in_one_split_closed_by_a_zero_byte(written: Corpus) -> None:
    documents = {split: bytes(getattr(written, split)).split(b"\0") for split in ("train", "validation")}
    assert all(parts.pop() == b"" for parts in documents.values())
    together = [text.decode() for parts in documents.values() for text in parts]
    assert sorted(together) == sorted(TEXTS.values())
    for name, text in TEXTS.items():
        split = "validation" if in_validation(name, 0.3) else "train"
        assert text.encode() in documents[split]
    assert all(documents.values())


def test_the_manifest_states_what_lies_in_the_files(written: Corpus) -> None:
    manifest = json.loads((written.folder / MANIFEST).read_text())
    for split, count in (("train", written.n_tokens), ("validation", written.n_validation_tokens)):
        content = (written.folder / f"{split}.bin").read_bytes()
        assert len(content) == count == manifest["tokens"][split]
        assert hashlib.sha256(content).hexdigest() == manifest["sha256"][split]
    assert sum(file["tokens"] for file in manifest["files"]) == written.n_tokens + written.n_validation_tokens
    assert {file["path"] for file in manifest["files"]} == TEXTS.keys()


def test_a_further_file_moves_no_other(source: Path, written: Corpus, tmp_path: Path) -> None:
    (source / "part" / "new.txt").write_text("new\n")
    again = write_corpus(tmp_path / "again", str(source), validation_fraction=0.3)
    splits = {file["path"]: file["split"] for file in again.manifest["files"]}
    assert splits.items() > {file["path"]: file["split"] for file in written.manifest["files"]}.items()
    assert again.key != written.key


def test_the_held_out_share_is_about_the_fraction() -> None:
    held_out = sum(in_validation(f"{number}.txt", 0.25) for number in range(2000))
    assert held_out / 2000 == pytest.approx(0.25, abs=0.04)


def test_the_key_is_of_the_content_not_of_its_place(source: Path, written: Corpus, tmp_path: Path) -> None:
    moved = shutil.copytree(source, tmp_path / "elsewhere" / "copy")
    again = write_corpus(tmp_path / "other", str(moved), validation_fraction=0.3)
    assert again.key == written.key
    assert write_corpus(tmp_path / "split", str(source), validation_fraction=0.5).key != written.key


def test_a_single_file_is_split_by_position(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 101)))
    corpus = write_corpus(tmp_path / "tokens", str(path), validation_fraction=0.2)
    assert corpus.train.tolist() == [*range(1, 81), 0]
    assert corpus.validation.tolist() == [*range(81, 101), 0]


def test_a_finished_folder_is_opened_and_not_written_again(written: Corpus, source: Path) -> None:
    before = (written.folder / "train.bin").stat().st_mtime_ns
    again = write_corpus(written.folder, str(source), validation_fraction=0.3)
    assert again == written
    assert (written.folder / "train.bin").stat().st_mtime_ns == before


def test_an_unfinished_folder_is_written_again(written: Corpus, source: Path) -> None:
    expected = bytes(written.train)
    (written.folder / MANIFEST).unlink()
    (written.folder / "train.bin").write_bytes(b"half")
    with pytest.raises(CorpusError, match=r"manifest.json: no such file; this folder holds no finished corpus"):
        Corpus.open(written.folder)
    again = write_corpus(written.folder, str(source), validation_fraction=0.3)
    assert (again.key, bytes(again.train)) == (written.key, expected)
    assert sorted(path.name for path in again.folder.iterdir()) == [MANIFEST, "train.bin", "validation.bin"]


def test_a_torn_token_file_is_refused(written: Corpus) -> None:
    path, size = written.folder / "train.bin", written.n_tokens
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorpusError, match=f"train.bin: the manifest states {size} bytes, found {size - 3}"):
        Corpus.open(written.folder)
    path.unlink()
    with pytest.raises(CorpusError, match="found no file"):
        Corpus.open(written.folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"tokens": {}}', '{"tokens": {"train": "many", "validation": 1}}'])
def test_a_broken_manifest_is_refused_by_name(written: Corpus, text: str) -> None:
    (written.folder / MANIFEST).write_text(text)
    with pytest.raises(CorpusError, match=r"manifest.json: not a corpus manifest"):
        Corpus.open(written.folder)


def test_a_zero_byte_is_refused_with_file_and_place(source: Path, tmp_path: Path) -> None:
    (source / "part" / "image.png").write_bytes(b"abc\0def")
    with pytest.raises(CorpusError, match=r"image.png: byte 0 at 3"):
        write_corpus(tmp_path / "tokens", str(source))
    assert not (tmp_path / "tokens" / MANIFEST).exists()


def test_nothing_to_read_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(CorpusError, match=re.escape(f"{missing}: no such file or folder")):
        write_corpus(tmp_path / "tokens", str(missing))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CorpusError, match=re.escape(f"{empty}: the corpus is empty")):
        write_corpus(tmp_path / "tokens", str(empty))
    for name in ("a.txt", "b.txt"):
        (empty / name).touch()
    with pytest.raises(CorpusError, match=r"empty in its train split \(0 files with text"):
        write_corpus(tmp_path / "tokens", str(empty))


def test_the_embedded_source_is_the_standard_library_without_its_tests() -> None:
    root, files = source_files(EMBEDDED)
    names = {path.relative_to(root).as_posix() for path in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any({"test", "site-packages"} & set(name.split("/")) for name in names)


def test_a_pickled_corpus_opens_its_own_maps(written: Corpus) -> None:
    expected = np.array(written.train)
    again = pickle.loads(pickle.dumps(written))
    assert again == written
    assert np.array_equal(again.train, expected)
