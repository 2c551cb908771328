"""The stage file: how a full run goes on from one of its checkpoints, read as strictly as the study file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.errors import StudyFileError
from muscale.formatting import format_read_error
from muscale.settings.corpus import CorpusSettings
from muscale.settings.strict import StrictTable, format_errors, lists_to_tuples
from muscale.settings.toml_file import read_toml
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.continued import ContinuedSchedule
from proxy_models.recipes.schedule import COOLING


class ParentSettings(StrictTable):
    """[parent]: the checkpoint that the stage goes on from."""

    run: str | None = None  # key of a plan or of a stage, or a stage's name; none: the run that was promoted last
    tokens: PositiveInt | None = None  # of that run, at the checkpoint; none: its end


class StageFile(StrictTable):
    """A whole stage file.

    Paths in [corpus] are relative to the file. Without [corpus] the parent's is read on. A [corpus] that does not state
    `tokenizer`, `validation_fraction` or `evaluation_tokens` has those of the runs before.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    n_tokens: PositiveInt  # of the stage alone
    learning_rate_factor: PositiveFloat = 1.0  # on the parent's peak rate
    learning_rate: PositiveFloat | None = None  # or the peak itself, at the base shape
    rewarm_tokens: Annotated[int, Field(ge=0)] = 0  # over which the rate rises from zero
    schedule: ContinuedSchedule = "wsd"  # after that
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.15  # of the stage; 1: all of it
    final_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1  # of the peak, at the end of "cosine"
    optimizer: OptimizerName | None = None  # one that takes over; the moments of the parent's are dropped
    seed: int | None = None  # of the order of a new corpus; none: the parent's, or the one it was read in
    parent: ParentSettings = ParentSettings()
    corpus: CorpusSettings = CorpusSettings()

    @property
    def own_corpus(self) -> CorpusSettings | None:
        """[corpus], None where there is none."""
        return self.corpus if "corpus" in self.model_fields_set else None

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        given = self.model_fields_set
        if "learning_rate" in given and "learning_rate_factor" in given:
            raise ValueError(
                f"learning_rate and learning_rate_factor exclude each other, got {self.learning_rate} and "
                f"{self.learning_rate_factor}"
            )
        for name, readers in (("cooldown_fraction", COOLING), ("final_fraction", ("cosine",))):
            if name in given and self.schedule not in readers:
                raise ValueError(
                    f'{name} is for schedule {" and ".join(readers)}, got {getattr(self, name)} with "{self.schedule}"'
                )
        if self.optimizer and (self.learning_rate is None or not self.rewarm_tokens):
            raise ValueError(
                f'optimizer = "{self.optimizer}" needs learning_rate, as rates of two optimizers do not compare, and '
                f"rewarm_tokens, as its moments begin anew; got {self.learning_rate} and {self.rewarm_tokens}"
            )
        return self

    @classmethod
    def read(cls, path: Path, *, vocab_size: int) -> Self:
        """Read a stage file, for a model of this vocabulary.

        Raises:
            StudyFileError: Naming the file, the key, the rule and the value, for each thing that is wrong.
        """
        try:
            values = read_toml(path)
        except OSError as error:
            raise StudyFileError(f"{path}: {format_read_error(error)}") from error
        except ValueError as error:
            raise StudyFileError(f"{path}: {error}") from error
        try:
            stage = cls(**lists_to_tuples(values))
        except pydantic.ValidationError as error:
            raise StudyFileError("\n".join(format_errors(error, str(path), cls))) from error
        if stage.own_corpus and (problems := stage.own_corpus.cross_field_errors(vocab_size)):
            raise StudyFileError("\n".join(f"{path}: {problem}" for problem in problems))
        return stage
