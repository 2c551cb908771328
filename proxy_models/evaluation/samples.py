"""Texts that a model writes after fixed prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from proxy_models.architecture.generate import continue_text
from proxy_models.evaluation.measure import Measured, Sample, Subject
from proxy_models.hashing import content_key

SAMPLE_SEED = 0
"""Seed for sampling; it is the same for all checkpoints, so that samples differ only because of the weights."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Continues each prompt once.

    Attributes:
        prompts: Starts of documents.
        n_tokens: Most tokens of a sample.
        temperature: 0 always takes the most likely token; otherwise tokens are sampled after dividing logits by the temperature.
    """

    prompts: tuple[str, ...]
    n_tokens: int = 64
    temperature: float = 1.0
    seed: int = SAMPLE_SEED

    name = "samples"

    def __post_init__(self) -> None:
        if self.n_tokens < 1:
            raise ValueError(f"samples: n_tokens must be at least 1, got {self.n_tokens}")

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return content_key(asdict(self))

    def measure(self, subject: Subject) -> Measured:
        """The samples, without scores; raises CorpusError if the corpus has no tokenizer, ValueError as `generate`."""

        def sample(prompt: str) -> Sample:
            text = continue_text(
                subject.model,
                subject.tokenizer,
                prompt,
                self.n_tokens,
                member=subject.numerics.model,
                temperature=self.temperature,
                seed=self.seed,
            )
            return Sample(prompt=prompt, text=text, temperature=self.temperature, seed=self.seed)

        samples = tuple(subject.ranks.map(sample, self.prompts))
        return Measured(scores=(), samples=samples)
