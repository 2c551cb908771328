"""A corpus far larger than what is read of it: positions are computed, so a batch touches its own pages and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path

from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.token_files import FORMAT, MANIFEST

N_TOKENS, CONTEXT, BATCH_TOKENS, N_BATCHES = 10**9, 128, 16 * 128, 20
# bytes that the kernel may read and map around a page that is asked for (mm/filemap.c; 128 KiB by default)
_AHEAD = 2**17


def of_self(file: str, name: str) -> int:
    """A number from the kernel's status of this process."""
    lines = (Path("/proc/self") / file).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def test_a_corpus_of_a_billion_tokens_is_sampled_without_being_read(tmp_path: Path) -> None:
    for split, tokens in (("train", N_TOKENS), ("validation", 10**6)):
        with (tmp_path / f"{split}.bin").open("wb") as file:
            os.truncate(file.fileno(), 2 * tokens)  # no block of it is on the disk
    manifest = {
        "format": FORMAT,
        "key": "sparse",
        "tokenizer": "stated",
        "vocab_size": 50_257,
        "dtype": "uint16",
        "tokens": {"train": N_TOKENS, "validation": 10**6},
        "text": None,
        "source": {},
        "validation_fraction": 0.001,
        "files": [],
        "empty_files": [],
    }
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    stream = training_stream(Corpus.open(tmp_path), CONTEXT, seed=0, run_tokens=N_TOKENS)
    read, mapped = of_self("io", "rchar"), 1024 * of_self("status", "RssFile")
    batches = [stream.batch(step * BATCH_TOKENS, BATCH_TOKENS) for step in range(N_BATCHES)]
    read, mapped = of_self("io", "rchar") - read, 1024 * of_self("status", "RssFile") - mapped
    assert all(batch.shape == (BATCH_TOKENS // CONTEXT, CONTEXT + 1) for batch in batches)
    n_sequences = N_BATCHES * BATCH_TOKENS // CONTEXT
    assert mapped <= 2 * n_sequences * _AHEAD, "more than each sequence's own neighbourhood became resident"
    assert 2 * n_sequences * _AHEAD < 2 * N_TOKENS / 20
    assert read < 2**20, "a file was read, not mapped"
