"""The result of a checkpoint's evaluation: held-out loss by source, and text samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from scaling.presentation import Result


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text sample.

    Attributes:
        prompt: Start of a document.
        text: Generated after it.
        temperature, seed: Of the sampling.
    """

    prompt: str
    text: str
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation(Result):
    """An evaluated checkpoint; losses in nats per token.

    Attributes:
        checkpoint: Name of its folder.
        tokens: Trained by then.
        loss: Held-out, as the run itself measures it.
        source_losses: Of each source of a mixture; empty with one source.
        samples: One for each prompt.
        seconds: Of the evaluation, with loading and sampling.
    """

    checkpoint: str
    tokens: int
    loss: float
    source_losses: dict[str, float]
    samples: tuple[Sample, ...] = ()
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A row like those of the run's metrics (tokens, val_loss, source_losses), with samples, checkpoint and seconds."""
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
