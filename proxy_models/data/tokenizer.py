"""Tokenizers: bytes, byte-level BPE or Unigram trained on the corpus, any `tokenizer.json`, or a SentencePiece model.

A special token closes every document. Text can't produce that token: with bytes it is byte 0, which no text
contains, and otherwise special tokens that are spelled out in a text are encoded as plain characters.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from proxy_models.data import sentencepiece_file
from proxy_models.data.sources import CorpusError, TokenDtype

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Loaded

TokenizerKind = Literal["bytes", "bpe", "unigram", "file"]
Tokens = NDArray[np.unsignedinteger[Any]]
END_OF_TEXT = "<|endoftext|>"
BYTE_ALPHABET = 256
MIN_TRAINED_VOCAB = {"bpe": BYTE_ALPHABET + 1, "unigram": BYTE_ALPHABET + 2}
"""Smallest vocabularies: every byte, the closing token, and for Unigram a piece, without which its trainer ignores the size."""
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer(Protocol):
    """Interface of a corpus's tokenizer.

    Attributes:
        key: Identifier; tokenizers with equal keys encode equally.
        vocab_size: Upper limit of ids, exclusive.
        end_of_document: Id that closes a document.
    """

    @property
    def key(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the ids of each UTF-8 text, without added tokens."""

    def decode(self, tokens: Tokens) -> str:
        """Return the text of ids; each end of a document becomes a newline."""

    def lost(self, text: str) -> int:
        """Return how many characters, without white space, become the unknown token or no token."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Choice of the tokenizer for writing a corpus.

    Attributes:
        kind: "bytes"; "bpe" or "unigram", trained on the training split of the corpus; or "file", a `tokenizer.json` or a
            SentencePiece `.model`.
        vocab_size: Number of ids of a trained tokenizer, including the closing token and the 256 bytes.
        end_of_document: Token of a "file" that closes documents; None: that of the SentencePiece model, or the only usual name that
            the tokenizer has.
    """

    kind: TokenizerKind = "bytes"
    vocab_size: int | None = None
    path: str | None = None
    end_of_document: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(TokenizerKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(TokenizerKind))}, got {self.kind!r}")
        if self.is_trained != (self.vocab_size is not None):
            raise ValueError(
                f'vocab_size must be given for "bpe" and "unigram" and only for them, got {self.vocab_size} for {self.kind!r}'
            )
        if self.vocab_size is not None and self.vocab_size < (least := MIN_TRAINED_VOCAB[self.kind]):
            raise ValueError(f"a byte-level {self.kind} needs a vocab_size of at least {least}, got {self.vocab_size}")
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(f'path must be given for "file" and only for it, got {self.path!r} for {self.kind!r}')
        if self.end_of_document is not None and self.kind != "file":
            raise ValueError(f'end_of_document is for "file", got {self.end_of_document!r} for {self.kind!r}')

    @property
    def is_trained(self) -> bool:
        """True if the tokenizer is trained on the corpus."""
        return self.kind in MIN_TRAINED_VOCAB


BYTES = TokenizerSettings()


@dataclass(frozen=True, kw_only=True)
class BytesTokenizer:
    """Tokenizer with a token per byte; byte 0 closes documents."""

    key: str = "bytes"
    vocab_size: int = BYTE_ALPHABET
    end_of_document: int = 0

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the bytes of each text."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def lost(self, text: str) -> int:
        """Return 0: every byte has a token."""
        return 0

    def decode(self, tokens: Tokens) -> str:
        """Return the text; a truncated character becomes U+FFFD."""
        return tokens.astype(np.uint8).tobytes().replace(b"\0", b"\n").decode(errors="replace")


