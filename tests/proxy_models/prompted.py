"""A small corpus with prompts, of which very different shares count."""

from __future__ import annotations

import json
import random
from pathlib import Path

from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import Source


def write_prompts(path: Path, n: int = 300) -> list[tuple[str, str]]:
    """Write JSON Lines of prompts and completions, some longer than 32 bytes together, and return them."""
    generator = random.Random(0)
    pairs = []
    for number in range(n):
        prompt, completion = (
            "".join(generator.choices("abcdefgh ", k=length))
            for length in (generator.randint(0, 24), generator.randint(1, 3 if number % 2 else 18))
        )
        pairs.append((prompt, f"{completion}."))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    return pairs


def prompted_corpus(folder: Path, n: int = 300) -> Corpus:
    """Write such records and their corpus into a folder."""
    write_prompts(folder / "sft.jsonl", n)
    source = Source(path=str(folder / "sft.jsonl"), kind="jsonl", field="completion", prompt_field="prompt")
    return write_corpus(folder / "tokens", source)
