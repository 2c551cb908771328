"""Does the best learning rate of a family from transformers' configs stay put over 8× in width?

    python tests/benchmarks/family_transfer.py [--seeds 2] [--families Qwen3Config GPT2Config] [--folder runs/benchmarks/families]

Recurrent has layers of torch's GRU, and Convolutions is what `muscale init --family` writes. The decoder has GPT-2's variants, to hold
transformers' against, or its defaults, each tied and untied. Two layers, heads of 8 coordinates (Qwen3's in pairs that share keys),
bytes, context 64; 200 steps of 8 sequences on the standard library's own source at a grid of rates. Base width 32. The optimum of each
width is the minimum of a parabola in log2(rate). Every finished run is kept in the folder; the same command goes on where it was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from muscale.new_study import FAMILY
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_family import DecoderFamily
from proxy_models.architecture.families import load
from proxy_models.architecture.member import Member
from proxy_models.recipes.hyperparameters import Hyperparameters
from tests.benchmarks.kept_runs import parser_of, row_of, trained
from tests.benchmarks.transfer import report
from tests.proxy_models.families import TRANSFORMERS

CONTEXT, BATCH_TOKENS = 64, 8 * 64
N_TOKENS = 200 * BATCH_TOKENS
BASE, WIDTHS = 32, (16, 32, 64, 128)
LIKE_GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "biases": True,
    "tied": True,
    "mlp_ratio": 4.0,
    "head_dim": 8,
}
DECODERS: dict[str, dict[str, Any]] = {
    "decoder": LIKE_GPT2,
    "decoder untied": {**LIKE_GPT2, "tied": False},
    "default decoder tied": {"head_dim": 8, "tied": True},
    "default decoder": {"head_dim": 8},
}
OWN = {"Recurrent": "tests.proxy_models.families:Recurrent", "Convolutions": "my_family:Convolutions"}
FAMILIES = (*OWN, "Qwen3Config", "GPT2Config", "GPT2Config untied", *DECODERS)
RATES = [-9.0 + 0.75 * k for k in range(7)]  # log2


@dataclass(frozen=True, kw_only=True)
class Task:
    experiment: str  # the family
    size: int  # width
    log2_rate: float
    seed: int

    def member(self, width: int) -> Member:
        """The family's member of two layers."""
        sizes: dict[str, Any] = {"vocab_size": 256, "context_length": CONTEXT}
        if self.experiment in OWN:
            return load(OWN[self.experiment])(**sizes).member(width, 2)
        if variants := DECODERS.get(self.experiment):
            return DecoderFamily.of(ModelConfig(d_model=BASE, n_layers=2, **variants, **sizes)).member(width, 2)
        name, _, untied = self.experiment.partition(" ")
        args = {**TRANSFORMERS[name], **({"tie_word_embeddings": False} if untied else {})}
        return load(f"transformers:{name}")(**args, **sizes).member(width, 2)


def train(corpus: Path, task: Task) -> dict[str, Any]:
    values = Hyperparameters(learning_rate=2.0**task.log2_rate, batch_tokens=BATCH_TOKENS)
    model, base = task.member(task.size), task.member(BASE)
    return row_of(corpus, values, N_TOKENS, model=model, base=base, seed=task.seed, evaluation_tokens=32_768)


def main() -> None:
    parser = parser_of(__doc__, "families", seeds=2)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / FAMILY[0]).write_text((resources.files("muscale") / f"{FAMILY[0]}.txt").read_text())
    sys.path.insert(0, str(options.folder.resolve()))  # the processes that train are given it, too
    wanted = [
        Task(experiment=family, size=width, log2_rate=rate, seed=seed)
        for seed in range(options.seeds)
        for family in options.families
        for width in options.widths
        for rate in RATES
    ]
    rows = trained(options, wanted, train)
    for family in options.families:
        report(rows, family)


if __name__ == "__main__":
    main()
