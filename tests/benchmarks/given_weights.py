"""Forecasts of full runs that start from given weights, on other text, against their losses.

    OMP_NUM_THREADS=1 python tests/benchmarks/given_weights.py [--seeds 0 1 2] [--folder runs/benchmarks/given_weights] [--report]

The weights come from the standard library's source: bundles of three full runs of one study, and three GPT-2s that transformers
trained by a plain loop. From each, a study of its own continues on the headers of torch: a sweep of the rate, the rate's law in the
tokens, runs of four lengths up to 524,288 tokens, their law of one size, and a full run of four times the longest, whose forecast is
registered before it begins. "no change" is the loss of the longest run of the ladder. The same command continues; `--report` only
prints the table. An hour and a half on two cores.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from muscale import Study
from muscale.actors.cluster import staying_cluster
from muscale.full_runs.promote.promotion import Promotion
from muscale.store.ledger_tables import ResultKind
from proxy_models.importable import mend_torchvision

WIDTH, LAYERS, CONTEXT, VOCABULARY = 48, 2, 64, 256
BATCH, TARGET = 1024, 2_097_152
STUDY = """
name = "{name}"
{weights}
[corpus]
source = "{source}"
evaluation_tokens = 32_768

[model]
d_model = 48
n_layers = 2
head_dim = 16
context_length = 64
{model}
[hyperparameters]
learning_rate = 0.004
batch_tokens = 1024
warmup_floor_tokens = 10_240
cooldown_fraction = 0.2

[sweep]
trials = 6
n_tokens = 131_072
searcher = "quasi_random"
scheduler = "none"
top_k = 1
n_finalists = 1
n_seeds = 1

[sweep.space]
learning_rate = {{ distribution = "log_uniform", low = 0.0005, high = 0.02 }}

[transfer]
widths = {widths}
n_tokens = 65_536
rates = 5
horizons = [1.0, 2.0, 4.0]

[ladder]
stems = {stems}

[plan]
compute_flops = 1e12
shapes = [{{ width = 48 }}]

[promote]
workers = 1

[tracking]
wandb = "off"
"""
GPT2 = """norm = "layernorm"
norm_eps = 1e-5
activation = "gelu_tanh"
positions = "learned"
mlp_ratio = 4.0
biases = true
tied = true
"""


def stems_of(widths: list[int], lengths: list[int]) -> str:
    """Rows of [ladder] as TOML."""
    return f"[{', '.join(f'{{ width = {width}, n_tokens = {length} }}' for width in widths for length in lengths)}]"


def opened(path: Path, text: str, seed: int) -> Study:
    """The study of this text, with a full run of `TARGET` tokens."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    model = Study.open(path, quiet=True).config.model
    flops = TARGET * model.train_flops_per_token
    return Study.open(path, [f"promote.seed={seed}", f"plan.compute_flops={flops}"], trains=True)


def train_gpt2(folder: Path, seed: int) -> None:
    """Train a GPT-2 of transformers on the standard library's source, in bytes, and save it."""
    mend_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)
    torch.manual_seed(seed)
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": WIDTH // 16, "n_positions": CONTEXT}
    network = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = np.random.default_rng(seed)
    for _ in range(TARGET // 2 // BATCH):
        starts = generator.integers(len(text) - CONTEXT, size=BATCH // CONTEXT)
        batch = torch.from_numpy(np.stack([text[start : start + CONTEXT] for start in starts]).astype(np.int64))
        optimizer.zero_grad()
        network(batch, labels=batch).loss.backward()
        optimizer.step()
    network.save_pretrained(folder)


def bundle_of(folder: Path, seed: int) -> Path:
    """The bundle of a full run of this seed, of one study on the standard library's source."""
    stems = stems_of([16, 32, 48], [131_072, 262_144])
    text = STUDY.format(name="source", weights="", source="python-stdlib", model="", widths=[32, 48], stems=stems)
    source = opened(folder / "source" / "study.toml", text, seed)
    source.run(force=True)
    return source.directory / "bundles" / source.plan().key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/given_weights"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    headers = Path(torch.__file__).parent / "include"
    stems = stems_of([WIDTH], [65_536, 131_072, 262_144, 524_288])
    if not options.report:
        with staying_cluster():
            for seed in options.seeds:
                given = folder / f"gpt2-{seed}"
                if not (given / "model.safetensors").exists():
                    train_gpt2(given, seed)
                for kind, weights, model in (("bundle", bundle_of(folder, seed), ""), ("GPT-2", given, GPT2)):
                    text = STUDY.format(
                        name=kind,
                        weights=f'initial_weights = "{weights}"',
                        source=headers,
                        model=model,
                        widths=[48],
                        stems=stems,
                    )
                    opened(folder / f"{kind}-{seed}" / "study.toml", text, seed).run(force=True)
    table = pd.DataFrame([row for path in sorted(folder.glob("*-?/study.toml")) for row in scored(path)])
    print(table.to_string(index=False, float_format="{:.4f}".format))
    print(table.assign(error=table["error"].abs()).groupby("start")[["error", "half width", "no change"]].mean())
    print(f"{table['inside'].sum()} of {len(table)} losses are inside their 90 % interval")


def scored(path: Path) -> list[dict[str, object]]:
    """A row for the study's full run, if it has ended."""
    study = Study.open(path, quiet=True)
    done = [Promotion.from_dict(row["payload"]) for row in study.ledger.results(ResultKind.PROMOTION)]
    if not done:
        return []
    runs = study.ladder()
    longest = runs[(runs["purpose"] == "ladder") & (runs["n_tokens"] == runs["n_tokens"].max())]["loss"].mean()
    return [
        {
            "start": path.parent.name[:-2],
            "seed": path.parent.name[-1],
            "loss": one.loss,
            "forecast": one.forecast,
            "error": one.forecast / one.loss - 1,
            "half width": one.high / one.forecast - 1,
            "inside": one.inside,
            "no change": longest / one.loss - 1,
        }
        for one in done
    ]


if __name__ == "__main__":
    main()
