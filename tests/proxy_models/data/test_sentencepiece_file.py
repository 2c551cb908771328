"""SentencePiece models give the ids that the library gives."""

import io
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import CorpusError
from proxy_models.data.tokenizer import FileTokenizer, TokenizerSettings

sentencepiece: Any = pytest.importorskip("sentencepiece")

LINES = [line for line in Path(__file__).read_text().splitlines() if line.strip()] + [
    "Größe und naïve Fälle – 学习率",
    "L'été à Besançon, ça va?",
    "a  b\t c",
] * 9
SYMBOL = "<sep>"
Normalization = Literal["nmt_nfkc", "nfkc", "identity"]
CASES: list[tuple[str, bool, Normalization]] = [
    (kind, byte_fallback, normalization)
    for kind in ("bpe", "unigram")
    for byte_fallback in (True, False)
    for normalization in cast("tuple[Normalization, ...]", ("nmt_nfkc", "nfkc", "identity"))
]
SCRIPTS = (
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x391, 0x3C9),
    (0x400, 0x4FF),
    (0x627, 0x64A),
    (0xE01, 0xE2E),
    (0x3041, 0x3096),
)
MORE_SCRIPTS = ((0x4E00, 0x4FFF), (0xAC00, 0xADFF), (0xFF01, 0xFF5E), (0x1F600, 0x1F64F))
ODD = [
    " ",
    "  ",
    "\n",
    "\t",
    " \r\n ",
    "▁",
    "\u3000",
    "\u00a0",
    "</s>",
    "<s>",
    "<unk>",
    "<0x41>",
    SYMBOL,
    "e\u0301",
    "\n\u05b0",
]


def train(
    kind: str, byte_fallback: bool, normalization: Normalization, lines: Sequence[str] = LINES, **changed: Any
) -> bytes:
    out, plain = io.BytesIO(), normalization == "identity"
    settings = {
        "vocab_size": 560,
        "byte_fallback": byte_fallback,
        "normalization_rule_name": normalization,
        "add_dummy_prefix": not plain,
        "remove_extra_whitespaces": not plain,
        "split_by_whitespace": kind == "bpe" or not plain,
        "allow_whitespace_only_pieces": plain,
        "user_defined_symbols": [SYMBOL] if byte_fallback else [],
        "hard_vocab_limit": False,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type=kind, **{**settings, **changed}
    )
    return out.getvalue()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FileTokenizer, Any]:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(train(*request.param))
    return FileTokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))


def total(library: Any, ids: list[int]) -> float:
    return math.fsum(library.get_score(one) for one in ids)


def mixed(draw: random.Random) -> str:
    def part() -> str:
        low, high = draw.choice(SCRIPTS + MORE_SCRIPTS)
        letters = "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 5)))
        return draw.choice([draw.choice(ODD), draw.choice(LINES)[:30], letters])

    return "".join(part() for _ in range(draw.randint(1, 8)))


def test_ids_are_those_of_the_library(pair: tuple[FileTokenizer, Any]) -> None:
    (ours, library), is_unigram = pair, '"Unigram"' in pair[0].to_json()
    draw = random.Random(1)
    texts = [text for text in (mixed(draw) for _ in range(1500)) if text.strip() != SYMBOL]
    found = ours.encode([text.encode() for text in texts])
    for text, ids in zip(texts, found, strict=True):
        ours_there, theirs = ids.tolist(), library.encode(text)
        tie = is_unigram and math.isclose(total(library, ours_there), total(library, theirs), rel_tol=1e-5)
        assert ours_there == theirs or tie, text
    assert ours.vocab_size == library.get_piece_size()
    assert ours.end_of_document == library.eos_id()
    assert (ours.end_name, ours.name.split()[0]) == ("</s>", "SentencePiece")


