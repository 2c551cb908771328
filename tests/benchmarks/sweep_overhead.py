"""Overhead of a sweep over its training: the same short trials by muscale, by plain Ray Tune and Lightning, by Optuna alone.

    python tests/benchmarks/sweep_overhead.py [--trials 4 24] [--ways optuna "tune, reused" "tune, fresh" muscale]
    python tests/benchmarks/sweep_overhead.py --flat 5000

Each way runs in a process tree of its own, one after another, at each number of trials; the difference between the two
is what a trial costs once everything has started. CPU seconds are those of the whole tree, Ray's daemons included, read
from the kernel every quarter of a second: of a process that Ray itself reaps, up to that much of its end is missed.
Trials are random rates of one small decoder, trained for 55 steps without a cooldown; Optuna trains by the platform's
own loop in one process, which is the least that such a sweep can cost. Corpora are written beforehand.

`--flat` runs trials of a few milliseconds through a study, and shows for each 500 of them what one costs and how large
the driver has grown.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

TRIALS = (4, 24)
BATCH_TOKENS, N_TOKENS, EVALUATION_TOKENS = 1024, 64 * 1024, 8192
LOW, HIGH = 0.002, 0.03
WORKERS = 2
_EVERY = 0.25
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

STUDY = """
name = "overhead"

[corpus]
source = "python-stdlib"
evaluation_tokens = {evaluation_tokens}

[model]
d_model = {d_model}
n_layers = {n_layers}
head_dim = 16
context_length = {context_length}

[hyperparameters]
learning_rate = 0.008
batch_tokens = {batch_tokens}

[sweep]
trials = {trials}
n_tokens = {n_tokens}
searcher = "random"
scheduler = "none"
rungs = 1
top_k = 1
n_seeds = 0
space.learning_rate = {{ distribution = "log_uniform", low = 0.002, high = 0.03 }}

[resources]
workers = 2

# what a study file must have, and this benchmark never runs
[transfer]
widths = [32, 64, 128]
n_tokens = 65536

[ladder]
stems = [{{ width = 64, n_tokens = 65536 }}]

[plan]
compute_flops = 1e12
"""
SHORT = {
    "d_model": 64,
    "n_layers": 2,
    "context_length": 128,
    "batch_tokens": BATCH_TOKENS,
    "n_tokens": N_TOKENS,
    "evaluation_tokens": EVALUATION_TOKENS,
}
TRIVIAL = {
    "d_model": 16,
    "n_layers": 1,
    "context_length": 16,
    "batch_tokens": 32,
    "n_tokens": 8 * 32,
    "evaluation_tokens": 32,
}


def study_file(folder: Path, trials: int, shape: dict[str, int]) -> Path:
    """Write a study of its own, so that no ledger knows anything."""
    folder.mkdir(parents=True)
    path = folder / "study.toml"
    path.write_text(STUDY.format(trials=trials, **shape))
    return path


def by_muscale(folder: Path, trials: int) -> list[float]:
    """A study as a user has it; the trials' losses."""
    import muscale

    study = muscale.Study.open(folder / "study.toml", quiet=True)
    table = study.sweep().trials
    losses = next(table[name] for name in table if str(name).startswith("loss_at_"))
    return [float(loss) for loss in losses]


def by_optuna(folder: Path, trials: int) -> list[float]:
    """One process: Optuna's random sampler, the platform's loop with its model warm."""
    import optuna

    from proxy_models.architecture.config import ModelConfig
    from proxy_models.data.corpus import Corpus
    from proxy_models.recipes.hyperparameters import Hyperparameters
    from proxy_models.recipes.segments import stem
    from proxy_models.training.numerics import Numerics
    from proxy_models.training.trainer import Trainer

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    corpus = Corpus.open(folder / "corpus")
    trainer = Trainer(corpus, compile=False)
    model = ModelConfig(d_model=64, n_layers=2)
    numerics = Numerics(model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=EVALUATION_TOKENS)

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("learning_rate", LOW, HIGH, log=True)
        values = Hyperparameters(learning_rate=rate, batch_tokens=BATCH_TOKENS)
        segment = stem(values.resolve(N_TOKENS), values.stable_tokens(N_TOKENS))
        loss = trainer.train(numerics, segment, averaged=True).averaged_loss
        return math.nan if loss is None else loss

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return [math.nan if trial.value is None else trial.value for trial in study.trials]


