"""Recall of planted leaks, false alarms on clean text, and speed of the leak check.

The text is the docstrings of installed packages. Held-out documents of 5 to 5,000 words are drawn from some packages and planted into
docstrings of others: verbatim, reformatted, or with one word of twenty (or of ten) left out, replaced or added. Clean documents are
docstrings that were not planted; those that the check flags are mostly real copies between packages. The rule to compare with is the
usual one: a document is leaked if any of its 13-word sequences (or all of a shorter document) stands in the training text.

    python tests/benchmarks/leaks.py
    python tests/benchmarks/leaks.py --speed 1000      # MB of text; time and memory next to byte-level BPE
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import resource
import sysconfig
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.documents import in_validation
from proxy_models.data.leaks import leak_search
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.sources import Source
from proxy_models.data.tokenizer import TokenizerSettings

TRAINING = ("scipy", "networkx", "sympy", "sqlalchemy", "torch", "ray", "sklearn", "plotly", "matplotlib")
HELD_OUT = ("pandas", "transformers", "huggingface_hub", "wandb", "IPython", "mypy", "lightning", "optuna", "fontTools")
LENGTHS = (5, 6, 8, 10, 13, 20, 30, 50, 100, 500, 5000)
EACH = 60  # planted documents of a length and kind; a tenth of it from 500 words on
N_CLEAN = 10_000
WORD = re.compile(r"[a-z0-9]+")


def docstrings(package: str) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("purelib"), package).rglob("*.py")):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                text = text.encode(errors="ignore").decode().replace("\0", "")
                if len(WORD.findall(text.lower())) >= 5:
                    yield text


def edited(words: Sequence[str], share: float, pool: Sequence[str], draw: random.Random) -> str:
    kept: list[str] = []
    for word in words:
        if draw.random() >= share:
            kept.append(word)
        else:
            kept += draw.choice(([], [draw.choice(pool)], [word, draw.choice(pool)]))
    return " ".join(kept)


def reformatted(words: Sequence[str], draw: random.Random) -> str:
    text = " ".join(words).replace("'", "\u2019").replace(" - ", " \u2014 ")
    text = text.upper() if draw.random() < 0.3 else text
    return "<p>" + "".join(draw.choice((" ", "\n", "  ")) if one == " " else one for one in text) + "</p>"


def write(folder: Path, documents: Sequence[tuple[str, str]], *, held_out: bool) -> Source:
    """Files of the given names, with a number that puts each on its side."""
    folder.mkdir()
    for name, text in documents:
        number = next(n for n in range(1000) if in_validation(f"{name}.{n}", 0.5) == held_out)
        (folder / f"{name}.{number}").write_text(text)
    return Source(path=str(folder))


def recall() -> None:
    draw = random.Random(0)
    training = [text for package in TRAINING for text in docstrings(package)]
    own = list(dict.fromkeys(text for package in HELD_OUT for text in docstrings(package)))
    draw.shuffle(own)
    clean, rest = own[:N_CLEAN], " ".join(own[N_CLEAN:]).split()
    times = Counter(
        hash(tuple(words[i : i + 5]))
        for text in (*training, *clean, " ".join(rest))
        for words in [WORD.findall(text.lower())]
        for i in range(len(words) - 4)
    )

    def is_unique(words: Sequence[str]) -> bool:
        """Whether the passage is no boilerplate: four of five of its 5-word sequences occur nowhere else."""
        found = WORD.findall(" ".join(words).lower())
        sequences = [hash(tuple(found[i : i + 5])) for i in range(len(found) - 4)]
        return bool(sequences) and sum(times[one] <= 1 for one in sequences) >= (
            0.8 if len(words) < 500 else 0.3 if len(words) < 5000 else 0.15
        ) * len(sequences)

    pool = " ".join(draw.sample(training, 500)).split()
    planted, hosts, free = [], list(training), [True] * len(rest)
    for length in reversed(LENGTHS):  # the longest first, while there is room for them
        for kind in ("verbatim", "reformatted", "edited 1/20", "edited 1/10"):
            for number in range(EACH if length < 500 else EACH // 10):
                for _ in range(5000):
                    start = draw.randrange(len(rest) - length)
                    words = rest[start : start + length]
                    if all(free[start : start + length]) and is_unique(words):
                        break
                else:
                    continue
                free[start : start + length] = [False] * length
                share = {"edited 1/20": 0.05, "edited 1/10": 0.1}.get(kind, 0.0)
                text = reformatted(words, draw) if kind == "reformatted" else edited(words, share, pool, draw)
                host = draw.randrange(len(hosts))
                at = draw.choice([0, *(m.end() for m in re.finditer(r"\s", hosts[host]))])
                hosts[host] = f"{hosts[host][:at]}\n{text}\n{hosts[host][at:]}"
                planted.append((f"{kind.replace('/', '-')}_{length}_{number}", " ".join(words)))
    known = {
        hash(tuple(words[i : i + 13]))
        for text in hosts
        for words in [WORD.findall(text.lower())]
        for i in range(len(words) - 12)
    }
    joined = [" " + " ".join(WORD.findall(text.lower())) + " " for text in hosts]

    def by_rule(text: str) -> bool:
        words = WORD.findall(text.lower())
        if len(words) < 13:
            return any(" " + " ".join(words) + " " in host for host in joined)
        return any(hash(tuple(words[i : i + 13])) in known for i in range(len(words) - 12))

    flagged = flagged_names(hosts, planted)
    rows = [(*name.split("_")[:2], name in flagged, by_rule(text)) for name, text in planted]
    table = pd.DataFrame(rows, columns=["kind", "words", "found", "by 13-grams"]).astype({"words": int})
    shares = table.pivot_table(index="words", columns="kind", values=["found", "by 13-grams"], aggfunc="mean")
    print(shares.round(2).to_string())
    wrong = flagged_names(training, [(f"clean_{i}", text) for i, text in enumerate(clean)])
    print(f"clean documents flagged: {len(wrong)} of {len(clean)}; by 13-grams {sum(map(by_rule, clean))}")


def flagged_names(training: Sequence[str], held_out: Sequence[tuple[str, str]]) -> set[str]:
    """Names of the held-out documents with a passage that counts."""
    with tempfile.TemporaryDirectory() as folder:
        inside = write(
            Path(folder, "training"), [(f"host_{i}", text) for i, text in enumerate(training)], held_out=False
        )
        outside = write(Path(folder, "held_out"), held_out, held_out=True)
        report = find_leaks({"training": inside}, {"held_out": outside}, validation_fraction=0.5)
    return {leak.held_out_file.rsplit(".", 1)[0] for leak in report.leaks}


def speed(megabytes: int) -> None:
    """Time and memory on JSON Lines of docstrings and sources, repeated with changed words to the wanted size."""
    texts = [
        path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))[:20_000]
    ]
    with tempfile.TemporaryDirectory() as folder:
        path, size, number = Path(folder, "texts.jsonl"), 0, 0
        with path.open("w") as file:
            while size < megabytes * 10**6:
                copy, index = divmod(number, len(texts))
                text = re.sub(r"([a-z])[a-z]{3,}", rf"\g<0>{copy or ''}", texts[index][:20_000]).replace("\0", "")
                size += file.write(json.dumps({"text": text or "-"}) + "\n")
                number += 1
        source = Source(path=str(path), kind="jsonl")
        start = time.perf_counter()
        report = find_leaks({"a": source}, {"a": source}, validation_fraction=0.1)
        seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"leak check: {size / 1e6:.0f} MB, {number:,} documents: {seconds:.1f} s, {memory:.2f} GiB, {report.share:.1%} leaked"
        )
        start = time.perf_counter()
        write_corpus(Path(folder, "corpus"), source, tokenizer=TokenizerSettings(kind="bpe", vocab_size=8192))
        print(f"byte-level BPE of 8,192 ids, trained and applied: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    leak_search.KEPT = 10**9
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=int, metavar="MB")
    arguments = parser.parse_args()
    speed(arguments.speed) if arguments.speed else recall()
