"""Passes over shards that resume: a pass writes one file for each shard, and a file that exists is not written again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from proxy_models.data.cleaning.text_shards import Shard
from proxy_models.data.token_files import OnProgress
from proxy_models.files import atomic_write

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or a function like it that calls in parallel and keeps the order."""


class ShardPasses:
    """Passes over the shards of all sources, perhaps in parallel, with their common progress in bytes.

    Args:
        n_bytes: Bytes of the source files; each pass counts as many.
        n_passes: Number of all passes.
    """

    def __init__(self, parallel_map: Map, on_progress: OnProgress | None, n_bytes: int, n_passes: int) -> None:
        self._map, self._on_progress = parallel_map, on_progress
        self._n_bytes, self._n_passes = n_bytes, n_passes
        self.n_done = 0

    def report(self, share: float) -> None:
        """Report the share of the current pass that is done."""
        if self._on_progress:
            self._on_progress(int((self.n_done + share) * self._n_bytes), self._n_passes * self._n_bytes)

    def over(
        self, shards: Sequence[Shard], folder: Path, suffix: str, function: Callable[[Shard, Path], None]
    ) -> list[Path]:
        """Run a function over all shards; it writes a file for each. Return the files in order."""
        targets = [folder / shard.source / f"{shard.path.stem}{suffix}" for shard in shards]
        for parent in {target.parent for target in targets}:
            parent.mkdir(parents=True, exist_ok=True)
        left = [(shard, target) for shard, target in zip(shards, targets, strict=True) if not target.exists()]
        total = sum(shard.n_bytes for shard in shards)
        done = total - sum(shard.n_bytes for shard, _ in left)
        for (shard, _), _result in zip(left, self._map(partial(_write, function), left), strict=True):
            done += shard.n_bytes
            self.report(done / total if total else 1.0)
        self.n_done += 1
        return targets


def _write(function: Callable[[Shard, Path], None], item: tuple[Shard, Path]) -> None:
    shard, target = item
    with atomic_write(target) as unfinished:
        function(shard, unfinished)
