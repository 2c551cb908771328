"""What a checkpoint of a full run is worth: its held-out loss, source by source, and text that it writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from scaling.presentation import Result


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a checkpoint wrote after a prompt.

    Attributes:
        prompt: It begins a document.
        text: That followed.
        temperature, seed: Of the draws.
    """

    prompt: str
    text: str
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation(Result):
    """What a checkpoint is worth; losses in nats per token.

    Attributes:
        checkpoint: Its folder's name.
        tokens: That the run had seen.
        loss: Held-out, as the run itself measures it.
        source_losses: Of each source of a mixture; empty with one source.
        samples: One for each prompt.
        seconds: That it took, reading and sampling with it.
    """

    checkpoint: str
    tokens: int
    loss: float
    source_losses: dict[str, float]
    samples: tuple[Sample, ...] = ()
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A row as the run's own evaluations have it: tokens, val_loss, source_losses; samples, checkpoint and seconds with it."""
        return {
            "tokens": self.tokens,
            "val_loss": self.loss,
            "source_losses": self.source_losses,
            "samples": [asdict(sample) for sample in self.samples],
            "checkpoint": self.checkpoint,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        samples = tuple(Sample(**sample) for sample in values["samples"])
        known = {name: values[name] for name in ("checkpoint", "tokens", "source_losses", "seconds")}
        return cls(**known, loss=values["val_loss"], samples=samples)

    def __str__(self) -> str:
        lines = [f"{self.checkpoint}: held-out loss {self.loss:.4f} nats per token"]
        if self.source_losses:
            lines.append("  " + ", ".join(f"{name} {loss:.4f}" for name, loss in self.source_losses.items()))
        lines += [f"  {sample.prompt!r} → {sample.text!r}" for sample in self.samples]
        return "\n".join(lines)
