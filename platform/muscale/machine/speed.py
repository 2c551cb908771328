"""Speed at which this machine trains a study's base model, and so the longest time that the study's proxies take."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from muscale.errors import last_line
from muscale.formatting import format_duration
from muscale.machine.diagnosis import Finding
from muscale.plans.costs import estimate
from muscale.settings.config import StudyConfig
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import Source
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import Trainer

_SECONDS = 2.0  # duration of the measurement (assumed)
_MOST_SEQUENCES = 8  # per step on the CPU; more hardly raise the speed (assumed)
_PROXIES = ("sweep", "transfer", "ladder")


def speed_findings(config: StudyConfig) -> list[Finding]:
    """The speed at the base shape and the time of sweep, transfer check and ladder; empty if it can't be measured here.

    The speed of a training program is not measured, nor that of a study with GPUs on a machine without.
    """
    if config.trainer or (config.resources.gpus_per_worker and not torch.cuda.is_available()):
        return []
    threads = torch.get_num_threads()
    torch.set_num_threads(config.resources.threads)
    try:
        return [describe_speed(config, measured_speed(config))]
    except Exception as error:  # errors of a custom family's code, too
        do = "`muscale check` trains the same model and shows the full error"
        return [Finding(what="speed", status="fail", found=f"the base model can't train: {last_line(error)}", do=do)]
    finally:
        torch.set_num_threads(threads)


def describe_speed(config: StudyConfig, tokens_per_second: float) -> Finding:
    """A worker's speed at the base shape, and the time of sweep, transfer check and ladder if every worker is as fast."""
    stages = estimate(config).set_index("stage").loc[[*_PROXIES], "compute_flops"]
    workers = config.resources.workers
    seconds = stages.sum() / (6.0 * config.model.n_params * tokens_per_second) / workers
    found = (
        f"{tokens_per_second:,.0f} tokens/s of one worker at the base shape; at this speed sweep, transfer check and ladder train for "
        f"about {format_duration(seconds)}, {workers} at a time; starts, evaluations and workers that share a processor add to it"
    )
    return Finding(what="speed", status="ok", found=found)


def measured_speed(config: StudyConfig) -> float:
    """Tokens per second of one worker at the base shape, not compiled; raises ValueError if the device lacks the study's precision."""
    model, h, resources = config.model, config.hyperparameters, config.resources
    with tempfile.TemporaryDirectory(prefix="muscale-speed-") as folder:
        ids = np.random.default_rng(0).integers(model.vocab_size, size=16 * (model.context_length + 1))
        ids.astype("<u4").tofile(path := Path(folder) / "ids.bin")
        source = Source(path=str(path), kind="tokens", dtype="uint32", vocab_size=model.vocab_size)
        corpus = write_corpus(Path(folder) / "corpus", source, validation_fraction=0.5)
        numerics = Numerics(
            model=model,
            base=model,
            corpus_key=corpus.key,
            seed=0,
            evaluation_tokens=model.context_length,
            precision=config.precision,
        )
        on_gpu = bool(resources.gpus_per_worker)
        trainer = Trainer(
            corpus, device="cuda" if on_gpu else "cpu", compile=False, device_share=resources.device_share
        )

        def seconds(sequences: int, steps: int) -> float:
            recipe = Hyperparameters(
                learning_rate=h.learning_rate,
                batch_tokens=sequences * model.context_length,
                optimizer=h.optimizer,
                schedule="constant",
            )
            (segment,) = chain(recipe, steps * recipe.batch_tokens)
            return trainer.train(numerics, segment).seconds

        def step_seconds(sequences: int) -> float:
            return seconds(sequences, 2) / 2  # the shortest schedule: one step of warmup, one more

        sequences = h.batch_tokens // model.context_length
        if not on_gpu:
            step_seconds(1)  # allocates the memory that later steps reuse
            sequences = max(1, min(sequences, _MOST_SEQUENCES, int(0.5 * _SECONDS / step_seconds(1))))
        step_seconds(sequences)
        steps = max(2, min(64, int(_SECONDS / step_seconds(sequences))))
        return steps * sequences * model.context_length / seconds(sequences, steps)
