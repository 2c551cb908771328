"""Workers that share a device, as in a search with `resources.gpus_per_worker = 0.5`: each must keep to its share of the memory."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch

from muscale.actors.cluster import cluster
from muscale.actors.worker import open_worker
from muscale.errors import last_line
from muscale.fingerprint import package_fingerprint
from muscale.layout import CORPUS, LEDGER
from muscale.machine.gpu.gpu_report import Check
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics

PER_DEVICE = 2
_STEPS = 6


class SharingActor:
    """A worker that also reports its device, its memory, and what it gets when it asks for more than its share."""

    def __init__(self, ledger: Ledger, resources: ResourceSettings, package: str) -> None:
        self._worker = open_worker(ledger, resources, package)

    def reach(self, chain: Chain) -> dict[str, Any]:
        """Train the chain to its end; plain values."""
        outcome, device = self._worker.reach(chain), self._worker.trainer.device
        facts: dict[str, Any] = {"loss": outcome.loss, "seconds": outcome.seconds}
        if device.type == "cpu":
            return facts
        total = torch.cuda.get_device_properties(device).total_memory
        facts |= {
            "device": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "peak_bytes": torch.cuda.max_memory_reserved(device),
            "device_bytes": total,
            "refused": False,
        }
        try:
            torch.empty(total // PER_DEVICE + 2**21, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            facts["refused"] = True
        return facts


def pack(resources: ResourceSettings, model: Member, *, sequences: int, directory: Path) -> list[dict[str, Any]]:
    """Train on all workers at the same time, each with its own seed, and return each worker's report.

    Args:
        directory: Folder of a study, with its corpus.
    """
    batch = sequences * model.context_length
    segments = chain(Hyperparameters(learning_rate=0.002, batch_tokens=batch), _STEPS * batch)
    corpus = Corpus.open(directory / CORPUS)
    chains = [
        Chain(
            numerics=Numerics(
                model=model,
                base=model,
                corpus_key=corpus.key,
                seed=seed,
                evaluation_tokens=16 * model.context_length,
                precision="bf16" if resources.gpus_per_worker else "fp32",
            ),
            segments=segments,
        )
        for seed in range(resources.workers)
    ]
    ledger = Ledger(directory / LEDGER)
    ledger.claim({"name": "doctor"}, {})  # which makes the file that workers open
    remote: Any = ray.remote(num_cpus=resources.cpus_per_worker, num_gpus=resources.gpus_per_worker)(SharingActor)
    with cluster(resources):
        workers = [remote.remote(ledger.for_worker(), resources, package_fingerprint()) for _ in chains]
        try:
            ray.get([worker.__ray_ready__.remote() for worker in workers])
            return list(ray.get([w.reach.remote(c) for w, c in zip(workers, chains, strict=True)]))
        finally:
            for worker in workers:
                ray.kill(worker)


def packed(device: str, directory: Path, model: Member) -> tuple[list[Check], list[dict[str, Any]]]:
    """Check two workers on each GPU, or two on this CPU; also return their reports."""
    on_gpu = device == "cuda"
    resources = ResourceSettings(
        workers=PER_DEVICE * (torch.cuda.device_count() if on_gpu else 1),
        cpus_per_worker=0.5,
        gpus_per_worker=1 / PER_DEVICE if on_gpu else 0.0,
    )
    try:
        facts = pack(resources, model, sequences=64 if on_gpu else 4, directory=directory)
    except Exception as error:  # Ray's errors, too: the report is written in any case
        return [Check(what="packing", status="fail", found=last_line(error), bound="two workers on each device")], []
    return list(packing_checks(facts)), facts


def packing_checks(facts: list[dict[str, Any]]) -> Iterator[Check]:
    """Check that workers trained, on which device, and that memory was kept apart."""
    trained = sum(fact["loss"] is not None and math.isfinite(fact["loss"]) for fact in facts)
    yield Check.judged(
        "packing: workers trained", trained == len(facts), str(trained), f"{len(facts)} at the same time", trained
    )
    if "device" not in facts[0]:
        yield Check(what="packing: memory", status="skipped", found="a CPU's memory is not shared out")
        return
    on_each = Counter(fact["device"] for fact in facts)
    yield Check.judged(
        "packing: workers on a device",
        set(on_each.values()) == {PER_DEVICE},
        ", ".join(map(str, on_each.values())),
        f"{PER_DEVICE} on each",
        max(on_each.values()),
    )
    share = max(fact["peak_bytes"] / fact["device_bytes"] for fact in facts)
    yield Check.judged(
        "packing: memory of a worker",
        share <= 1 / PER_DEVICE,
        f"{share:.0%} of the device",
        f"≤ {1 / PER_DEVICE:.0%}",
        share,
    )
    refused = sum(fact["refused"] for fact in facts)
    yield Check.judged(
        "packing: more than its share",
        refused == len(facts),
        f"refused to {refused}",
        f"refused to all {len(facts)}",
        refused,
    )
