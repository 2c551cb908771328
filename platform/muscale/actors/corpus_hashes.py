"""Check that the token files have not changed since they were written: changed bytes would silently change every loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muscale.errors import StageError
from proxy_models.data.corpus import Corpus
from proxy_models.data.tokenizer import Tokenizer
from proxy_models.hashing import file_sha256

MOST_HASHED = 32 * 10**9
"""Bytes of tokens that are hashed again before a training: half a minute from a fast disk (assumed)."""
_unchanged: set[tuple[Path, str]] = set()  # folders and keys that this process has hashed


def require_unchanged(folder: Path) -> None:
    """Check a corpus against the hashes of its manifest, once a process and up to `MOST_HASHED`; raise StageError if files changed."""
    corpus = Corpus.open(folder)
    if (folder, corpus.key) in _unchanged:
        return
    changed, _ = changed_files(corpus)
    if changed:
        raise StageError(
            f"{folder}: {', '.join(changed)} changed since the corpus was hashed, so nothing is trained on it; remove the "
            "folder to have it written again from its source, or restore it from a copy"
        )
    _unchanged.add((folder, corpus.key))


def changed_files(corpus: Corpus) -> tuple[list[str] | None, int]:
    """Files of a corpus that do not hold the hashes of its manifests, and the bytes of all; None if they are too large."""
    files = {
        source.folder / f"{split}.bin": digest
        for source in corpus.sources.values()
        for split, digest in source.manifest["sha256"].items()
    }
    n_bytes = sum(path.stat().st_size for path in files)
    if n_bytes > MOST_HASHED:
        return None, n_bytes
    changed = [str(path.relative_to(corpus.folder)) for path, digest in files.items() if file_sha256(path) != digest]
    return [*changed, *_changed_tokenizer(corpus)], n_bytes


def _changed_tokenizer(corpus: Corpus) -> Sequence[str]:
    """The kept tokenizer's file, if its hash is not the one that encoded the sources of text."""
    texts = [source for source in corpus.sources.values() if source.manifest["text"] is not None]
    if not texts:
        return []
    kept: Tokenizer = corpus.tokenizer()
    return [] if all(source.manifest["tokenizer"] == kept.key for source in texts) else ["tokenizer.json"]
