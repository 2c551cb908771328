"""Share of near-duplicates within the training text of each source, found by the cleaning step that removes them.

Of much text a sample of documents is compared: those whose lowest shingle has a low hash. Most near-duplicates have the same lowest
shingle, so that both or neither are in the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from proxy_models.data.cleaning.cleaning_step import require_library
from proxy_models.data.cleaning.near_duplicates import NearDuplicates
from proxy_models.data.cleaning.shard_passes import ShardPasses
from proxy_models.data.cleaning.shingles import mixed, shingles
from proxy_models.data.cleaning.text_shards import Document, Shard, documents, shards_of, write_all
from proxy_models.data.sources import Source
from proxy_models.data.token_files import OnProgress

MOST_COMPARED = 100_000_000
"""Bytes of files whose text is compared as a whole; of more, a sample of about this size (assumed; 20 s)."""


@dataclass(frozen=True, kw_only=True)
class NearDuplicateShare:
    """Near-duplicates within the training text of a source.

    Attributes:
        documents: Training documents that were compared.
        duplicates: Documents that repeat an earlier one.
        n_bytes: Bytes of all compared documents.
        duplicate_bytes: Bytes of the duplicates.
        compared: Share of the source's text that was compared.
    """

    documents: int
    duplicates: int
    n_bytes: int
    duplicate_bytes: int
    compared: float

    @property
    def share(self) -> float:
        """Share of the compared bytes that are duplicates."""
        return self.duplicate_bytes / max(1, self.n_bytes)


def near_duplicate_shares(
    sources: Mapping[str, Source], *, validation_fraction: float, on_progress: OnProgress | None = None
) -> dict[str, NearDuplicateShare]:
    """Return the share of near-duplicates by source; sources of tokens are left out.

    Args:
        validation_fraction: Share that each source holds out.
        on_progress: Called with the bytes done and all bytes, over both passes.

    Raises:
        CorpusError: If a source can't be read, or the library that finds near-duplicates is missing.
    """
    require_library(NearDuplicates.name)
    of_text = {name: source for name, source in sources.items() if source.kind != "tokens"}
    sizes = {name: sum(source.sizes().values()) for name, source in of_text.items()}
    total = sum(sizes.values())
    compared = min(1.0, MOST_COMPARED / max(1, total))
    passes = ShardPasses(map, on_progress, total, 2)
    shards: list[Shard] = []
    counts: dict[str, Counter[str]] = {name: Counter() for name in of_text}
    with TemporaryDirectory() as folder:
        for name, before in zip(of_text, accumulate(sizes.values(), initial=0), strict=False):
            Path(folder, name).mkdir()
            stream = _sample(of_text[name], validation_fraction, compared)
            for number, found in enumerate(shards_of(stream)):
                path, n_bytes = Path(folder, name, f"{number:05}.jsonl"), sum(one.n_bytes for one, _ in found)
                write_all((document for document, _ in found), path)
                first = shards[-1].first + shards[-1].n_documents if shards else 0
                shards.append(Shard(path=path, source=name, first=first, n_documents=len(found), n_bytes=n_bytes))
            passes.report((before + sizes[name]) / max(1, total))
        passes.n_done += 1
        if shards:
            judge, _ = NearDuplicates(scope="source").learn(shards, partial(passes.over, shards, Path(folder), ".npz"))
        for shard in shards:
            for document, verdict in judge(shard):
                counts[shard.source].update(
                    documents=1,
                    duplicates=int(bool(verdict.reason)),
                    n_bytes=document.n_bytes,
                    duplicate_bytes=document.n_bytes if verdict.reason else 0,
                )
    return {
        name: NearDuplicateShare(
            documents=count["documents"],
            duplicates=count["duplicates"],
            n_bytes=count["n_bytes"],
            duplicate_bytes=count["duplicate_bytes"],
            compared=compared,
        )
        for name, count in counts.items()
    }


def _sample(source: Source, validation_fraction: float, share: float) -> Iterator[tuple[Document, tuple[str, int]]]:
    """Yield the training documents that are compared, with the file and the bytes read."""
    for document, done in documents(source, validation_fraction):
        if document.split == "train" and (share == 1 or _is_low(document.text, share)):
            yield document, done


def _is_low(text: str, share: float) -> bool:
    lowest = mixed(shingles(text)[:1])
    return bool(len(lowest) and lowest[0] < share * 2**64)
