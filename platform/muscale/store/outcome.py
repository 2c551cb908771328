"""The recorded end of a chain, in the form that workers return; passing an outcome on needs no database."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The recorded end of a chain: losses in nats per token, or the reason why there is no loss."""

    key: str
    tokens: int
    loss: float | None
    averaged_loss: float | None
    diverged_because: str | None
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether the training ended without a loss."""
        return self.diverged_because is not None
