"""Six real variants of a decoder, decided by `muscale compare` from small models: does the same change win at three times the width?

    OMP_NUM_THREADS=1 python tests/benchmarks/real_variants.py [--workers 2] [--folder runs/benchmarks/real_variants]

The verdicts are those of `muscale compare study.toml`, run as a user runs it: rates tuned at widths 16 and 32, sizes up to width 24.
The oracle is the same command at one size, width 72, for the study and every variant, decided or not, with three seeds and each
with the hyperparameters that its own tuning carries there. Its losses give every variant's gain at the target, with the noise of
the seeds. Whatever was trained is in the study's ledger: the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from muscale import Study
from muscale.proxies.comparison import Comparison
from muscale.settings.compare import BASELINE
from muscale.store.statements import find
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.sources import EMBEDDED, Source
from scaling import compare_variants
from scaling.variants.verdicts import WORTH

ORACLE_WIDTH, ORACLE_TOKENS, ORACLE_SEEDS = 72, 1_474_560, [0, 1, 2]
DAMAGED_SHARE = 0.03
STUDY = f"""
name = "real variants"

[corpus]
source = "python-stdlib"

[model]
d_model = 32
n_layers = 2
head_dim = 8
context_length = 128

[hyperparameters]
learning_rate = 0.0078
batch_tokens = 1024
warmup_floor_tokens = 10240

[sweep]
trials = 8
n_tokens = 262144
rungs = 3

[sweep.space]
learning_rate = {{ distribution = "log_uniform", low = 0.002, high = 0.06 }}

[transfer]
widths = [16, 32]
n_tokens = 262144
horizons = [1.0, 2.0, 4.0]

[ladder]
stems = [
    {{ width = 16, n_tokens = 262144 }},
    {{ width = 24, n_tokens = 393216 }},
    {{ width = 24, n_tokens = 786432 }},
]

[compare]
seeds = [0, 1]

[plan]
compute_flops = 1.28994e12           # of the oracle: width {ORACLE_WIDTH}, {ORACLE_TOKENS:,} tokens

[variants.gelu]
model = {{ activation = "gelu", mlp_ratio = 4.125 }}    # as many parameters

[variants.layernorm]
model = {{ norm = "layernorm" }}

[variants.qk_norm]
model = {{ qk_norm = true }}

[variants.tied]
model = {{ tied = true }}

[variants.muon]
hyperparameters = {{ optimizer = "muon", learning_rate = 0.02 }}

[variants.damaged]
corpus = {{ source = "damaged" }}     # the same files, {DAMAGED_SHARE:.0%} of their letters replaced
"""


def write_damaged(folder: Path) -> None:
    """The library's files under their own names, so that the same ones are held out, some of their letters replaced."""
    root, files = Source(path=EMBEDDED).files()
    for path in files:
        name = path.relative_to(root)
        draw = random.Random(name.as_posix())
        text = path.read_text(encoding="utf-8", errors="ignore")
        changed = "".join(
            draw.choice("etaoinshrdlu") if c.isalpha() and draw.random() < DAMAGED_SHARE else c for c in text
        )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(changed, encoding="utf-8")


def write_study(folder: Path) -> Path:
    """The study file and the damaged data, where they are not there."""
    path = folder / "study.toml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_damaged(folder / "damaged")
        path.write_text(STUDY)
    return path


def compared(study: Path, *settings: str) -> Comparison:
    """`muscale compare` with its progress and table, and its result once more for programs, which trains nothing."""
    words = [sys.executable, "-m", "muscale", "compare", str(study)]
    words += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(words, check=True)
    again = subprocess.run([*words, "--json"], check=True, stdout=subprocess.PIPE)
    return Comparison.from_dict(json.loads(again.stdout))


def runs_of(study: Study) -> pd.DataFrame:
    """The runs of the shared sizes: variant, size, seed, compute_flops, loss; those of width `ORACLE_WIDTH` are the oracle's."""
    runs = study.runs()
    label = r"^(?P<variant>\w+), width (?P<width>\d+), seed (?P<seed>\d+), (?P<tokens>\d+) tokens$"
    named = runs.loc[runs["purpose"] == "compare", "label"].str.extract(label).dropna()
    size = named["width"].str.cat(named["tokens"], sep=" × ")
    return named.assign(size=size, width=named["width"].astype(int)).join(runs[["compute_flops", "loss"]])


def costs(study: Study) -> pd.DataFrame:
    """FLOPs, 6·N of what was trained, and hours of a worker, of the small models and the oracle."""
    rows = []
    for row in study.ledger.read(find, "segments"):
        model = ModelConfig(**row["numerics"]["model"])
        trained = row["tokens"] - row["trained_from"]
        of = "oracle" if model.d_model == ORACLE_WIDTH else "small"
        rows.append({"of": of, "flops": 6.0 * model.n_params * trained, "hours": row["seconds"] / 3600})
    return pd.DataFrame(rows).groupby("of").sum()


def judged(verdict: str, low: float, high: float) -> str:
    """A verdict held against the oracle's interval of the multiplier: right, WRONG, undecided, or the oracle is unsure."""
    if verdict == "undecided":
        return "undecided"
    if verdict == "promote":
        return "right" if low > 1 else "WRONG" if high <= 1 else "oracle unsure"
    return "right" if high <= 1 + WORTH else "WRONG" if low > 1 + WORTH else "oracle unsure"


def report(small: Comparison, runs: pd.DataFrame) -> None:
    """Each variant's verdict beside its gain in the oracle's runs."""
    outcome = small.outcome
    largest = runs[runs["width"] == ORACLE_WIDTH]
    measured = compare_variants(runs, BASELINE).measured
    truth = measured.sort_values("compute_flops").groupby("variant").last()
    losses = np.log(largest.pivot_table("loss", "seed", "variant"))
    rows = []
    for row in outcome.table.to_dict("records"):
        name = row["variant"]
        change = losses[name] - losses[BASELINE]
        rows.append(
            {
                "variant": name,
                "verdict": row["verdict"],
                "multiplier, 90 %": f"{row['multiplier']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
                "P(better)": f"{row['p_better']:.3f}",
                "oracle: loss": f"{change.mean():+.2%} ± {change.std() / math.sqrt(len(change)):.2%}",
                "oracle: multiplier": "{multiplier:.3f} [{low:.3f}, {high:.3f}]".format(**truth.loc[name]),
                "inside": "yes" if row["low"] <= truth.loc[name, "multiplier"] <= row["high"] else "no",
                "": judged(row["verdict"], truth.loc[name, "low"], truth.loc[name, "high"]),
            }
        )
    print(f"\nverdicts for {outcome.target_flops:.3g} FLOPs, and the oracle there, {len(losses)} seeds")
    print(pd.DataFrame(rows).to_string(index=False))


def main() -> None:
    """Compare, train the oracle, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/real_variants"))
    options = parser.parse_args()
    path, workers = write_study(options.folder), f"resources.workers={options.workers}"
    small = compared(path, workers)
    oracle = f"compare.stems=[{{ width = {ORACLE_WIDTH}, n_tokens = {ORACLE_TOKENS} }}]"
    compared(path, workers, oracle, f"compare.seeds={ORACLE_SEEDS}")
    study = Study.open(path, quiet=True)
    report(small, runs_of(study))
    for name, row in costs(study).iterrows():
        print(f"{name}: {row['flops']:.3g} FLOPs, {row['hours']:.2f} hours of a worker")


if __name__ == "__main__":
    main()