def test_text_never_becomes_a_control_token_and_is_decoded_as_the_library_does(pair: tuple[FileTokenizer, Any]) -> None:
    ours, library = pair
    control = {library.unk_id(), library.bos_id(), library.eos_id()}
    for text in ("</s>", "a</s>b", "<s> x </s>", "<unk>", "<0x41>", "one  two\nthree"):
        (ids,) = ours.encode([text.encode()])
        if library.unk_id() not in library.encode(text):
            assert not control & set(ids.tolist())
            assert ours.decode(ids) == library.decode(ids.tolist())


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def lossless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("lossless") / "tokenizer.model"
    path.write_bytes(train(request.param, True, "identity"))
    return FileTokenizer(path)


@given(texts=st.lists(st.text(st.characters(exclude_characters="\n▁", codec="utf-8")), min_size=1, max_size=5))
def test_text_goes_there_and_back(texts: list[str], lossless: FileTokenizer) -> None:
    assert [lossless.decode(ids) for ids in lossless.encode([text.encode() for text in texts])] == texts


def test_a_corpus_keeps_the_converted_tokenizer_and_is_identified_by_the_file(tmp_path: Path) -> None:
    content = train("bpe", True, "identity")
    for name in ("one.model", "two.model"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "text.txt").write_text(text := "\n".join(LINES))
    keys = set()
    for name in ("one.model", "two.model"):
        settings = TokenizerSettings(kind="file", path=str(tmp_path / name))
        corpus = write_corpus(tmp_path / "corpus", str(tmp_path / "text.txt"), tokenizer=settings)
        keys.add(corpus.key)
    assert len(keys) == 1
    kept = corpus.tokenizer()
    assert isinstance(kept, FileTokenizer)
    assert kept.key == FileTokenizer(tmp_path / "one.model").key
    assert text.startswith(kept.decode(np.asarray(corpus.train)[:40]))


@pytest.mark.parametrize("content", [b"", b"garbage....", b"{}", b"IQ== 0\nIg== 1\n"])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"tokenizer.model: not a SentencePiece model"):
        FileTokenizer(path)


def test_a_model_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    whole = train("bpe", True, "identity")
    for size in (len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusError, match=r"tokenizer.model: "):
            FileTokenizer(path)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"model_type": "char"}, "model_type"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_models_of_other_kinds_are_refused(changed: dict[str, Any], rule: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train(changed.pop("model_type", "bpe"), True, "nmt_nfkc", **changed))
    with pytest.raises(CorpusError, match=rule):
        FileTokenizer(path)


def test_names_of_tokens_are_text_even_if_their_characters_are_unknown(tmp_path: Path) -> None:
    path, lines = tmp_path / "tokenizer.model", ["abc abd bcd bda acd s/"] * 50
    path.write_bytes(train("bpe", False, "nmt_nfkc", lines=lines, vocab_size=14))
    ours, library = FileTokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in ("</s>", "ab </s>cd", "<unk><s>"):
        (ids,) = ours.encode([text.encode()])
        assert ids.tolist() == library.encode(text)
        assert ours.end_of_document not in ids
    path.write_bytes(train("unigram", False, "nmt_nfkc", lines=lines, vocab_size=14, control_symbols=["@@"]))
    with pytest.raises(CorpusError, match=r"can't be converted: 'a@@b"):  # none of its characters has a piece
        FileTokenizer(path)


def test_a_model_whose_ids_would_differ_is_refused(tmp_path: Path) -> None:
    model = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    model.ParseFromString(train("bpe", True, "identity"))
    for piece in model.pieces:  # of equal scores, the library takes the leftmost pair, and tokenizers the first merge
        piece.score = -1.0
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CorpusError, match=r"tokenizer.model: can't be converted"):
        FileTokenizer(path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train("bpe", True, "identity"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(CorpusError, match=r"muscale\[data\]"):
        FileTokenizer(path)


def test_a_closing_token_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train("bpe", True, "identity"))
    named = FileTokenizer(path, "<s>")
    assert (named.end_name, named.end_of_document) == ("<s>", 1)
    assert named.name != FileTokenizer(path).name
    path.write_bytes(train("bpe", True, "identity", eos_id=-1))
    with pytest.raises(CorpusError, match="end_of_document must be stated"):
        FileTokenizer(path)
