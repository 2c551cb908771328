"""Tokenization of a source into blocks of ids, each checked and counted, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from proxy_models.data.documents import Piece, Split, pieces
from proxy_models.data.sources import CorpusError, Source
from proxy_models.data.tokenizer import Tokenizer, Tokens, stored_dtype

BATCH_BYTES = 4 << 20  # text that is encoded at a time; the encoder holds about a hundred times as many bytes
_BLOCK_TOKENS = 1 << 20
_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBlock:
    """Some tokens of one file and one split.

    Attributes:
        file: Path relative to the source's root.
        split: Side that the tokens are on.
        tokens: Ids, including closing tokens.
        done_bytes: Bytes of the file that have been read.
        n_bytes: Bytes of text that the block encodes.
        n_words: Words in the text: runs of characters without ASCII white space.
    """

    file: str
    split: Split
    tokens: Tokens
    done_bytes: int
    n_documents: int = 0
    n_bytes: int = 0
    n_words: int = 0


def blocks(source: Source, tokenizer: Tokenizer, validation_fraction: float) -> Iterator[TokenBlock]:
    """Yield every token of a source, file after file.

    Raises:
        CorpusError: If a file can't be read or is broken, or an id is outside the vocabulary.
    """
    if source.kind == "tokens":
        return _token_blocks(source, validation_fraction)
    return _text_blocks(source, tokenizer, validation_fraction)


def _text_blocks(source: Source, tokenizer: Tokenizer, validation_fraction: float) -> Iterator[TokenBlock]:
    for batch in _batches(pieces(source, validation_fraction)):
        for piece, tokens in zip(batch, tokenizer.encode([piece.content for piece in batch]), strict=True):
            yield TokenBlock(
                file=piece.file,
                split=piece.split,
                tokens=np.append(tokens, tokens.dtype.type(tokenizer.end_of_document)) if piece.closes else tokens,
                done_bytes=piece.done_bytes,
                n_documents=int(piece.closes),
                n_bytes=len(piece.content),
                n_words=_count_words(piece.content),
            )


def _batches(stream: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in stream:
        batch.append(piece)
        size += len(piece.content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _token_blocks(source: Source, validation_fraction: float) -> Iterator[TokenBlock]:
    root, paths = source.files()
    dtype = stored_dtype(str(source.dtype))
    for path in paths:
        size = path.stat().st_size
        if not size:
            raise CorpusError(f"{path}: the file is empty; it must hold at least one token")
        if size % dtype.itemsize:
            raise CorpusError(f"{path}: the size must be a multiple of {dtype.itemsize} ({source.dtype}), got {size}")
        tokens = np.memmap(path, dtype=dtype, mode="r")
        held_out = len(tokens) - int(len(tokens) * validation_fraction)
        bounds: tuple[tuple[Split, int, int], ...] = (("train", 0, held_out), ("validation", held_out, len(tokens)))
        for split, first, end in bounds:
            for start in range(first, end, _BLOCK_TOKENS):
                block = np.asarray(tokens[start : min(end, start + _BLOCK_TOKENS)])
                beyond = np.flatnonzero(block >= source.vocab_size)
                if len(beyond):
                    raise CorpusError(
                        f"{path}: token {start + beyond[0]}: ids must lie below vocab_size = {source.vocab_size}, "
                        f"got {block[beyond[0]]}"
                    )
                done = (start + len(block)) * dtype.itemsize
                yield TokenBlock(file=path.relative_to(root).as_posix(), split=split, tokens=block, done_bytes=done)


def _count_words(text: bytes) -> int:
    """Count runs of bytes without ASCII white space."""
    in_word = ~_IS_SPACE[np.frombuffer(text, dtype=np.uint8)]
    return int(np.count_nonzero(in_word[1:] & ~in_word[:-1])) + int(in_word[:1].any())