def train_with_lightning(rate: float, folder: Path) -> float:
    """One trial as one writes it with Lightning: fit, validate, return the loss."""
    from proxy_models.importable import mend_torchvision

    mend_torchvision()
    import lightning.pytorch as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from proxy_models.architecture.config import ModelConfig
    from proxy_models.data.corpus import Corpus
    from tests.benchmarks.proxy_speed import Module, Windows, cpu_setting, loss_of_logits

    torch.set_num_threads(1)
    setting, n_steps = cpu_setting("fp32"), 55

    class Trial(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("loss", loss_of_logits(self.model, batch[0]))

    corpus = Corpus.open(folder / "corpus")
    held_out = [
        torch.from_numpy(corpus.validation[s : s + 129].astype("int64")) for s in range(0, EVALUATION_TOKENS, 128)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = L.Trainer(
            max_steps=n_steps,
            accelerator="cpu",
            devices=1,
            gradient_clip_val=1.0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=scratch,
        )
        module = Trial(ModelConfig(d_model=64, n_layers=2), setting)
        trainer.fit(module, DataLoader(Windows(corpus.train, setting), batch_size=None))
        trainer.validate(module, DataLoader(TensorDataset(torch.stack(held_out)), batch_size=8), verbose=False)
        return float(trainer.callback_metrics["loss"])


def by_tune(folder: Path, trials: int, *, reused: bool) -> list[float]:
    """Plain Tune over Lightning: a function in a fresh actor for each trial, or a class whose actors are reused."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    import ray
    from ray import tune

    def function(config: dict[str, float]) -> None:
        tune.report({"loss": train_with_lightning(config["learning_rate"], folder)})

    class Class(tune.Trainable):
        def setup(self, config: dict[str, float]) -> None:
            self.rate = config["learning_rate"]

        def reset_config(self, new_config: dict[str, float]) -> bool:
            self.rate = new_config["learning_rate"]
            return True

        def step(self) -> dict[str, Any]:
            return {"loss": train_with_lightning(self.rate, folder), "done": True}

    # a class would have to write a checkpoint at its end; for a function, Tune refuses the very question
    checkpoints = tune.CheckpointConfig(checkpoint_at_end=False) if reused else tune.CheckpointConfig()
    ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        tuner = tune.Tuner(
            tune.with_resources(Class if reused else function, {"cpu": 1}),
            param_space={"learning_rate": tune.loguniform(LOW, HIGH)},
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=trials, reuse_actors=reused),
            run_config=tune.RunConfig(storage_path=scratch, verbose=0, checkpoint_config=checkpoints),
        )
        results = tuner.fit()
    ray.shutdown()
    if results.errors:
        raise RuntimeError(f"a trial failed: {results.errors[0]}")
    return [float(loss) for loss in results.get_dataframe()["loss"]]


WAYS: dict[str, Callable[[Path, int], list[float]]] = {
    "optuna": by_optuna,
    "tune, reused": lambda folder, trials: by_tune(folder, trials, reused=True),
    "tune, fresh": lambda folder, trials: by_tune(folder, trials, reused=False),
    "muscale": by_muscale,
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one process tree, seconds."""

    cpu: float
    wall: float


def measured(arguments: list[str]) -> Cost:
    """Run this file with arguments, and add up what it and all that descend from it take.

    Raises:
        RuntimeError: If it fails.
    """
    seen: dict[tuple[int, float], float] = {}
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, __file__, *arguments])
    me, ended = psutil.Process(), None
    while ended is None or (len(me.children()) > 1 and time.perf_counter() - ended < 30):
        for process in me.children(recursive=True):
            try:
                times = process.cpu_times()
                seen[process.pid, process.create_time()] = times.user + times.system
                if process.pid == child.pid and process.status() == psutil.STATUS_ZOMBIE and ended is None:
                    ended = time.perf_counter()
            except psutil.NoSuchProcess:
                continue
        _reap(but=child.pid)
        time.sleep(_EVERY)
    for process in me.children(recursive=True):
        if process.pid != child.pid:
            process.kill()
    if child.wait():
        raise RuntimeError(f"{' '.join(arguments)} ended with {child.returncode}")
    return Cost(cpu=sum(seen.values()), wall=ended - started)


