"""Near-duplicates: MinHash LSH (Broder, 1997) finds candidates, and the exact Jaccard similarity of their shingles decides.

Documents are taken in the order in which they are kept, held-out ones first; a document that is similar to a kept one is removed.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.cleaning.cleaning_step import JudgeByTwin, Over, Scope, gathered, ranked, save
from proxy_models.data.cleaning.shingles import Hashes, jaccard, mixed, shingles
from proxy_models.data.cleaning.text_shards import Shard, parse

PERMUTATIONS = 128
RECALL = 0.99  # least probability that a pair exactly at the threshold becomes a candidate
MOST_CANDIDATES = 64  # with which a document is compared; those that share most bands come first (assumed)
_LONGEST_BUCKET = 1024  # documents of a bucket that later ones are compared with (assumed)
_BATCH = 1 << 20  # shingles that are hashed at a time
_CACHE_BYTES = 256 << 20  # shingles that are kept in memory
_SEED = 42


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """Remove documents that share most of their runs of five words with an earlier one, in the same source or in any."""

    scope: Scope = "global"
    threshold: float = 0.8
    name: ClassVar[str] = "near_duplicates"
    passes: ClassVar[int] = 2

    def identity(self) -> dict[str, Any]:
        """Return the settings."""
        return asdict(self)

    @property
    def bands(self) -> tuple[int, int]:
        """Number of bands and rows in each: the longest bands with which a pair at the threshold is found with `RECALL`."""
        for rows in range(PERMUTATIONS, 1, -1):
            number = PERMUTATIONS // rows
            if 1 - (1 - self.threshold**rows) ** number >= RECALL:
                return number, rows
        return PERMUTATIONS, 1

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeByTwin, dict[str, Any]]:
        """Find the document that is kept instead of each near-duplicate."""
        files = over(self._sign)
        order = ranked(gathered(files, "held_out"))
        texts = _Texts(shards, [np.load(file)["offsets"] for file in files])
        twins = np.full(len(order), -1, dtype=np.int64)
        kept: dict[int, list[int]] = {}  # by bucket
        n_compared = 0
        for number, buckets in self._shared_buckets(files, order):
            shared = Counter(other for bucket in buckets for other in kept.get(bucket, ()))
            for other, _ in shared.most_common(MOST_CANDIDATES):
                n_compared += 1
                if jaccard(texts.shingles(number), texts.shingles(other)) >= self.threshold:
                    twins[number] = other
                    break
            else:
                for bucket in buckets:
                    if len(kept.setdefault(bucket, [])) < _LONGEST_BUCKET:
                        kept[bucket].append(number)
        path = files[0].with_name("twins.npy")
        np.save(path, twins)
        return JudgeByTwin(path, f"Jaccard similarity of at least {self.threshold:g}"), {"pairs_compared": n_compared}

    def _shared_buckets(self, files: Sequence[Path], order: NDArray[np.intp]) -> Iterator[tuple[int, list[int]]]:
        """Yield, in order, each document that shares a bucket with another, and its buckets; documents without words share none."""
        number, _ = self.bands
        owners, buckets = [], []
        for band in range(number):
            hashes = gathered(files, f"band {band}")
            _, bucket, size = np.unique(hashes, return_inverse=True, return_counts=True)
            owners.append(np.flatnonzero((size[bucket] > 1) & (hashes != 0)))
            buckets.append(bucket[owners[-1]] * number + band)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        owner, bucket = np.concatenate(owners), np.concatenate(buckets)
        by_rank = np.argsort(rank[owner], kind="stable")
        owner, bucket = owner[by_rank], bucket[by_rank]
        starts = np.flatnonzero(np.append(True, owner[1:] != owner[:-1])[: len(owner)]).tolist()
        for start, end in pairwise([*starts, len(owner)]):
            yield int(owner[start]), bucket[start:end].tolist()

    def _sign(self, shard: Shard, target: Path) -> None:
        """Save the hash of each band of each document, and where the document's line begins."""
        offsets, held_out, bands = [0], list[bool](), [np.zeros((0, self.bands[0]), dtype=np.uint64)]
        batch, size = list[Hashes](), 0
        scope = shard.source if self.scope == "source" else ""
        with shard.path.open("rb") as lines:
            for line in lines:
                document = parse(line)
                offsets.append(offsets[-1] + len(line))
                held_out.append(document.split == "validation")
                batch.append(shingles(document.text))
                size += len(batch[-1])
                if size >= _BATCH:
                    bands.append(self._band_hashes(batch, scope))
                    batch, size = [], 0
        if batch:
            bands.append(self._band_hashes(batch, scope))
        columns = {f"band {band}": column for band, column in enumerate(np.concatenate(bands).T)}
        save({"offsets": np.array(offsets[:-1]), "held_out": np.array(held_out, dtype=bool), **columns}, target)

    def _band_hashes(self, batch: Sequence[Hashes], scope: str) -> Hashes:
        """Return a hash of each band of each document; a document without words has zeros."""
        from rensa import RMinHash

        number, rows = self.bands
        ends = np.cumsum([0, *map(len, batch)], dtype=np.uint64)
        signatures = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(batch), ends, number * rows, _SEED)
        values = np.array(signatures.to_rows(), dtype=np.uint64).reshape(len(batch), number, rows)
        hashes = np.full((len(batch), number), zlib.crc32(scope.encode()), dtype=np.uint64)
        for row in range(rows):
            hashes = mixed(hashes ^ values[:, :, row] ^ np.uint64((row + 1) << 32))
        hashes[np.diff(ends) == 0] = 0
        return hashes


class _Texts:
    """Shingles of documents by number, read from the shards; the latest stay in memory."""

    def __init__(self, shards: Sequence[Shard], offsets: Sequence[NDArray[np.int64]]) -> None:
        self._shards, self._offsets = shards, offsets
        self._firsts = [shard.first for shard in shards]
        self._cache: OrderedDict[int, Hashes] = OrderedDict()
        self._cached_bytes = 0

    def shingles(self, number: int) -> Hashes:
        """Return the shingles of a document."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        place = bisect_right(self._firsts, number) - 1
        with self._shards[place].path.open("rb") as lines:
            lines.seek(int(self._offsets[place][number - self._firsts[place]]))
            found = self._cache[number] = shingles(parse(lines.readline()).text)
        self._cached_bytes += found.nbytes
        while self._cached_bytes > _CACHE_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return found
