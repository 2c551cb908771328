"""Documents with exactly the same text: the first is kept, and a held-out one before those for training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.cleaning.cleaning_step import JudgeByTwin, Over, Scope, gathered, ranked, save
from proxy_models.data.cleaning.text_shards import Shard

_DIGEST_BYTES = 16  # by chance, two of 10^12 texts share a digest with a probability of 10^-15


@dataclass(frozen=True, kw_only=True)
class ExactDuplicates:
    """Remove documents whose text occurs before, in the same source or in any."""

    scope: Scope = "global"
    name: ClassVar[str] = "exact_duplicates"
    passes: ClassVar[int] = 2

    def identity(self) -> dict[str, Any]:
        """Return the settings."""
        return asdict(self)

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeByTwin, dict[str, Any]]:
        """Find the first document of each text."""
        files = over(self._digest)
        found, order = gathered(files, "digests"), ranked(gathered(files, "held_out"))
        twins = files[0].with_name("twins.npy")
        np.save(twins, _first_of_equals(found, order))
        return JudgeByTwin(twins, "the same text"), {}

    def _digest(self, shard: Shard, target: Path) -> None:
        salt = hashlib.blake2b(shard.source.encode(), digest_size=16).digest() if self.scope == "source" else b""
        digests, held_out = bytearray(), []
        for document in shard.documents():
            digests += hashlib.blake2b(document.text.encode(), digest_size=_DIGEST_BYTES, salt=salt).digest()
            held_out.append(document.split == "validation")
        pairs = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
        save({"digests": pairs, "held_out": np.array(held_out, dtype=bool)}, target)


def _first_of_equals(digests: NDArray[np.uint64], order: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return for each document the first in `order` with the same digest, or -1 if it is the first itself."""
    by_rank = digests[order]
    groups = np.lexsort((by_rank[:, 1], by_rank[:, 0]))  # stable, so that the first of a group ranks first
    equal = by_rank[groups]
    starts = np.flatnonzero(np.append(True, (equal[1:] != equal[:-1]).any(axis=1))[: len(equal)])
    first = np.repeat(groups[starts], np.diff(np.append(starts, len(groups))))
    twins = np.empty(len(order), dtype=np.int64)
    twins[order[groups]] = np.where(groups == first, -1, order[first])
    return twins
