"""The parts of an evaluation: a model with its weights, and measures that give scores.

A measure does not know where the weights come from: a ladder run, a checkpoint of a full run or a bundle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from proxy_models.evaluation.request_log import RequestLog

if TYPE_CHECKING:  # readers of scores need no torch
    import torch
    from torch import nn

    from proxy_models.architecture.model_ranks import Ranks
    from proxy_models.data.corpus import Corpus
    from proxy_models.data.tokenizer import Tokenizer
    from proxy_models.training.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of an evaluation.

    Attributes:
        measure: Name of the measure, such as "tasks".
        name: What was measured: a task, a source, a component; "" if the measure has a single number.
        metric: Name of the number, such as "bits_per_byte" or "accuracy".
        value: The number.
        standard_error: Of the value over items; None if it has none.
        n: Items.
    """

    measure: str
    name: str
    metric: str
    value: float
    standard_error: float | None
    n: int

    def __str__(self) -> str:
        spread = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"{' '.join(part for part in (self.name, self.metric) if part)} {self.value:.4g}{spread} ({self.n})"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text sample.

    Attributes:
        prompt: Start of a document.
        text: Text generated after the prompt.
    """

    prompt: str
    text: str
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Scores and texts that a measure found for one model.

    Attributes:
        samples: Texts, for a measure that generates them.
    """

    scores: tuple[Score, ...]
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with its weights, as measures see it.

    Attributes:
        model: The model, whole or sharded over ranks that measure it together, on its device, in the precision of its run, and in
            evaluation mode.
        numerics: Numerics of its run: member, seed and held-out tokens.
        text: The corpus of its run; None if it is not here, as for a bundle elsewhere.
        tokens: Tokens that its run has trained so far.
        position: Tokens of the corpus at which token 0 of its run is.
        progress: Folder of this evaluation, where a measure that takes long keeps what it has done, in a file named after its key, so
            that it continues after an interruption; None keeps nothing.
        own_tokenizer: The tokenizer, where it is known without the corpus.
    """

    model: nn.Module
    numerics: Numerics
    text: Corpus | None
    tokens: int
    position: int = 0
    progress: Path | None = None
    own_tokenizer: Tokenizer | None = None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks that hold the model."""
        from proxy_models.architecture.model_ranks import Ranks

        return Ranks.of(self.model)

    def log(self, name: str) -> RequestLog:
        """Return the results that a measure keeps under a name; rank 0 reads and writes the file."""
        found = RequestLog(self.progress / f"{name}.jsonl" if self.progress and not self.ranks.rank else None)
        found.found = self.ranks.from_first(lambda: found.found)
        return found

    @property
    def corpus(self) -> Corpus:
        """The corpus of its run; raises ValueError if it is not here."""
        if self.text is None:
            raise ValueError("this measure needs the corpus of the run; give its folder")
        return self.text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises CorpusError if the corpus has none."""
        return self.own_tokenizer or self.corpus.tokenizer()


class Measure(Protocol):
    """One kind of measurement; picklable, because workers run it."""

    @property
    def name(self) -> str:
        """Name of the measure, the same as in its scores."""

    @property
    def key(self) -> str:
        """Hash of everything but the weights that determines the scores."""

    def measure(self, subject: Subject) -> Measured:
        """Measure a model; its weights and mode are as before afterwards."""
