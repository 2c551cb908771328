"""SentencePiece model files, converted to a `tokenizer.json` that gives the same ids.

Everything that reads a `tokenizer.json` then works unchanged: encoding, generation, exports, bundles. The conversion is compared with
the sentencepiece library on samples. What the two are known to do differently is in docs/models.md.
"""

from __future__ import annotations

import math
import random
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy_models.data.sources import CorpusError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIX = ".model"
_SPACE = "▁"
_WORDS = f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"
_N_MIXED = 500  # samples of mixed pieces, in addition to `_TEXTS` and the names of tokens
_TEXTS = (
    "The loss falls  as the width grows; by 3.25 % in 1,024 steps.",
    " a space first, two last  ",
    "def f(x):\n\tif x:\r\n\t\treturn {'a': [1, 2]}  # <b>bold</b>\n",
    "Größe, naïveté, čeština, ﬁne ½ ™ №",
    "Скорость обучения падает, když šířka roste. Ο ρυθμός μειώνεται.",
    "קצב הלמידה יורד. معدل التعلم ينخفض. सीखने की दर घटती है। อัตราการเรียนรู้ลดลง",
    "学习率随着宽度下降。学習率はバッチで変わる。학습률이 낮아진다.",
    "🙂👍🏽👩‍👩‍👧 → ∑ ≤ ∞\u00a0\u3000\u2028\ufeff",
    "    indented\n\n\n        more",
    "1234567890 3.14159 0x1F __init__ ========",
    "",
    "   ",
)


class Kind(IntEnum):
    """Kinds of pieces, as the file numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class VocabularyPiece:
    """A piece of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Model:
    """The fields of a model file that determine its ids."""

    pieces: Sequence[VocabularyPiece]
    is_bpe: bool
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    def of(self, *kinds: Kind) -> list[str]:
        """Return the texts of the pieces of these kinds."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def converted(content: bytes, path: Path) -> tuple[str, str | None]:
    """Return the `tokenizer.json` of a SentencePiece model, and the name of its closing token if it has one.

    Raises:
        CorpusError: If the library is missing, the file is no such model, or the conversion would give other ids.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise CorpusError(
            f"{path}: a SentencePiece model needs the sentencepiece library: pip install 'muscale[data]'"
        ) from error
    try:
        library: Any = SentencePieceProcessor()
        library.LoadFromSerializedProto(content)
        tokenizer = _tokenizer(model := _parsed(content))
    except (RuntimeError, ValueError, LookupError, struct.error) as error:
        raise CorpusError(f"{path}: not a SentencePiece model that can be converted ({error})") from error
    _require_same_ids(tokenizer, library, model, path)
    end = library.eos_id()
    return tokenizer.to_str(), None if end < 0 else library.id_to_piece(end)