class FileTokenizer:
    """Tokenizer from a `tokenizer.json`, or from a SentencePiece `.model` that is converted to one; the tokenizers library reads it.

    Attributes:
        content: Content of the `tokenizer.json`.
        name: Kind and hash of the given file.
    """

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        """Read a tokenizer.

        Raises:
            CorpusError: If the file can't be read, or lacks the token that closes documents.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"{path}: can't be read ({error.strerror})") from error
        given, kind, end = content, "tokenizer.json", None
        if path.suffix == sentencepiece_file.SUFFIX:
            converted, end = sentencepiece_file.converted(content, path)
            content, kind = converted.encode(), "SentencePiece"
        self._loaded = load_json(content, path)
        self._loaded.no_truncation()
        self._loaded.no_padding()
        self._loaded.encode_special_tokens = True
        self.end_name = end_of_document or end or _usual_end(self._loaded, path)
        self._reserve_end()
        identifier = self._loaded.token_to_id(self.end_name)
        if identifier is None:
            raise CorpusError(f"{path}: end_of_document must be a token of this tokenizer, got {self.end_name!r}")
        self.content = content
        self.key = self._key(content)
        self.name = f"{kind} {self._key(given)}"
        self.vocab_size = max(self._loaded.get_vocab().values()) + 1
        self.end_of_document: int = identifier
        self._unknown = _unknown(json.loads(self._loaded.to_str())["model"])

    def _reserve_end(self) -> None:
        """Mark an added token that closes documents as special, so that no text spells it."""
        import tokenizers

        added = {token.content: token.special for token in self._loaded.get_added_tokens_decoder().values()}
        if added.get(self.end_name) is False:
            self._loaded.add_special_tokens([tokenizers.AddedToken(self.end_name, special=True, normalized=False)])

    def _key(self, content: bytes) -> str:
        return hashlib.sha256(content + self.end_name.encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the ids of each text, computed in parallel."""
        encodings = self._loaded.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Tokens) -> str:
        """Return the text; a truncated character becomes U+FFFD."""
        ends = np.flatnonzero(tokens == self.end_of_document)
        return "\n".join(
            self._loaded.decode(part[part != self.end_of_document].tolist()) for part in np.split(tokens, ends)
        )

    def lost(self, text: str) -> int:
        """Return how many characters, without white space, become the unknown token or no token."""
        encoding, kept = self._loaded.encode(text, add_special_tokens=False), np.zeros(len(text), dtype=np.bool_)
        for identifier, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if identifier != self._unknown:
                kept[start:end] = True
        return sum(not text[position].isspace() for position in np.flatnonzero(~kept))

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json` without truncation and padding."""
        return self._loaded.to_str()


def smallest_dtype(vocab_size: int) -> TokenDtype:
    """Return the smallest unsigned type that holds every id below `vocab_size`."""
    for name in get_args(TokenDtype):
        if vocab_size - 1 <= np.iinfo(name).max:
            found: TokenDtype = name
            return found
    raise ValueError(f"token ids must fit in 32 bits, got a vocabulary of {vocab_size}")


def stored_dtype(name: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the type of ids in a file: little-endian on every machine; signed if some tokens do not count (`uncounted`)."""
    return np.dtype(name).newbyteorder("<")


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> str:
    """Train byte-level BPE (Sennrich et al., arXiv 1508.07909; Radford et al., 2019, section 2.2).

    Memory grows with the number of distinct words, not with the length of the text. Words longer than
    `tokenizer_process.LONGEST_WORD` are cut during training; the tokenizer does not cut them.

    Returns:
        The content of a `tokenizer.json`; its token 0 closes documents.

    Raises:
        CorpusError: If the texts have too few distinct pairs for `vocab_size`, or the training process fails.
    """
    return _trained("bpe", texts, vocab_size)


def train_unigram(texts: Iterable[bytes], vocab_size: int) -> str:
    """Train a byte-level Unigram language model (Kudo, arXiv 1804.10959); it takes and gives the same as `train_bpe`."""
    return _trained("unigram", texts, vocab_size)


def _trained(kind: str, texts: Iterable[bytes], vocab_size: int) -> str:
    import tokenizers

    content = _in_process(texts, kind, str(vocab_size), END_OF_TEXT)
    if (found := tokenizers.Tokenizer.from_str(content).get_vocab_size()) != vocab_size:
        raise CorpusError(
            f"the training text has {'pairs' if kind == 'bpe' else 'pieces'} for a vocabulary of {found} only, got "
            f"vocab_size = {vocab_size}; use more text or a smaller vocabulary"
        )
    return content


def _in_process(texts: Iterable[bytes], *arguments: str) -> str:
    """Return the output of `tokenizer_process.py`; an error or interruption in the caller ends that process."""
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", Path(__file__).with_name("tokenizer_process.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        process_group=0,  # Ctrl-C in a terminal then reaches only the caller
    ) as process:
        stdin = cast("IO[bytes]", process.stdin)
        try:
            with suppress(BrokenPipeError):  # the process failed; its exit code is checked below
                for text in texts:
                    stdin.write(len(text).to_bytes(8) + text)
            content, _ = process.communicate()
        finally:
            process.kill()  # has no effect if the process has ended
            with suppress(BrokenPipeError):
                stdin.close()
            process.wait()  # after an interruption, `with` does not wait
    if process.returncode:
        raise CorpusError(
            f"the process that trains the tokenizer must exit with 0, got {process.returncode}; "
            "if its memory ran out (-9), use less text"
        )
    return str(content, "utf-8")


def load_json(content: bytes, path: Path) -> Loaded:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise CorpusError(f"{path}: not a tokenizer.json ({error})") from error


def _unknown(model: Mapping[str, Any]) -> int | None:
    """Return the id that a model gives to what it has no token for; Unigram states the id, other models the token."""
    found: int | None = model["unk_id"] if "unk_id" in model else model["vocab"].get(model["unk_token"])
    return found


def _usual_end(loaded: Loaded, path: Path) -> str:
    found = [name for name in _KNOWN_ENDS if loaded.token_to_id(name) is not None]
    if len(found) != 1:
        raise CorpusError(
            f"{path}: end_of_document must be stated: of {', '.join(_KNOWN_ENDS)} the tokenizer has "
            f"{', '.join(found) or 'none'}"
        )
    return found[0]
