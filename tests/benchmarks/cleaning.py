"""CPU time, memory, precision and recall of cleaning, next to datatrove's pipelines on the same text.

The text is the standard library's sources, again and again with other names, and as much synthetic text, in which duplicates are
planted: exact copies, and copies with some words replaced. Each task runs in its own process, which reads and writes JSON Lines.

    pip install --no-deps --target FOLDER datatrove==0.10.1 dill humanize loguru multiprocess "xxhash<4"
    python tests/benchmarks/cleaning.py --datatrove FOLDER           # 60 MB
    python tests/benchmarks/cleaning.py --mb 1000 --tasks near leaks exact   # memory
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from proxy_models.data.cleaning.clean import clean
from proxy_models.data.cleaning.cleaning_step import CleaningStep
from proxy_models.data.cleaning.exact_duplicates import ExactDuplicates
from proxy_models.data.cleaning.leaks import Leaks
from proxy_models.data.cleaning.near_duplicates import NearDuplicates
from proxy_models.data.cleaning.shingles import jaccard, shingles
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.documents import in_validation
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.sources import EMBEDDED, Source
from proxy_models.data.tokenizer import TokenizerSettings

EVERY = 10  # synthetic documents of which one is copied
REPLACED = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05)  # words of a copy
HELD_OUT = 0.1


def texts(n_bytes: int) -> Iterator[tuple[str, str]]:
    """Documents with their kinds: "source", "synthetic", or "N copy R", a copy of the synthetic document N."""
    draw = random.Random(0)
    sources = [path.read_text(errors="ignore")[:20_000] for path in Source(path=EMBEDDED).files()[1]]
    words = sorted({word for text in sources for word in re.findall(r"[a-z]{2,}", text)})
    size, number, n_sources = 0, 0, 0
    while size < n_bytes:
        copy, index = divmod(n_sources, len(sources))
        found = [("source", re.sub(r"([a-z])[a-z]{3,}", rf"\g<0>{copy or ''}", sources[index]).replace("\0", ""))]
        n_sources += 1
        while sum(len(text) for _, text in found[1:]) < len(found[0][1]):
            original = draw.choices(words, k=draw.randrange(100, 600))
            found.append(("synthetic", " ".join(original)))
            number += 1
            if number % EVERY == 0:
                share = REPLACED[number // EVERY % len(REPLACED)]
                edited = [draw.choice(words) if draw.random() < share else word for word in original]
                found.append((f"copy {share}", " ".join(edited)))
        yield from ((kind, text) for kind, text in found if text)
        size += sum(len(text) for _, text in found)


def read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        yield from map(json.loads, lines)


def ours(step: str, path: Path, out: Path) -> None:
    """Clean the file by one step and write the lines that are left."""
    steps: dict[str, CleaningStep] = {"exact": ExactDuplicates(), "near": NearDuplicates(), "remove leaks": Leaks()}
    source = {"corpus": Source(path=str(path), kind="jsonl")}
    found = clean(source, out / "cleaned", [steps[step]], validation_fraction=HELD_OUT, most_removed=1)
    left = (document["line"] for file in found.folder.glob("corpus/*.jsonl") for document in read(file))
    (out / "left.json").write_text(json.dumps(list(left)))


def leak_check(path: Path, _out: Path) -> None:
    source = {"corpus": Source(path=str(path), kind="jsonl")}
    find_leaks(source, source, validation_fraction=HELD_OUT)


def bpe(path: Path, out: Path) -> None:
    source = Source(path=str(path), kind="jsonl")
    write_corpus(out / "corpus", source, tokenizer=TokenizerSettings(kind="bpe", vocab_size=8192))


def datatrove(step: str, path: Path, out: Path) -> None:
    """Clean the file by datatrove's pipeline, in one task for each stage, and write the lines that are left."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import exact_dedup, minhash
    from datatrove.utils.text import TextNormConfig
    from datatrove.utils.word_tokenizers import WordTokenizer
    from loguru import logger

    logger.remove()

    class Words(WordTokenizer):  # type: ignore[misc]
        """Words between spaces, since the library's own tokenizers need spaCy, which is slower."""

        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        sent_tokenize = span_tokenize = word_tokenize

    def stream() -> Iterator[Any]:
        for line, document in enumerate(read(path), 1):
            yield Document(text=document["text"], id=str(line))

    stages = [str(out / name) for name in ("signatures", "pairs", "removed")]
    if step == "near":
        config = minhash.MinhashConfig(norm_config=TextNormConfig(norm_numbers=False))
        signatures = minhash.MinhashDedupSignature(stages[0], config, language=Words())
        signatures.run(stream(), 0, 1)
        for bucket in range(config.num_buckets):
            minhash.MinhashDedupBuckets(stages[0], stages[1], config=config).run(None, bucket, config.num_buckets)
        minhash.MinhashDedupCluster(stages[1], stages[2], config=config).run(None, 0, 1)
        left = minhash.MinhashDedupFilter(stages[2]).run(stream(), 0, 1)
    else:
        config = exact_dedup.ExactDedupConfig(content_getter=lambda document: document.text)
        exact_dedup.ExactDedupSignature(stages[0], config).run(stream(), 0, 1)
        exact_dedup.ExactFindDedups(stages[0], stages[1], config).run(None, 0, 1)
        left = exact_dedup.ExactDedupFilter(stages[1], config).run(stream(), 0, 1)
    lines = []
    with (out / "left.jsonl").open("w") as file:
        for document in left:
            file.write(json.dumps({"text": document.text, "id": document.id}) + "\n")
            lines.append(int(document.id))
    (out / "left.json").write_text(json.dumps(lines))