def _reap(but: int) -> None:
    """Forget orphans that have ended and were just counted; the child itself is waited for in the end."""
    for process in psutil.Process().children():
        try:
            if process.pid != but and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def compare(ways: list[str], sizes: list[int], folder: Path) -> None:
    costs: dict[tuple[str, int], Cost] = {}
    for way in ways:
        for trials in sizes:
            place = folder / f"{way.replace(', ', '-')}-{trials}"
            study_file(place, trials, SHORT)
            _prepare(place)
            costs[way, trials] = measured(["--way", way, "--trials", str(trials), "--folder", str(place)])
            print(f"{way:<14}{trials:>5} trials {costs[way, trials]}", flush=True)
    few, many = min(sizes), max(sizes)
    header = (
        "way",
        f"CPU s, {many} trials",
        "wall s",
        "CPU s a trial more",
        "wall s a trial more",
        "over optuna, CPU s a trial",
    )
    print("\n| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |", sep="\n")
    more = {
        way: [
            (getattr(costs[way, many], kind) - getattr(costs[way, few], kind)) / max(1, many - few)
            for kind in ("cpu", "wall")
        ]
        for way in ways
    }
    for way in ways:
        over = f"{more[way][0] - more['optuna'][0]:.2f}" if "optuna" in more else "–"
        total = costs[way, many]
        print(f"| {way} | {total.cpu:.1f} | {total.wall:.1f} | {more[way][0]:.2f} | {more[way][1]:.2f} | {over} |")


def _prepare(place: Path) -> None:
    """Write the corpora in a process that isn't measured."""
    subprocess.run([sys.executable, __file__, "--way", "prepare", "--folder", str(place)], check=True)


def prepare(folder: Path) -> None:
    """The study's own corpus, and the same for the other ways."""
    import muscale
    from proxy_models.data.corpus_writing import write_corpus
    from proxy_models.data.sources import EMBEDDED

    _ = muscale.Study.open(folder / "study.toml", quiet=True).corpus
    write_corpus(folder / "corpus", EMBEDDED)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """When a trial ended, and how the driver stood."""

    wall: float
    driver_cpu: float
    rss: int


def flat(folder: Path, trials: int, block: int = 500) -> None:
    """Run trivial trials through a study, and print what a trial costs, block by block."""
    from muscale import Study
    from muscale.progress import Display, Update

    marks: list[Mark] = []
    me = psutil.Process()

    class Marking(Display):
        @contextmanager
        def stage(self, name: str) -> Iterator[Update]:
            def update(done: float, total: float, note: str, *, share: float | None = None) -> None:
                if name == "sweep" and len(marks) < trials:
                    marks.append(
                        Mark(wall=time.perf_counter(), driver_cpu=time.process_time(), rss=me.memory_info().rss)
                    )

            yield update

    opened = Study.open(study_file(folder / "flat", trials, TRIVIAL), quiet=True)
    study = Study(opened.contents, Marking(quiet=True))
    study.sweep()
    print(
        "| trials | wall ms a trial | gaps: median | 90 % | driver's CPU ms a trial | driver MiB |",
        "| --- " * 6 + "|",
        sep="\n",
    )
    for start in range(0, len(marks) - 1, block):
        part = marks[start : start + block + 1]
        walls = 1e3 * np.diff([mark.wall for mark in part])
        cpu = 1e3 * (part[-1].driver_cpu - part[0].driver_cpu) / len(walls)
        print(
            f"| {start}–{start + len(walls)} | {walls.mean():.1f} | {np.median(walls):.1f} | {np.quantile(walls, 0.9):.1f} "
            f"| {cpu:.1f} | {part[-1].rss / 2**20:.0f} |"
        )


def main() -> None:
    """Measure, or be what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=list(TRIALS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--flat", type=int, metavar="TRIALS", help="trivial trials through a study")
    parser.add_argument("--way", choices=[*WAYS, "prepare"], help="run one way in this process, unmeasured")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.way == "prepare":
        prepare(options.folder)
    elif options.way:
        losses = WAYS[options.way](options.folder, options.trials[0])
        print(json.dumps({"way": options.way, "trials": len(losses), "best": min(losses)}))
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a tree come to us, and are counted
        with tempfile.TemporaryDirectory(prefix="muscale-overhead-") as scratch:
            if options.flat:
                flat(options.folder or Path(scratch), options.flat)
            else:
                compare(options.ways, options.trials, options.folder or Path(scratch))


if __name__ == "__main__":
    main()
