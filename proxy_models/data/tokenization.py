"""Tokenization of a source into blocks of ids, each checked and counted, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from proxy_models.data.documents import Piece, ReadReport, batches, in_validation, pieces, read_files
from proxy_models.data.sources import CorpusError, Source, Split
from proxy_models.data.token_ids import Ids, TokenIndex, open_ids
from proxy_models.data.tokenizer import Tokenizer, Tokens

BATCH_BYTES = 4 << 20  # text that is encoded at a time; the encoder holds about a hundred times as many bytes
_BLOCK_TOKENS = 1 << 20
_SAMPLE_BYTES, _SAMPLE_PIECES = 64 << 10, 256
"""Size of the sample of each batch that estimates the share of text that the tokenizer can't represent."""
_IS_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBlock:
    """Some tokens of one file and one split.

    Attributes:
        file: File that was read, relative to the source's root.
        split: Side that the tokens are on.
        tokens: Ids, including closing tokens.
        done_bytes: Bytes of the file that have been read.
        n_bytes: Bytes of text that the block encodes.
        n_words: Words in the text: runs of characters without ASCII white space.
        counts: Whether the tokens count in the loss.
    """

    file: str
    split: Split
    tokens: Tokens
    done_bytes: int
    n_documents: int = 0
    n_bytes: int = 0
    n_words: int = 0
    counts: bool = True


def blocks(
    source: Source, tokenizer: Tokenizer, validation_fraction: float, report: ReadReport
) -> Iterator[TokenBlock]:
    """Yield every token of a source, file after file.

    Args:
        report: As in `pieces`.

    Raises:
        CorpusError: If a file can't be read or is broken, or an id is outside the vocabulary.
    """
    if source.kind == "tokens":
        return read_files(source, lambda path, name: _token_blocks(path, name, source, validation_fraction), report)
    return _text_blocks(pieces(source, validation_fraction, report), tokenizer, report)


def _text_blocks(stream: Iterator[Piece], tokenizer: Tokenizer, report: ReadReport) -> Iterator[TokenBlock]:
    for batch in batches(stream, BATCH_BYTES):
        chosen = batch[:: 1 + len(batch) // _SAMPLE_PIECES]
        sample = b"\n".join(piece.content[: _SAMPLE_BYTES // len(chosen)] for piece in chosen).decode(errors="ignore")
        report.sampled += len("".join(sample.split()))
        report.lost += tokenizer.lost(sample)
        for piece, tokens in zip(batch, tokenizer.encode([piece.content for piece in batch]), strict=True):
            yield TokenBlock(
                file=piece.read_from,
                split=piece.split,
                tokens=np.append(tokens, tokens.dtype.type(tokenizer.end_of_document)) if piece.closes else tokens,
                done_bytes=piece.done_bytes,
                n_documents=int(piece.closes),
                n_bytes=len(piece.content),
                n_words=_count_words(piece.content),
                counts=piece.counts,
            )


def _token_blocks(path: Path, name: str, source: Source, validation_fraction: float) -> Iterator[TokenBlock]:
    """Yield the ids of a file, whose last part is held out; if the file states documents, a hash holds out whole documents."""
    ids, index = open_ids(path, source)
    vocab_size = source.vocab_size or 0
    for split, first, end in _sides(ids, index, validation_fraction):
        for start in range(first, end, _BLOCK_TOKENS):
            block = np.asarray(ids[start : min(end, start + _BLOCK_TOKENS)])
            beyond = np.flatnonzero((block < 0) | (block >= vocab_size))
            if len(beyond):
                raise CorpusError(
                    f"{path}: token {start + beyond[0]}: ids must lie below vocab_size = {vocab_size}, "
                    f"got {block[beyond[0]]}"
                )
            done = (start + len(block)) * ids.itemsize
            yield TokenBlock(file=name, split=split, tokens=cast("Tokens", block), done_bytes=done)


def _sides(ids: Ids, index: TokenIndex | None, fraction: float) -> Iterator[tuple[Split, int, int]]:
    if index is None:
        held_out = len(ids) - int(len(ids) * fraction)
        yield from (("train", 0, held_out), ("validation", held_out, len(ids)))
        return
    for first, end in index.documents(len(ids)):
        yield "validation" if in_validation(ids[first:end].tobytes(), fraction) else "train", first, end


def _count_words(text: bytes) -> int:
    """Count runs of bytes without ASCII white space."""
    in_word = ~_IS_SPACE[np.frombuffer(text, dtype=np.uint8)]
    return int(np.count_nonzero(in_word[1:] & ~in_word[:-1])) + int(in_word[:1].any())
