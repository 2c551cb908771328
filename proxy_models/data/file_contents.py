"""The content of a source's text file as UTF-8: decompressed (gzip, Zstandard) and decoded while it is read.

UTF-8 is never guessed at. Other encodings come from the source's `encoding`, from a byte order mark, or from charset-normalizer,
whose answer counts only if no other usual encoding explains the bytes about as well.
"""

from __future__ import annotations

import codecs
import io
import os
from pathlib import Path
from typing import Any

from proxy_models.data.sources import CorpusError, decompressor

UTF8 = "utf-8"
# beginning of a file from which its encoding is detected; a file that is ASCII up to there counts as UTF-8
HEAD_BYTES = 1 << 20
_CODECS = {"gunzip": "gzip", "zstd -d": "zstd"}
_MARKS = {  # longest first: the mark of UTF-16 begins that of UTF-32
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Encodings that are detected. With all of the library's, French in cp1252 was read as cp1257 and Polish as iso8859_10 (tried here).
_USUAL = [
    "cp1252",
    "cp1251",
    "cp1250",
    "iso8859_2",
    "cp1253",
    "cp1254",
    "koi8_r",
    "cp932",
    "euc_jp",
    "gb18030",
    "big5",
    "cp949",
]
# Margins within which another reading of the bytes is about as good, of the library's two scores between 0 and 1. Chosen and
# measured on the same 31 short texts, in 14 languages and code: 17 right, 13 without an answer (French, Czech, Hungarian, Turkish,
# and encodings that are not in the list), 1 wrong: ISO-2022-JP is ASCII byte by byte, so it counts as UTF-8 and must be stated.
_MESS, _COHERENCE = 0.02, 0.05


def open_content(path: Path, encoding: str = UTF8) -> Content:
    """Open a file for reading as UTF-8.

    Raises:
        CorpusError: If the file can't be opened, or is compressed by a program that is not supported. Reading raises it, too, if
            the compressed bytes are damaged or the encoding is another.
    """
    try:
        tool = decompressor(path)
        if tool and tool not in _CODECS:
            raise CorpusError(f"{path}: is compressed; decompress it, as with `{tool}`")
        if not tool and encoding == UTF8:
            return Content(io.FileIO(path))
        return Content(_Converted(path, _CODECS.get(tool, ""), encoding))
    except OSError as error:
        raise CorpusError(f"{path}: can't be read ({error.strerror or error})") from error


def encoding_of(path: Path, stated: str | None) -> str:
    """Return the encoding of a text file: the stated one, or the one that its first bytes show.

    Raises:
        CorpusError: If the file can't be read, or its encoding can't be detected.
    """
    if stated is not None and codecs.lookup(stated).name != UTF8:
        return codecs.lookup(stated).name
    with open_content(path) as content:
        head = content.read(HEAD_BYTES)
    if head.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if stated is not None:
        return UTF8
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    try:
        codecs.getincrementaldecoder(UTF8)().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError as error:
        return _detected(head, path, error)
    return UTF8


def _detected(head: bytes, path: Path, error: UnicodeDecodeError) -> str:
    try:
        from charset_normalizer import from_bytes
    except ImportError as missing:
        raise CorpusError(
            f"{path}: is not UTF-8; to detect its encoding, install charset-normalizer (`muscale[data]`), or state `encoding`"
        ) from missing

    whole_lines = head[: head.rfind(b"\n") + 1] if len(head) == HEAD_BYTES else head
    found = [] if b"\0" in head else list(from_bytes(whole_lines or head, cp_isolation=_USUAL))
    near = [m for m in found if m.chaos <= found[0].chaos + _MESS and m.coherence >= found[0].coherence - _COHERENCE]
    if len(near) == 1:
        return str(near[0].encoding)
    raise CorpusError(
        f"{path}: byte {head[error.start]:#04x} at {error.start} ({error.reason}); text must be UTF-8, or the source's `encoding` "
        f"must be stated; the bytes do not determine it{''.join(f', {m.encoding}?' for m in near)}"
    )


class Content(io.BufferedReader):
    """Bytes of UTF-8; a converted file is read again from its start to seek backwards."""

    @property
    def is_converted(self) -> bool:
        """True if the bytes are not those of the file."""
        return isinstance(self.raw, _Converted)

    def done_bytes(self) -> int:
        """Return how many bytes of the file have been read."""
        return self.raw.file_position() if isinstance(self.raw, _Converted) else self.tell()

    def size(self) -> int:
        """Return the number of bytes of UTF-8; converts the file to count them."""
        if not self.is_converted:
            return os.fstat(self.fileno()).st_size
        self.seek(0)
        size = 0
        while block := self.read(HEAD_BYTES):
            size += len(block)
        self.seek(0)
        return size


class _Converted(io.RawIOBase):
    def __init__(self, path: Path, codec: str, encoding: str) -> None:
        self._path, self._codec, self._encoding = path, codec, encoding
        self._open()

    def _open(self) -> None:
        import pyarrow as pa

        self._file: Any = pa.OSFile(str(self._path))
        self._stream: Any = pa.CompressedInputStream(self._file, self._codec) if self._codec else self._file
        self._decoder = None if self._encoding == UTF8 else codecs.getincrementaldecoder(self._encoding)()
        self._waiting, self._position, self._ended = memoryview(b""), 0, False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def file_position(self) -> int:
        return int(self._file.tell())

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a converted file knows no position but from its start")
        if position < self._position:
            self._open()
        while self._position < position and (skipped := self.read(min(HEAD_BYTES, position - self._position))):
            del skipped
        return self._position

    def readinto(self, buffer: Any) -> int:
        while not self._waiting and not self._ended:
            self._waiting = memoryview(self._next())
        part, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _next(self) -> bytes:
        try:
            block = self._stream.read(HEAD_BYTES)
        except OSError as error:
            raise CorpusError(f"{self._path}: can't be read ({error.strerror or error})") from error
        self._ended = not block
        if self._decoder is None:
            return bytes(block)
        try:
            return self._decoder.decode(block, final=self._ended).encode()
        except UnicodeError as error:
            raise CorpusError(
                f"{self._path}: can't be decoded as {self._encoding} ({error}); state another `encoding`"
            ) from error
