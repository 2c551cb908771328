"""How fast proxies train: our loop, eager and compiled, against a plain loop and the Lightning Trainer.

    python tests/benchmarks/proxy_speed.py [--widths 32 64 128 256] [--precision fp32] [--rounds 3]

All train the same decoder on the same batches, 8 sequences of 128 bytes, by AdamW with clipping, in one process on one
thread. The plain loop is what one would write by hand, after nanoGPT: random windows of a memory-mapped file, a Python
schedule, AdamW, clipping; it and Lightning take torch's own `Linear`. Rounds alternate between the loops, and the median
counts. The share of the peak is FLOPs of the matrix products over what products of the MLP's shape reach alone, by the faster
library.

Where torch sees a GPU, widths 256 to 2048 follow on it, at depth 4, in bf16 and in batches of 16 sequences of 1024 bytes.
There AdamW is fused and batches are pinned in every loop, the plain loop is compiled too, and a last column holds the rate
against the peak in the vendor's datasheet. An empty `--widths` or `--gpu-widths` leaves a part out. Ray is not needed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.products import MKL_IS_SLOW, Linear, product
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import EMBEDDED
from proxy_models.data.tokenizer import Tokens
from proxy_models.importable import mend_torchvision
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import stem
from proxy_models.training.device import CPU, datasheet_flops, send, usable, wait
from proxy_models.training.numerics import Numerics
from proxy_models.training.precision import DTYPES
from proxy_models.training.trainer import Trainer

mend_torchvision()
import lightning.pytorch as L  # noqa: E402

Loop = Callable[[ModelConfig, int], float]  # tokens per second over so many steps


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all loops have in common.

    Attributes:
        device: Where they train.
        precision: What matrices are multiplied in.
        sequences: Of a batch.
        context: Tokens of a sequence.
        depth: Blocks of the models.
        products: Plain products between two looks at the clock.
        flops: Of the matrix products in one measurement of a loop, roughly.
    """

    device: torch.device
    precision: Precision
    sequences: int
    context: int
    depth: int
    products: int
    flops: float

    @property
    def batch_tokens(self) -> int:
        return self.sequences * self.context

    @property
    def on_gpu(self) -> bool:
        """Whether the device is no CPU."""
        return self.device != CPU

    def model(self, width: int) -> ModelConfig:
        return ModelConfig(d_model=width, n_layers=self.depth, context_length=self.context)

    def n_steps(self, config: ModelConfig) -> int:
        return max(20, round(self.flops / (config.train_flops_per_token * self.batch_tokens)))


def cpu_setting(precision: Precision) -> Setting:
    """Proxies as small as they get."""
    return Setting(device=CPU, precision=precision, sequences=8, context=128, depth=2, products=5, flops=2.5e12 / 40)


def gpu_setting() -> Setting:
    """Proxies as large as a ladder's."""
    return Setting(
        device=usable("cuda"), precision="bf16", sequences=16, context=1024, depth=4, products=100, flops=2e14
    )


def ours(corpus: Corpus, setting: Setting, *, compiled: bool) -> Loop:
    """The platform's loop, its models kept warm as in a sweep."""
    trainer = Trainer(corpus, device=setting.device, compile=compiled)

    def run(config: ModelConfig, n_steps: int) -> float:
        numerics = Numerics(
            model=config,
            base=config,
            corpus_key=corpus.key,
            seed=0,
            evaluation_tokens=setting.context,
            precision=setting.precision,
        )
        batch_tokens = setting.batch_tokens
        recipe = Hyperparameters(learning_rate=0.004, batch_tokens=batch_tokens).resolve(10_000 * batch_tokens)
        return n_steps * batch_tokens / trainer.train(numerics, stem(recipe, n_steps * batch_tokens)).seconds

    return run


def random_windows(tokens: Tokens, setting: Setting) -> Tensor:
    starts = torch.randint(len(tokens) - setting.context - 1, (setting.sequences,)).tolist()
    return torch.stack([torch.from_numpy(tokens[s : s + setting.context + 1].astype("int64")) for s in starts])


def decoder(config: ModelConfig, setting: Setting) -> Decoder:
    """A model in the setting's precision; in fp32 with torch's `Linear` in place of ours, whose products differ there."""
    model = Decoder(config)
    model.compute_dtype = DTYPES[setting.precision]
    for module in model.modules():
        if isinstance(module, Linear) and setting.precision == "fp32":
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
    return model


