"""What runs inside Ray: a warm actor that trains chains."""

from __future__ import annotations

from muscale.fingerprint import require_same_package
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger, Outcome
from muscale.store.lineage import Chain


class TrainingActor:
    """A worker in a process of its own, if that computes with the driver's code."""

    def __init__(self, ledger: Ledger, resources: ResourceSettings, package: str) -> None:
        require_same_package(package)
        import torch  # here, as the driver names this class and needs no torch

        from muscale.actors.worker import Worker

        torch.set_num_threads(resources.threads)
        stall_seconds = 60 * resources.stall_minutes
        self._worker = Worker(ledger, compiled=resources.compile, device=resources.device, stall_seconds=stall_seconds)

    def reach(self, chain: Chain) -> Outcome:
        """Train the chain to its end."""
        return self._worker.reach(chain)