TASKS: dict[str, Callable[[Path, Path], None]] = {
    "exact": partial(ours, "exact"),
    "exact, datatrove": partial(datatrove, "exact"),
    "near": partial(ours, "near"),
    "near, datatrove": partial(datatrove, "near"),
    "remove leaks": partial(ours, "remove leaks"),
    "leaks": leak_check,
    "bpe": bpe,
}


def planted(path: Path) -> pd.DataFrame:
    """One row per planted copy: its line, which follows its original, and the similarity of both."""
    rows, before = [], ""
    for line, document in enumerate(read(path), 1):
        if document["kind"].startswith("copy"):
            rows.append((line, jaccard(shingles(before), shingles(document["text"])), before == document["text"]))
        before = document["text"]
    return pd.DataFrame(rows, columns=["line", "jaccard", "is_equal"])


def quality(task: str, left: set[int], path: Path, copies: pd.DataFrame) -> str:
    """Precision and recall of planted pairs; removed sources don't count, since they resemble each other."""
    kinds = [document["kind"] for document in read(path)]
    of_pairs = {line for copy in copies["line"] for line in (copy - 1, copy)}
    alone = sum(line not in left and line not in of_pairs for line, kind in enumerate(kinds, 1) if kind != "source")
    found = copies.assign(found=[line not in left or line - 1 not in left for line in copies["line"]])
    wanted = found["is_equal"] if task.startswith("exact") else found["jaccard"] >= 0.8
    right, wrong = (found["found"] & wanted).sum(), (found["found"] & ~wanted).sum() + alone
    text = f"precision {right / max(1, right + wrong):.3f}, recall {right / wanted.sum():.3f}, {alone} without a copy"
    bins = pd.cut(found["jaccard"], [0, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1], right=False).astype(str)
    bins = bins.where(~found["is_equal"], "equal")
    shares = found.groupby(bins)["found"].agg(["mean", "size"])
    return text + "; found " + ", ".join(f"{name} {mean:.2f} of {n}" for name, (mean, n) in shares.iterrows())


def run(task: str, path: Path, folder: str | None) -> tuple[float, float, set[int]]:
    """CPU seconds, GiB and the lines left of a task in its own process."""
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        paths = [*([folder] if folder else []), *sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, __file__, "--task", task, str(path), out], env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{task}: failed")
        left = Path(out, "left.json")
        lines = set(json.loads(left.read_text())) if left.exists() else set()
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, lines


def main(megabytes: int, tasks: list[str], folder: str | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "texts.jsonl")
        with path.open("w") as file:
            for kind, text in texts(megabytes * 10**6):
                file.write(json.dumps({"text": text, "kind": kind}) + "\n")
        size, n_documents = path.stat().st_size / 1e6, sum(1 for _ in read(path))
        copies = planted(path)
        held_out = sum(in_validation(document["text"], HELD_OUT) for document in read(path))
        print(
            f"{size:.0f} MB, {n_documents:,} documents, {held_out:,} held out, {len(copies):,} planted copies",
            flush=True,
        )
        start = run("nothing", path, folder)[0]
        for task in tasks:
            if "datatrove" in task and not folder:
                print(f"{task}: skipped, since --datatrove gives no folder that holds it")
                continue
            begun = time.perf_counter()
            seconds, memory, left = run(task, path, folder)
            speed = f"{seconds - start:.1f} CPU s, {size / (seconds - start):.1f} MB/s, {memory:.2f} GiB"
            print(f"{task}: {speed} ({time.perf_counter() - begun:.0f} s of wall clock)", flush=True)
            if left and task.startswith(("exact", "near")):
                print(f"    {quality(task, left, path, copies)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=60)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--datatrove", metavar="FOLDER", default=os.environ.get("DATATROVE"))
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        name, text, target = arguments.task
        if name in TASKS:
            TASKS[name](Path(text), Path(target))
    else:
        main(arguments.mb, arguments.tasks, arguments.datatrove)
