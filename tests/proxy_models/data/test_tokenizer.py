from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.data import kept_tokenizer
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.kept_tokenizer import TrainingText
from proxy_models.data.sources import CorpusError, Source, SourceFile
from proxy_models.data.token_files import PassProgress
from proxy_models.data.tokenizer import (
    END_OF_TEXT,
    MIN_TRAINED_VOCAB,
    BytesTokenizer,
    FileTokenizer,
    Tokenizer,
    TokenizerSettings,
    smallest_dtype,
    train_bpe,
    train_unigram,
)
from proxy_models.data.tokenizer_process import LONGEST_WORD

WORDS = b"the loss falls as the width grows and the loss of the wide model is the loss we want\n" * 20
VARIED = WORDS + Path(__file__).read_bytes()
TEXT = st.text(st.characters(exclude_characters="\0\n", codec="utf-8"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe([WORDS], 280))
    return FileTokenizer(path)


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("unigram") / "tokenizer.json"
    path.write_text(train_unigram([VARIED], 290))
    return FileTokenizer(path)


@given(texts=st.lists(TEXT, min_size=1, max_size=5))
def test_text_goes_there_and_back(texts: list[str], bpe: FileTokenizer, unigram: FileTokenizer) -> None:
    tokenizers: list[Tokenizer] = [bpe, unigram, BytesTokenizer()]
    for tokenizer in tokenizers:
        encoded = tokenizer.encode([text.encode() for text in texts])
        assert [tokenizer.decode(tokens) for tokens in encoded] == texts
        assert all((tokens < tokenizer.vocab_size).all() for tokens in encoded)
        assert not any((tokens == tokenizer.end_of_document).any() for tokens in encoded)


def test_bpe_merges_what_is_frequent_and_trains_alike_every_time(bpe: FileTokenizer) -> None:
    assert bpe.vocab_size == 280
    tokens = bpe.encode([WORDS])[0]
    assert len(tokens) < 0.6 * len(WORDS)
    assert train_bpe([WORDS], 280) == train_bpe(iter([WORDS]), 280)


def test_unigram_takes_what_is_frequent_and_trains_alike_every_time(unigram: FileTokenizer) -> None:
    assert (unigram.vocab_size, unigram.end_of_document) == (290, 0)
    assert len(unigram.encode([WORDS])[0]) < 0.9 * len(WORDS)
    contents = {train_unigram(iter([VARIED]), 290) for _ in range(3)}
    assert len(contents) == 1
    with pytest.raises(CorpusError, match="vocab_size = 400"):
        train_unigram([WORDS], 400)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_special_token_in_a_text_is_text(kind: str, request: pytest.FixtureRequest) -> None:
    trained: FileTokenizer = request.getfixturevalue(kind)
    for text in (END_OF_TEXT, f"a{END_OF_TEXT}b", f" {END_OF_TEXT}\n"):
        tokens = trained.encode([text.encode()])[0]
        assert trained.end_of_document not in tokens
        assert trained.decode(tokens) == text


def test_an_end_that_is_an_ordinary_added_token_is_spelled_by_no_text(tmp_path: Path) -> None:
    content = json.loads(train_bpe([WORDS], 280))
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    given = FileTokenizer(tmp_path / "tokenizer.json")
    (tokens,) = given.encode([f"a{END_OF_TEXT}b".encode()])
    assert given.end_of_document not in tokens
    assert given.decode(tokens) == f"a{END_OF_TEXT}b"


ALPHABET = {letter: number for number, letter in enumerate("abcde")} | {"[UNK]": 5, "</s>": 6}
LOSSY: dict[str, Any] = {
    "words": tokenizers.models.WordLevel({"ab": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"),
    "pairs": tokenizers.models.BPE(ALPHABET, [], unk_token="[UNK]"),
    "fused pairs": tokenizers.models.BPE(ALPHABET, [], unk_token="[UNK]", fuse_unk=True),
    "pairs without an unknown token": tokenizers.models.BPE(ALPHABET, []),
    "pieces": tokenizers.models.Unigram([(piece, -1.0) for piece in ALPHABET], unk_id=5),
}


@pytest.mark.parametrize("name", LOSSY)
def test_text_that_a_tokenizer_cannot_represent_is_counted_and_a_corpus_warns(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizers.Tokenizer(LOSSY[name])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = FileTokenizer(tmp_path / "tokenizer.json")
    assert loaded.lost("ab ab\n ab") == 0
    assert loaded.lost("ab xé\n日") == 3
    settings = TokenizerSettings(kind="file", path=str(tmp_path / "tokenizer.json"))
    for other, n_warnings in (("ab ", 0), ("日 ", 1)):
        folder = tmp_path / other
        folder.mkdir()
        for number in range(9):
            (folder / f"{number}.txt").write_text(("ab " if number < 7 else other) * 99)
        source = Source(path=str(folder))
        write_corpus(tmp_path / str(n_warnings), source, validation_fraction=0.3, tokenizer=settings)
        assert len(caplog.records) == n_warnings


@given(text=TEXT)
def test_tokenizers_of_bytes_lose_nothing(text: str, bpe: FileTokenizer, unigram: FileTokenizer) -> None:
    assert [tokenizer.lost(text) for tokenizer in (bpe, unigram, BytesTokenizer())] == [0, 0, 0]


def test_ends_of_documents_are_ends_of_lines(bpe: FileTokenizer) -> None:
    end = np.array([bpe.end_of_document], dtype=np.uint32)
    first, second = bpe.encode([b"one", b"two"])
    assert bpe.decode(np.concatenate([first, end, second])) == "one\ntwo"
    assert BytesTokenizer().decode(np.frombuffer(b"one\0two", dtype=np.uint8)) == "one\ntwo"


def test_words_of_usual_length_train_the_tokenizer_that_the_library_trains() -> None:
    longest = "x" * LONGEST_WORD
    text = f"{WORDS.decode()} {longest} {'7' * LONGEST_WORD} {'-=' * (LONGEST_WORD // 2)}{' ' * LONGEST_WORD}don't 变分推断 é\r\n"
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    plain.train_from_iterator([text, "", WORDS.decode()], trainer)
    assert train_bpe([text.encode(), b"", WORDS], 300) == plain.to_str()


@pytest.mark.parametrize("unbroken", ["a", "7", "-", " ", "变"])
def test_words_beyond_the_longest_are_cut_for_training_and_kept_whole_in_encoding(
    unbroken: str, tmp_path: Path
) -> None:
    text = f"word {unbroken * 4 * LONGEST_WORD} word"
    (tmp_path / "tokenizer.json").write_text(content := train_bpe([text.encode()], 269))
    trained = FileTokenizer(tmp_path / "tokenizer.json")
    assert max(map(len, json.loads(content)["model"]["vocab"])) <= LONGEST_WORD * len(unbroken.encode())
    assert trained.decode(trained.encode([text.encode()])[0]) == text


def test_a_text_that_cannot_be_read_ends_the_training_with_its_own_error() -> None:
    def texts() -> Iterator[bytes]:
        yield WORDS * 1000
        raise CorpusError("the file is gone")

    with pytest.raises(CorpusError, match="the file is gone"):
        train_bpe(texts(), 280)


def test_a_training_process_that_fails_is_an_error_of_the_corpus() -> None:
    with pytest.raises(CorpusError):
        train_bpe([b"\xff", *([WORDS * 1000] * 10)], 280)


def test_too_little_text_for_a_vocabulary_is_reported() -> None:
    with pytest.raises(CorpusError, match="has pairs for a vocabulary of 259 only, got vocab_size = 300"):
        train_bpe([b"abc"], 300)


@given(vocab_size=st.integers(1, 2**32))
def test_the_type_is_the_smallest_that_fits_the_vocabulary(vocab_size: int) -> None:
    bits = np.dtype(smallest_dtype(vocab_size)).itemsize * 8
    assert vocab_size <= 2**bits
    assert bits == 8 or vocab_size > 2 ** (bits // 2)


def test_a_vocabulary_beyond_32_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="must fit in 32 bits, got a vocabulary of 4294967297"):
        smallest_dtype(2**32 + 1)


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, bpe: FileTokenizer) -> None:
    with pytest.raises(CorpusError, match=r"none.json: can't be read"):
        FileTokenizer(tmp_path / "none.json")
    path = tmp_path / "bad.json"
    path.write_text("{}")
    with pytest.raises(CorpusError, match=r"bad.json: not a tokenizer.json"):
        FileTokenizer(path)
    path.write_text(train_bpe([WORDS], 280).replace(END_OF_TEXT, "<done>"))
    with pytest.raises(CorpusError, match=r"bad.json: end_of_document"):
        FileTokenizer(path)
    with pytest.raises(CorpusError, match=r"end_of_document must.*got '<stop>'"):
        FileTokenizer(path, "<stop>")
    assert FileTokenizer(path, "<done>").key != bpe.key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "words"}, "kind must be one of bytes, bpe, unigram, file, got 'words'"),
        ({"kind": "bpe"}, "vocab_size .* got None"),
        ({"vocab_size": 300}, "vocab_size .* got 300"),
        ({"kind": "bpe", "vocab_size": 256}, "needs a vocab_size of at least 257, got 256"),
        ({"kind": "unigram", "vocab_size": 257}, f"at least {MIN_TRAINED_VOCAB['unigram']}, got 257"),
        ({"kind": "file"}, "path .* got None"),
        ({"end_of_document": "x"}, "end_of_document is for \"file\", got 'x'"),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerSettings(**values)  # type: ignore[arg-type]


def test_a_tokenizer_is_trained_on_a_sample_of_records_smaller_than_the_held_out_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"text": f"record {number} of many"}) + "\n" for number in range(4000)))
    monkeypatch.setattr(kept_tokenizer, "SAMPLE_BYTES", path.stat().st_size // 20)
    source = Source(path=str(path), kind="jsonl")
    file = SourceFile(path=path.name, bytes=path.stat().st_size, modified_ns=0, sha256="")
    text = TrainingText(sources={"own": source}, files={"own": [file]}, validation_fraction=0.1)
    read = list(text.read(PassProgress(None, {}, passes=1)))
    assert len(read) == pytest.approx(4000 * 0.9 / 20, rel=0.3)
