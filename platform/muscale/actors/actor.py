"""What runs inside Ray: a warm actor that trains chains."""

from __future__ import annotations

import torch

from muscale.actors.worker import Worker
from muscale.fingerprint import require_same_package
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger, Outcome
from muscale.store.lineage import Chain


class TrainingActor:
    """A worker in a process of its own."""

    def __init__(self, ledger: Ledger, resources: ResourceSettings, package: str) -> None:
        self._worker = make_worker(ledger, resources, package)

    def reach(self, chain: Chain) -> Outcome:
        """Train the chain to its end."""
        return self._worker.reach(chain)


def make_worker(ledger: Ledger, resources: ResourceSettings, package: str) -> Worker:
    """The process's worker, if it computes with the driver's code."""
    require_same_package(package)
    torch.set_num_threads(resources.threads)
    stall_seconds = 60 * resources.stall_minutes
    return Worker(ledger, compiled=resources.compile, device=resources.device, stall_seconds=stall_seconds)
