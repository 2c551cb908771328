"""A study from raw text with planted copies, boilerplate and a leaked held-out file: the gate, the cleaning, its worth.

The text is modules of the standard library, one file each. A notice stands before each training file, a few training files have
many copies, and one held-out file also lies on the training side. `muscale data check` must name that file and its line,
`muscale data clean` and a second check must pass, and `muscale compare` says what the cleaning is worth.

    python tests/benchmarks/data_gate.py [--folder runs/benchmarks/data_gate]     # minutes on two cores
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from muscale import Study
from proxy_models.data.documents import in_validation
from proxy_models.data.sources import EMBEDDED, Source

FRACTION = 0.1
N_FILES, N_COPIED, N_COPIES = 150, 8, 12
NOTICE = "".join(
    f"# Part {part} of the terms of this archive: this text is mirrored as it is, and nobody is liable for what is in it.\n"
    for part in range(25)
)
STUDY = f"""
name = "data gate"

[corpus]
source = "raw"
validation_fraction = {FRACTION}
evaluation_tokens = 32_768

[model]
d_model = 32
n_layers = 1
context_length = 64

[hyperparameters]
learning_rate = 0.016
batch_tokens = 512

[resources]
workers = 1

[sweep]
trials = 2
n_tokens = 16_384
searcher = "random"
scheduler = "none"
top_k = 1
n_finalists = 1
n_seeds = 1

[sweep.space]
learning_rate = {{ distribution = "log_uniform", low = 0.004, high = 0.06 }}

[transfer]
widths = [16, 32, 48]
n_tokens = 16_384
rates = 5
horizons = [0.5, 1.0]

[ladder]
stems = [{{ width = 16, n_tokens = 65_536 }}, {{ width = 32, n_tokens = 98_304 }}, {{ width = 48, n_tokens = 131_072 }}]

[plan]
compute_flops = 4e10
"""
CLEAN = 'exact_duplicates = "global"\nline_duplicates = { min_characters = 60, max_documents = 10 }\n'
VARIANT = f"\n[variants.cleaned.corpus.clean]\n{CLEAN}"
CLEANED = f"\n[corpus.clean]\n{CLEAN}"


def on_side(name: str, *, held_out: bool) -> str:
    """A name whose file is on that side."""
    names = (f"{number}-{name}" for number in range(1000))
    return next(one for one in names if in_validation(one, FRACTION) == held_out)


def plant(folder: Path) -> tuple[str, str]:
    """Write the raw text; return the names of the leaked held-out file and of its copy on the training side."""
    folder.mkdir(parents=True)
    # Without tables of encodings and compilers, which repeat each other.
    files = [p for p in Source(path=EMBEDDED).files()[1] if p.parent.name not in ("encodings", "distutils", "command")]
    files = [path for path in files if 8_000 < path.stat().st_size < 30_000][:N_FILES]
    texts = {f"{path.parent.name}-{path.stem}.txt": path.read_text(encoding="utf-8", errors="ignore") for path in files}
    training = [name for name in texts if not in_validation(name, FRACTION)]
    held_out = next(name for name in texts if name not in training)
    for name in training:
        texts[name] = NOTICE + texts[name]
    for name in training[:N_COPIED]:
        texts |= {on_side(f"copy{number}-{name}", held_out=False): texts[name] for number in range(N_COPIES)}
    mirror = on_side(held_out, held_out=False)
    texts[mirror] = texts[held_out]
    for name, text in texts.items():
        (folder / name).write_text(text)
    return held_out, mirror


def muscale(*words: str | Path) -> int:
    print("$ muscale", *words, flush=True)
    return subprocess.run([sys.executable, "-m", "muscale", *map(str, words)], check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/data_gate"))
    folder: Path = parser.parse_args().folder
    began = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    held_out, mirror = plant(folder / "raw")
    raw, cleaned = folder / "study.toml", folder / "cleaned" / "study.toml"
    raw.write_text(STUDY + VARIANT)
    cleaned.parent.mkdir()
    cleaned.write_text(STUDY.replace('"raw"', '"../raw"') + CLEANED)

    assert muscale("data", "check", raw) == 1
    leaks = Study.open(raw, quiet=True).check_data().report.leaks
    assert (mirror, 1, held_out, 1) in {(one.file, one.line, one.held_out_file, one.held_out_line) for one in leaks}
    assert muscale("data", "clean", cleaned) == 0
    assert muscale("data", "check", cleaned) == 0
    print(f"gate: closed and opened in {time.perf_counter() - began:.0f} s", flush=True)
    assert muscale("compare", raw) == 0
    print(f"everything: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
