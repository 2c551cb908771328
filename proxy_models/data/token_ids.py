"""Token ids of a file, memory-mapped, and its documents where the file's format states them.

- `.bin` with a stated dtype: ids one after another.
- `.bin` without a stated dtype: the `.idx` of the same name, as Megatron-LM writes it, states dtype and documents.
- `.npy`: a one-dimensional array of numpy; or, without numpy's header, ids one after another, as OLMo writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.sources import CorpusError, Source
from proxy_models.data.tokenizer import stored_dtype

Ids = NDArray[np.integer[Any]]
_NPY_START = b"\x93NUMPY"
_INDEX_START = b"MMIDIDX\x00\x00"
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point
_HEADER = np.dtype([("start", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_CHUNK = 1 << 16  # documents of an index that are looked at at a time


def open_ids(path: Path, source: Source) -> tuple[Ids, TokenIndex | None]:
    """Map the ids of a file of tokens, and the index of its documents if one states its dtype.

    Raises:
        CorpusError: If the file is empty or broken, or nothing states its dtype.
    """
    if not path.stat().st_size:
        raise CorpusError(f"{path}: the file is empty; it must hold at least one token")
    with path.open("rb") as file:
        is_array = path.suffix == ".npy" and file.read(len(_NPY_START)) == _NPY_START
    if is_array:
        return _array(path, source.dtype), None
    if source.dtype is not None:
        return _raw(path, stored_dtype(source.dtype)), None
    where = path.with_suffix(".idx")
    if path.suffix != ".bin" or not where.is_file():
        also = f", and there is no {where.name}" if path.suffix == ".bin" else ""
        raise CorpusError(f"{path}: nothing states the type of the ids{also}; state the source's `dtype`")
    index = TokenIndex.open(where)
    return _raw(path, index.dtype), index


def _raw(path: Path, dtype: np.dtype[Any]) -> Ids:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise CorpusError(f"{path}: the size must be a multiple of {dtype.itemsize} ({dtype.name}), got {size}")
    return np.memmap(path, dtype=dtype, mode="r")


def _array(path: Path, stated: str | None) -> Ids:
    try:
        array: Ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise CorpusError(f"{path}: not an array of numpy ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise CorpusError(f"{path}: must be a one-dimensional array of ids, got {array.dtype} of shape {array.shape}")
    if stated not in (None, array.dtype.name):
        raise CorpusError(f"{path}: the header states {array.dtype.name}, but dtype is {stated}; leave dtype out")
    return array


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Index of Megatron-LM: lengths and positions of sequences, and the first sequence of each document."""

    path: Path
    dtype: np.dtype[Any]
    pointers: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @classmethod
    def open(cls, path: Path) -> TokenIndex:
        size = path.stat().st_size
        header = np.fromfile(path, dtype=_HEADER, count=1)
        if not len(header) or header["start"][0] != _INDEX_START.rstrip(b"\0"):
            raise CorpusError(f"{path}: not an index of Megatron-LM, which begins with {_INDEX_START!r}")
        version, code = int(header["version"][0]), int(header["dtype"][0])
        if version != 1 or code not in _INDEX_TYPES:
            raise CorpusError(
                f"{path}: version must be 1 and the type one of integers, got version {version}, type {code}"
            )
        n_sequences, n_firsts = int(header["sequences"][0]), int(header["documents"][0])
        at = _HEADER.itemsize + 4 * n_sequences
        if not n_sequences or n_firsts < 2 or size < at + 8 * n_sequences + 8 * n_firsts:
            raise CorpusError(
                f"{path}: is cut: {n_sequences} sequences and {n_firsts} boundaries do not fit into {size} bytes"
            )
        table = np.memmap(path, mode="r")[at : at + 8 * (n_sequences + n_firsts)].view("<i8")
        return cls(
            path=path,
            dtype=np.dtype(_INDEX_TYPES[code]),
            pointers=table[:n_sequences],
            firsts=table[n_sequences:],
        )

    def documents(self, n_ids: int) -> Iterator[tuple[int, int]]:
        """Yield the position of each document's first id, and the position after its last."""
        n_sequences, before = len(self.pointers), 0
        for at in range(1, len(self.firsts), _CHUNK):
            following = np.asarray(self.firsts[at : at + _CHUNK])
            if ((following < 0) | (following > n_sequences)).any():
                raise CorpusError(f"{self.path}: a document must begin with one of {n_sequences} sequences")
            is_last = following == n_sequences
            ends = np.where(is_last, n_ids, self.pointers[np.where(is_last, 0, following)] // self.dtype.itemsize)
            for end in ends.tolist():
                if not before <= end <= n_ids:
                    raise CorpusError(
                        f"{self.path}: documents must follow one another within {n_ids} ids, got {before} to {end}"
                    )
                yield before, end
                before = end
        if before != n_ids:
            raise CorpusError(
                f"{self.path}: the last document must end with the {n_ids} ids of the .bin file, got {before}"
            )
