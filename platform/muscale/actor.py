"""What runs inside Ray: a warm actor that trains chains, and the same as a Tune trainable."""

from __future__ import annotations

from typing import Any

import torch
from ray import tune

from muscale.fingerprint import require_same_package
from muscale.ledger import Ledger, Outcome
from muscale.lineage import Chain
from muscale.trial import TrialPlan
from muscale.worker import Worker
from proxy_models.compilation import Compile

WORST_LOSS = 1e9  # finite, as Tune's searchers and schedulers refuse NaN; the adapters replace it


class TrainingActor:
    """A worker in a process of its own."""

    def __init__(self, ledger: Ledger, compiled: Compile, threads: int, device: str, package: str) -> None:
        require_same_package(package)
        torch.set_num_threads(threads)
        self._worker = Worker(ledger, compiled=compiled, device=device)

    def reach(self, chain: Chain) -> Outcome:
        """Train the chain to its end."""
        return self._worker.reach(chain)


class Trial(tune.Trainable):
    """A trial of a sweep: each step trains to the next rung and reports the averaged weights' loss there."""

    def setup(  # type: ignore[override]
        self,
        config: dict[str, Any],
        *,
        plan: TrialPlan,
        ledger: Ledger,
        compiled: Compile,
        threads: int,
        device: str,
        package: str,
    ) -> None:
        """Start a trial in a fresh process."""
        require_same_package(package)
        torch.set_num_threads(threads)
        self._plan = plan
        self._worker = Worker(ledger, compiled=compiled, device=device)
        self._rung = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start another trial in this process, with its models warm."""
        self._rung = 0
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next rung."""
        outcome = self._worker.reach(self._plan.rung(self.config, self._rung))
        loss = outcome.averaged_loss
        self._rung += 1
        return {
            "loss": WORST_LOSS if loss is None else loss,
            "rung": self._rung - 1,
            "tokens": outcome.tokens,
            "segment": outcome.key,
            "diverged": outcome.diverged,
            "done": outcome.diverged or self._rung == len(self._plan.rung_tokens),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: the ledger keeps the state."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing: the ledger keeps the state."""