def _parsed(content: bytes) -> Model:
    """Read the fields by their numbers in sentencepiece_model.proto.

    The library's own Python module for it refuses every release of protobuf but the newest.

    Raises:
        ValueError: If the model has what can't be converted.
    """
    message = _fields(content)
    trainer, normalizer = (_fields(message[number][-1]) if message[number] else {} for number in (2, 3))
    model_type = _last(trainer, 3, 1)
    pieces = [_piece(_fields(piece)) for piece in message[1]]
    broken = {
        "model_type must be 1 (UNIGRAM) or 2 (BPE)": model_type not in (1, 2),
        "treat_whitespace_as_suffix must be off": _last(trainer, 24, 0),
        "escape_whitespaces must be on": not _last(normalizer, 5, 1),
        "no piece may be UNUSED": any(piece.kind is Kind.UNUSED for piece in pieces),
    }
    if found := [rule for rule, is_broken in broken.items() if is_broken]:
        raise ValueError(f"{', '.join(found)}; give a tokenizer.json instead")
    return Model(
        pieces=pieces,
        is_bpe=model_type == 2,
        byte_fallback=bool(_last(trainer, 35, 0)),
        charsmap=_last(normalizer, 2, b""),
        add_dummy_prefix=bool(_last(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_last(normalizer, 4, 1)),
    )


def _piece(fields: Mapping[int, list[Any]]) -> VocabularyPiece:
    (score,) = struct.unpack("<f", _last(fields, 2, bytes(4)))
    return VocabularyPiece(text=_last(fields, 1, b"").decode(), score=score, kind=Kind(_last(fields, 3, Kind.NORMAL)))


def _last(fields: Mapping[int, list[Any]], number: int, default: Any) -> Any:
    return fields[number][-1] if fields.get(number) else default


def _fields(message: bytes) -> defaultdict[int, list[Any]]:
    """Return the values of a protobuf message by field: integers, and everything else as bytes."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    at = 0

    def integer() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(integer(), 8)
        if wire == 0:
            found[number].append(integer())
            continue
        size = integer() if wire == 2 else {1: 8, 5: 4}[wire]
        found[number].append(message[at : at + size])
        at += size
    return found


def _tokenizer(model: Model) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE, Unigram

    normal, symbols = model.of(Kind.NORMAL), model.of(Kind.USER_DEFINED)
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    (unknown,) = model.of(Kind.UNKNOWN)
    tokenizer = Tokenizer(
        BPE(ids, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        if model.is_bpe
        else Unigram(_scored(model), unk_id=ids[unknown], byte_fallback=model.byte_fallback)
    )
    tokenizer.normalizer = _normalizer(model)
    if _SPACE in normal and not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in (*normal, *symbols)):
        # No piece goes beyond a word, so that words encode separately: the same ids, several times as fast.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = model.of(Kind.UNKNOWN, Kind.CONTROL)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if model.is_bpe:  # Unigram has them in its vocabulary, with the scores by which they win
        tokenizer.add_tokens([AddedToken(name, normalized=True) for name in symbols])
    tokenizer.encode_special_tokens = True
    return tokenizer


def _scored(model: Model) -> list[tuple[str, float]]:
    """Return the pieces of a Unigram model with scores by which text never becomes a control token or the name of a byte.

    The sentencepiece library keeps these two out of its search, and tokenizers does not. Here every piece has a bonus for each of its
    characters, which favours no way to cut a text. Control tokens and bytes have the bonus of one character only, so they lose. A
    character that no piece has costs 10 more than the least score, which gives it the same cost in both libraries.
    """
    scores = [piece.score for piece in model.pieces if piece.kind is Kind.NORMAL]
    bonus = 32.0 + math.ceil(-2 * min(scores))

    def score(piece: VocabularyPiece) -> float:
        if piece.kind is Kind.NORMAL:
            return piece.score + bonus * len(piece.text)
        if piece.kind is Kind.USER_DEFINED:  # as the sentencepiece library scores it
            return len(piece.text.encode()) * max(scores) - 0.1 + bonus * len(piece.text)
        return min(scores) + bonus

    return [(piece.text, score(piece)) for piece in model.pieces]


def _merges(model: Model) -> list[tuple[str, str]]:
    """Return every pair of pieces whose union is a piece, the best unions first."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is Kind.NORMAL}
    best = sorted(scores, key=lambda text: -scores[text])
    cuts = ((text[:at], text[at:]) for text in best for at in range(1, len(text)))
    return [(left, right) for left, right in cuts if left in scores and right in scores]


def _normalizer(model: Model) -> Any:
    """Return the steps before the search."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.charsmap:
        mapped = normalizers.Precompiled(model.charsmap)
        everything = (chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
        spaces = "".join(re.escape(one) for one in everything if one != " " and mapped.normalize_str(one) == " ")
        # Mapped first, since `Precompiled` drops a combining mark that follows such a space.
        steps += [normalizers.Replace(Regex(f"[{spaces}]"), " ")] * bool(spaces) + [mapped]
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:  # but not for a symbol that is added to BPE, since `tokenizers` normalizes it, too
        symbols = model.of(Kind.USER_DEFINED) if model.is_bpe else []
        kept = "".join(f"|{re.escape(symbol)}\\z" for symbol in symbols)
        steps.append(normalizers.Replace(Regex(f"\\A(?!\\z{kept})"), _SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{_SPACE}+\\z"), ""))
    return normalizers.Sequence(steps)


def _require_same_ids(tokenizer: Tokenizer, library: Any, model: Model, path: Path) -> None:
    for text in _samples(model):
        ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, library.encode(text)
        if ours != theirs and not _is_tie(model, ours, theirs):
            raise CorpusError(
                f"{path}: can't be converted: {text!r} must have the library's ids {theirs}, got {ours}; give a tokenizer.json instead"
            )


def _is_tie(model: Model, one: list[int], other: list[int]) -> bool:
    """Whether a Unigram model scores both cuts of a text equally, as far as the sentencepiece library's 32 bits show."""
    totals = (math.fsum(model.pieces[number].score for number in ids) for ids in (one, other))
    different = {*one} ^ {*other}
    normal = all(model.pieces[number].kind is Kind.NORMAL for number in different)
    return not model.is_bpe and normal and math.isclose(*totals, rel_tol=1e-5)


def _samples(model: Model) -> Iterator[str]:
    yield from _TEXTS
    yield from (f"a{piece.text}b {piece.text} c" for piece in model.pieces if piece.kind is not Kind.NORMAL)
    texts = [text.replace(_SPACE, " ") for text in model.of(Kind.NORMAL)]
    plain = [text for text in texts if text.isascii() or text.strip().isalpha()]  # marks alone are no text
    draw = random.Random(0)  # noqa: S311
    yield from ("".join(draw.choices(plain, k=12)) for _ in range(_N_MIXED if plain else 0))
