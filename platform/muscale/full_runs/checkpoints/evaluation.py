"""The result of a checkpoint's evaluation: held-out loss by source, scores and text samples."""

from __future__ import annotations

from dataclasses import dataclass

from muscale.serialization import Recorded
from proxy_models.evaluation.measure import Sample, Score


@dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation(Recorded):
    """An evaluated checkpoint, with values named as in the run's metrics; losses in nats per token.

    Attributes:
        checkpoint: Name of the checkpoint's folder.
        tokens: Tokens trained by then.
        val_loss: Held-out loss, as the run itself measures it; None for a bundle evaluated without its corpus.
        source_losses: Held-out loss of each source of a mixture; empty with one source.
        scores: Scores of further measures.
        samples: One sample per prompt.
        seconds: Duration of the evaluation, with loading and sampling.
    """

    checkpoint: str
    tokens: int
    val_loss: float | None
    source_losses: dict[str, float]
    scores: tuple[Score, ...] = ()
    samples: tuple[Sample, ...] = ()
    seconds: float

    def __str__(self) -> str:
        loss = "no held-out text" if self.val_loss is None else f"held-out loss {self.val_loss:.4f} nats per token"
        lines = [f"{self.checkpoint}: {loss}"]
        if self.source_losses:
            lines.append("  " + ", ".join(f"{name} {loss:.4f}" for name, loss in self.source_losses.items()))
        lines += [f"  {score}" for score in self.scores]
        lines += [f"  {sample.prompt!r} → {sample.text!r}" for sample in self.samples]
        return "\n".join(lines)