def loss_of_logits(model: torch.nn.Module, sequences: Tensor) -> Tensor:
    """Mean cross-entropy in nats, as one writes it over a model's logits."""
    logits = model(sequences[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def adamw(model: torch.nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """AdamW as one has it by default on the device."""
    return torch.optim.AdamW(
        model.parameters(), lr=0.004, betas=(0.9, 0.95), weight_decay=0.1, fused=setting.on_gpu or None
    )


def plain(corpus: Corpus, setting: Setting, *, compiled: bool = False) -> Loop:

    @cache
    def warm(config: ModelConfig) -> tuple[Decoder, Callable[[Decoder, Tensor], Tensor]]:
        loss = torch.compile(loss_of_logits, dynamic=False) if compiled else loss_of_logits
        return decoder(config, setting).to(setting.device), loss

    def run(config: ModelConfig, n_steps: int) -> float:
        model, loss_of = warm(config)
        optimizer = adamw(model, setting)
        wait(setting.device)
        started = time.perf_counter()
        for step in range(n_steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.004 * min(1.0, (step + 1) / 10)
            sequences = send(random_windows(corpus.train, setting), setting.device)
            loss = loss_of(model, sequences)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait(setting.device)
        return n_steps * setting.batch_tokens / (time.perf_counter() - started)

    return run


class Windows(IterableDataset[Tensor]):
    """Batches of random windows, without end."""

    def __init__(self, tokens: Tokens, setting: Setting) -> None:
        self.tokens, self.setting = tokens, setting

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield random_windows(self.tokens, self.setting)


class Module(L.LightningModule):
    """The decoder as one would put it under Lightning; marks the start of its first and of its last step."""

    def __init__(self, config: ModelConfig, setting: Setting) -> None:
        super().__init__()
        self.model, self.setting = decoder(config, setting), setting
        self.marks: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index in (0, self.trainer.max_steps - 1):
            wait(self.device)
            self.marks.append(time.perf_counter())
        loss = loss_of_logits(self.model, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self, self.setting)


def lightning(corpus: Corpus, setting: Setting) -> Loop:
    """Lightning's Trainer with its defaults, logging to CSV, no checkpoints."""

    def run(config: ModelConfig, n_steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            module = Module(config, setting)
            trainer = L.Trainer(
                max_steps=n_steps,
                accelerator="gpu" if setting.on_gpu else "cpu",
                devices=1,
                gradient_clip_val=1.0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            windows = Windows(corpus.train, setting)
            trainer.fit(module, DataLoader(windows, batch_size=None, pin_memory=setting.on_gpu))
        first, last = module.marks
        return (n_steps - 1) * setting.batch_tokens / (last - first)

    return run


def reached_flops(config: ModelConfig, setting: Setting) -> float:
    """FLOP/s of matrix products of the MLP's shape."""
    dtype = DTYPES[setting.precision]
    x = torch.randn(setting.batch_tokens, config.d_model, device=setting.device, dtype=dtype)
    w = torch.randn(config.d_model, config.d_ff, device=setting.device, dtype=dtype)
    multiply = product if setting.device == CPU and setting.precision == "fp32" and MKL_IS_SLOW else torch.mm
    best = float("inf")
    for _ in range(20):
        wait(setting.device)
        started = time.perf_counter()
        for _ in range(setting.products):
            multiply(x, w)
        wait(setting.device)
        best = min(best, (time.perf_counter() - started) / setting.products)
    return 2 * setting.batch_tokens * config.d_model * config.d_ff / best


def measure(corpus: Corpus, setting: Setting, widths: list[int], rounds: int) -> None:
    """Measure all loops at each width, and print."""
    loops = {
        "plain": plain(corpus, setting),
        "lightning": lightning(corpus, setting),
        "ours, eager": ours(corpus, setting, compiled=False),
        "ours, compiled": ours(corpus, setting, compiled=True),
    }
    stated = None
    if setting.on_gpu:
        loops["plain, compiled"] = plain(corpus, setting, compiled=True)
        name = torch.cuda.get_device_name(setting.device)
        stated = datasheet_flops(name, setting.precision)
        print(f"\n{name}, {setting.precision}, {setting.sequences} × {setting.context} tokens, depth {setting.depth}")
    of_datasheet = f"{'of the datasheet':>18}" if stated else ""
    print(
        f"{'width':>6}  {'loop':<16}{'tokens/s':>10}{'× plain':>9}{'× lightning':>13}{'of the peak':>13}{of_datasheet}"
    )
    for width in widths:
        config = setting.model(width)
        for loop in loops.values():
            loop(config, 5)  # compiles, and fills caches
        seen: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(rounds):
            for name, loop in loops.items():
                seen[name].append(loop(config, setting.n_steps(config)))
        peak = reached_flops(config, setting)
        rates = {name: statistics.median(values) for name, values in seen.items()}
        for name, rate in rates.items():
            flops = rate * config.train_flops_per_token
            print(
                f"{width:>6}  {name:<16}{rate:>10,.0f}{rate / rates['plain']:>9.2f}{rate / rates['lightning']:>13.2f}"
                f"{flops / peak:>13.0%}{f'{flops / stated:>18.0%}' if stated else ''}",
                flush=True,
            )


def main() -> None:
    """Measure on every device there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[32, 64, 128, 256], help="on the CPU")
    parser.add_argument("--gpu-widths", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="on the CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/proxy_speed"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = write_corpus(options.folder / "corpus", EMBEDDED)
    if options.widths:
        measure(corpus, cpu_setting(options.precision), options.widths, options.rounds)
    if torch.cuda.is_available() and options.gpu_widths:
        measure(corpus, gpu_setting(), options.gpu_widths, options.rounds)


if __name__ == "__main__":
    main()
