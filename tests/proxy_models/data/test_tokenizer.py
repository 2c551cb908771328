from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.data.sources import CorpusError
from proxy_models.data.tokenizer import (
    END_OF_TEXT,
    MIN_BPE_VOCAB,
    BytesTokenizer,
    FileTokenizer,
    Tokenizer,
    TokenizerSettings,
    smallest_dtype,
    train_bpe,
)

WORDS = b"the loss falls as the width grows and the loss of the wide model is the loss we want\n" * 20
TEXT = st.text(st.characters(exclude_characters="\0\n", codec="utf-8"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe([WORDS], 280))
    return FileTokenizer(path)


@given(texts=st.lists(TEXT, min_size=1, max_size=5))
def test_text_goes_there_and_back(texts: list[str], bpe: FileTokenizer) -> None:
    tokenizers: list[Tokenizer] = [bpe, BytesTokenizer()]
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


def test_a_special_token_in_a_text_is_text(bpe: FileTokenizer) -> None:
    tokens = bpe.encode([END_OF_TEXT.encode()])[0]
    assert bpe.end_of_document not in tokens
    assert bpe.decode(tokens) == END_OF_TEXT


def test_ends_of_documents_are_ends_of_lines(bpe: FileTokenizer) -> None:
    end = np.array([bpe.end_of_document], dtype=np.uint32)
    first, second = bpe.encode([b"one", b"two"])
    assert bpe.decode(np.concatenate([first, end, second])) == "one\ntwo"
    assert BytesTokenizer().decode(np.frombuffer(b"one\0two", dtype=np.uint8)) == "one\ntwo"


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
    with pytest.raises(CorpusError, match=r"bad.json: end_of_document must be stated: of .* the tokenizer has none"):
        FileTokenizer(path)
    with pytest.raises(CorpusError, match=r"end_of_document must be a token of this tokenizer, got '<stop>'"):
        FileTokenizer(path, "<stop>")
    assert FileTokenizer(path, "<done>").key != bpe.key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "words"}, "kind must be one of bytes, bpe, file, got 'words'"),
        ({"kind": "bpe"}, "vocab_size .* got None"),
        ({"vocab_size": 300}, "vocab_size .* got 300"),
        ({"kind": "bpe", "vocab_size": 256}, f"needs a vocab_size of at least {MIN_BPE_VOCAB}, got 256"),
        ({"kind": "file"}, "path .* got None"),
        ({"end_of_document": "x"}, "end_of_document is for \"file\", got 'x'"),
    ],
)
def test_contradictory_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerSettings(**values)  # type: ignore[arg-type]
