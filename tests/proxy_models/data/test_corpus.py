from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from proxy_models.data import sources
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.documents import in_validation
from proxy_models.data.mixture import Mixture, MixtureStage
from proxy_models.data.sources import EMBEDDED, CorpusError, Source
from proxy_models.data.token_files import MANIFEST
from proxy_models.data.tokenizer import TokenizerSettings
from proxy_models.hashing import file_sha256

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


def test_a_torn_token_file_is_refused(written: Corpus) -> None:
    path, size = written.folder / "train.bin", written.n_tokens
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorpusError, match=f"train.bin: the manifest states {size} bytes, found {size - 3}"):
        Corpus.open(written.folder)
    path.unlink()
    with pytest.raises(CorpusError, match="found no file"):
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
    with pytest.raises(CorpusError, match=r"\(0"):
        write_corpus(tmp_path / "tokens", str(empty))


def test_the_embedded_source_is_the_standard_library_without_its_tests() -> None:
    root, files = Source(path=EMBEDDED).files()
    names = {path.relative_to(root).as_posix() for path in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any({"test", "site-packages"} & set(name.split("/")) for name in names)


def test_a_pickled_corpus_opens_its_own_maps(written: Corpus) -> None:
    expected = np.array(written.train)
    again = pickle.loads(pickle.dumps(written))
    assert again == written
    assert np.array_equal(again.train, expected)


# What a finished folder stands for


def test_a_folder_of_another_source_is_refused_and_both_are_named(written: Corpus, source: Path) -> None:
    (source / "part" / "03.txt").write_text("changed")
    message = (
        f"{written.folder}: holds the corpus of {source}, not of {source} as it is now: "
        "1 of 20 files differ, the first is part/03.txt"
    )
    with pytest.raises(CorpusError, match=re.escape(message)):
        write_corpus(written.folder, str(source), validation_fraction=0.3)
    other = source.with_name("other")
    other.mkdir()
    (other / "a.txt").write_text("other")
    with pytest.raises(CorpusError, match=re.escape(f"holds the corpus of {source}, not of {other}")):
        write_corpus(written.folder, str(other), validation_fraction=0.3)


def test_a_folder_written_otherwise_is_refused(written: Corpus, source: Path) -> None:
    with pytest.raises(CorpusError, match="validation_fraction is 0.2 here but 0.3 there"):
        write_corpus(written.folder, str(source), validation_fraction=0.2)
    bpe = TokenizerSettings(kind="bpe", vocab_size=270)
    with pytest.raises(CorpusError, match="270 ids"):
        write_corpus(written.folder, str(source), validation_fraction=0.3, tokenizer=bpe)
    with pytest.raises(CorpusError, match="holds one source, not the mixture"):
        write_mixture(written.folder, {"a": Source(path=str(source))}, Mixture.constant({"a": 1}))


def test_the_same_content_elsewhere_is_the_same_source(written: Corpus, source: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(source, tmp_path / "moved")
    assert write_corpus(written.folder, str(moved), validation_fraction=0.3) == written
    (source / "part" / "03.txt").touch()
    assert write_corpus(written.folder, str(source), validation_fraction=0.3) == written


# Interruption and concurrency


class InterruptionError(Exception):
    pass


BPE = TokenizerSettings(kind="bpe", vocab_size=270)


@pytest.mark.parametrize(
    ("tokenizer", "at_call"), [(TokenizerSettings(), 1), (TokenizerSettings(), 15), (BPE, 1), (BPE, 30)]
)
def test_interrupted_work_is_not_taken_for_finished_and_is_done_again(
    source: Path, tmp_path: Path, tokenizer: TokenizerSettings, at_call: int
) -> None:
    calls = 0

    def interrupt(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        write_corpus(tmp_path / "cut", str(source), tokenizer=tokenizer, on_progress=interrupt)
    with pytest.raises(CorpusError, match="holds no finished corpus"):
        Corpus.open(tmp_path / "cut")
    again = write_corpus(tmp_path / "cut", str(source), tokenizer=tokenizer)
    assert again.key == write_corpus(tmp_path / "whole", str(source), tokenizer=tokenizer).key
    assert not [path for path in again.folder.iterdir() if path.suffix == ".unfinished"]


def test_writers_of_one_folder_wait_for_each_other(source: Path, tmp_path: Path) -> None:
    reports: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        done = [
            pool.submit(
                write_corpus, tmp_path / "tokens", str(source), on_progress=lambda done, _total: reports.append(done)
            )
            for _ in range(4)
        ]
        assert len({future.result().key for future in done}) == 1
    assert len(reports) == len(TEXTS)  # one of them wrote


def test_progress_rises_to_the_size_of_the_source(source: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in source.rglob("*.txt"))
    for tokenizer, passes in ((TokenizerSettings(), 1), (TokenizerSettings(kind="bpe", vocab_size=270), 2)):
        reports: list[tuple[int, int]] = []
        write_corpus(
            tmp_path / tokenizer.kind,
            str(source),
            tokenizer=tokenizer,
            on_progress=lambda *now: reports.append(now),  # noqa: B023
        )
        assert {total for _, total in reports} == {passes * size}
        assert all(before <= after for (before, _), (after, _) in pairwise(reports))
        assert reports[-1][0] == passes * size


# Tokenizers


def test_bpe_is_trained_on_the_training_text_and_kept(source: Path, tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "bpe", str(source), validation_fraction=0.3, tokenizer=TokenizerSettings(kind="bpe", vocab_size=270)
    )
    assert corpus.vocab_size == 270
    assert corpus.train.dtype == np.uint16
    tokenizer = corpus.tokenizer()
    for split in ("train", "validation"):
        texts = [text for name, text in sorted(TEXTS.items()) if in_validation(name, 0.3) == (split == "validation")]
        assert tokenizer.decode(getattr(corpus, split)) == "".join(text + "\n" for text in texts)
    # The same tokenizer, given as a file, makes the same corpus.
    given = TokenizerSettings(kind="file", path=str(corpus.folder / "tokenizer.json"))
    again = write_corpus(tmp_path / "file", str(source), validation_fraction=0.3, tokenizer=given)
    assert again.key == corpus.key
    assert write_corpus(tmp_path / "file", str(source), validation_fraction=0.3, tokenizer=given) == again


def test_bpe_of_another_field_is_not_taken_for_this_one_s(tmp_path: Path) -> None:
    lines = [{"text": f"aaaa bbbb {number}", "content": f"yyyy zzzz {number}"} for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(folder: str, field: str, interrupt: bool = False) -> Corpus:
        def on_progress(done: int, total: int) -> None:
            if interrupt and done > total / 2:  # BPE is trained, tokenizing has begun
                raise InterruptionError

        source = Source(path=str(tmp_path / "a.jsonl"), kind="jsonl", field=field)
        return write_corpus(tmp_path / folder, source, tokenizer=BPE, on_progress=on_progress)

    with pytest.raises(InterruptionError):
        write("cut", "text", interrupt=True)
    assert (tmp_path / "cut" / "tokenizer.json").exists()
    assert write("cut", "content").key == write("whole", "content").key


def test_fertility_and_bytes_per_token_are_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(30):
        (tmp_path / "a" / f"{number}.txt").write_text(f"{number:02} ab\n  cde ")
    corpus = write_corpus(tmp_path / "tokens", str(tmp_path / "a"))
    files = corpus.sources["corpus"]
    assert files.fertility == pytest.approx(12 / 3)
    # A loss is a mean over all tokens, so its sum in bits over the bytes counts the closing ones.
    assert corpus.bytes_per_token == files.bytes_per_token == pytest.approx(12 / 13)


# Token files


def write_ids(path: Path, ids: list[int], dtype: str = "<u2") -> Source:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(np.array(ids, dtype=dtype).tobytes())
    return Source(path=str(path), kind="tokens", dtype="uint16", vocab_size=200)


def test_token_files_are_taken_as_they_are(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "out", write_ids(tmp_path / "a.bin", list(range(100))), validation_fraction=0.2)
    assert (corpus.train.tolist(), corpus.validation.tolist()) == (list(range(80)), list(range(80, 100)))
    assert (corpus.vocab_size, corpus.train.dtype.name) == (200, "uint8")  # the smallest that holds them
    assert corpus.sources["corpus"].fertility is None
    assert corpus.bytes_per_token is None
    assert corpus.end_of_document is None
    with pytest.raises(CorpusError, match="given as tokens, their tokenizer is not known"):
        corpus.tokenizer()


@pytest.mark.parametrize(
    ("ids", "extra", "message"),
    [
        ([1] * 30 + [200], b"", r"a.bin: token 30: ids must lie below vocab_size = 200, got 200"),
        ([1] * 30, b"x", r"a.bin: the size must be a multiple of 2 \(uint16\), got 61"),
        ([], b"", r"a.bin: the file is empty"),
    ],
)
def test_bad_token_files_are_refused_and_nothing_is_written(
    ids: list[int], extra: bytes, message: str, tmp_path: Path
) -> None:
    source = write_ids(tmp_path / "a.bin", ids)
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(extra)
    with pytest.raises(CorpusError, match=message):
        write_corpus(tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokenizer", [TokenizerSettings(), TokenizerSettings(kind="bpe", vocab_size=270)])
def test_bad_text_leaves_nothing_behind(source: Path, tmp_path: Path, tokenizer: TokenizerSettings) -> None:
    (source / "part" / "99.txt").write_bytes(b"text \xff")
    with pytest.raises(CorpusError, match=r"99.txt: byte 0xff at 5"):
        write_corpus(tmp_path / "out", str(source), tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


# Mixtures


@pytest.fixture
def two_sources(source: Path, tmp_path: Path) -> dict[str, Source]:
    lines = [json.dumps({"text": f"line {number} of the other source"}) + "\n" for number in range(60)]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    return {"files": Source(path=str(source)), "lines": Source(path=str(tmp_path / "lines.jsonl"), kind="jsonl")}


HALVES = Mixture.constant({"files": 0.5, "lines": 0.5})


def test_a_mixture_contains_each_source_and_its_key_all_of_them(two_sources: dict[str, Source], tmp_path: Path) -> None:
    corpus = write_mixture(tmp_path / "mixed", two_sources, HALVES)
    alone = {name: write_corpus(tmp_path / name, source) for name, source in two_sources.items()}
    for name, one in alone.items():
        assert corpus.sources[name].key == one.key
        assert np.array_equal(corpus.sources[name].train, one.train)
    assert corpus.n_tokens == sum(one.n_tokens for one in alone.values())
    assert corpus == Corpus.open(corpus.folder) == pickle.loads(pickle.dumps(corpus))
    assert write_mixture(tmp_path / "mixed", two_sources, HALVES) == corpus
    other = write_mixture(tmp_path / "other", two_sources, Mixture.constant({"files": 0.4, "lines": 0.6}))
    assert other.key != corpus.key
    assert [line.split()[0] for line in str(corpus).splitlines()[1:]] == ["files", "lines"]


def test_a_mixture_is_not_read_as_one_source(two_sources: dict[str, Source], tmp_path: Path) -> None:
    corpus = write_mixture(tmp_path / "mixed", two_sources, HALVES)
    with pytest.raises(CorpusError, match="batches.training_stream"):
        _ = corpus.train
    with pytest.raises(CorpusError, match="batches.evaluation_sets"):
        _ = corpus.validation


def test_one_tokenizer_is_trained_on_all_sources(two_sources: dict[str, Source], tmp_path: Path) -> None:
    bpe = TokenizerSettings(kind="bpe", vocab_size=290)
    corpus = write_mixture(tmp_path / "mixed", two_sources, HALVES, tokenizer=bpe)
    text = corpus.tokenizer().decode(corpus.sources["lines"].train)
    assert set(text.splitlines()) <= {f"line {number} of the other source" for number in range(60)}
    assert corpus.sources["lines"].manifest["tokenizer"] == corpus.sources["files"].manifest["tokenizer"]
    assert corpus.bytes_per_token == pytest.approx(
        sum(files.bytes_per_token or 0.0 for files in corpus.sources.values()) / 2
    )


def test_finished_sources_survive_a_bad_one(two_sources: dict[str, Source], tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    good = lines.read_text()
    lines.write_text(good + "{")
    with pytest.raises(CorpusError, match=r"lines.jsonl: line 61: not JSON"):
        write_mixture(tmp_path / "mixed", two_sources, HALVES)
    kept = tmp_path / "mixed" / "sources" / "files" / "train.bin"
    before = kept.stat().st_mtime_ns
    assert not (tmp_path / "mixed" / "sources" / "lines").exists()
    lines.write_text(good)
    assert write_mixture(tmp_path / "mixed", two_sources, HALVES) == Corpus.open(tmp_path / "mixed")
    assert kept.stat().st_mtime_ns == before


def test_sources_of_different_vocabularies_are_not_mixed(two_sources: dict[str, Source], tmp_path: Path) -> None:
    sources = {"lines": two_sources["lines"], "ids": write_ids(tmp_path / "ids.bin", list(range(100)))}
    with pytest.raises(CorpusError, match="must.*got 256.*200"):
        write_mixture(tmp_path / "mixed", sources, Mixture.constant({"lines": 1, "ids": 1}))
    assert not (tmp_path / "mixed").exists()


def test_names_must_agree_and_name_folders(two_sources: dict[str, Source], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the mixture must weigh the sources files, lines, got files"):
        write_mixture(tmp_path / "mixed", two_sources, Mixture.constant({"files": 1}))
    with pytest.raises(ValueError, match=r"got '../up'"):
        write_mixture(tmp_path / "mixed", {"../up": two_sources["files"]}, Mixture.constant({"../up": 1}))


def test_epochs_are_counted_and_more_than_four_are_warned_of(two_sources: dict[str, Source], tmp_path: Path) -> None:
    mixture = Mixture(
        stages=(
            MixtureStage(weights={"files": 0.75, "lines": 0.25}, until_tokens=1000),
            MixtureStage(weights={"files": 0, "lines": 1}),
        )
    )
    corpus = write_mixture(tmp_path / "mixed", two_sources, mixture)
    n_lines = corpus.sources["lines"].n_tokens
    n_tokens = 750 + 4 * n_lines
    assert corpus.epochs(n_tokens) == pytest.approx({"lines": 4, "files": 750 / corpus.sources["files"].n_tokens})
    assert corpus.warnings(n_tokens) == []
    (warning,) = corpus.warnings(n_tokens + n_lines)
    assert warning.startswith(f"lines: 5.0 epochs of its {n_lines:,} tokens in a run of {n_tokens + n_lines:,}")


def test_the_table_has_the_fertility_of_each_language_that_a_source_states(tmp_path: Path) -> None:
    for name, text in (("en", "the word of a text " * 40), ("de", "Donaudampfschifffahrtsgesellschaft " * 40)):
        (tmp_path / f"{name}.txt").write_text(text)
    sources = {name: Source(path=str(tmp_path / f"{name}.txt"), language=name) for name in ("en", "de")}
    table = (
        write_mixture(tmp_path / "corpus", sources, Mixture.constant({"en": 1, "de": 1})).table().set_index("language")
    )
    assert table.loc["de", "tokens/word"] == pytest.approx(35, rel=0.02)
    assert table.loc["en", "tokens/word"] == pytest.approx(19 / 5, rel=0.02)


def test_touched_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"text {number} " * 50)
    first = write_corpus(tmp_path / "corpus", str(folder))
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    hashed: list[Path] = []

    def hash_of(path: Path) -> str:
        hashed.append(path)
        return file_sha256(path)

    monkeypatch.setattr(sources, "file_sha256", hash_of)
    assert [write_corpus(tmp_path / "corpus", str(folder)).key for _ in range(2)] == [first.key] * 2
    assert len(hashed) == 20
