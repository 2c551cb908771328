"""The continuation file: how training continues from a checkpoint of a full run; read as strictly as the study file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.errors import StudyFileError
from muscale.settings.corpus import CorpusSettings
from muscale.settings.further_corpus import further_errors
from muscale.settings.overrides import Overrides, override
from muscale.settings.strict import StrictTable, format_errors, lists_to_tuples
from muscale.settings.toml_file import read_toml
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.recipes.continued import ContinuedSchedule
from proxy_models.recipes.schedule import COOLING

INLINE = "muscale amend"  # where an amendment without a file is written


class ParentSettings(StrictTable):
    """[parent]: the checkpoint that the continuation starts from."""

    run: str | None = None  # key of a plan, or key or name of a continuation; none: the run promoted last
    tokens: PositiveInt | None = None  # tokens of that run at the checkpoint; none: its end


class FurtherRun(StrictTable):
    """A file of a run that starts from a checkpoint of another one.

    Paths in [corpus] are relative to the file. Without [corpus] the parent's corpus is used. A [corpus] without `tokenizer`,
    `validation_fraction` or `evaluation_tokens` inherits them.
    """

    parent: ParentSettings = ParentSettings()
    corpus: CorpusSettings = CorpusSettings()

    @property
    def own_corpus(self) -> CorpusSettings | None:
        """[corpus] if the file has one."""
        return self.corpus if "corpus" in self.model_fields_set else None

    @classmethod
    def read(cls, path: Path | None, overrides: Overrides = (), *, vocab_size: int) -> Self:
        """Read a file for a model of this vocabulary.

        Args:
            path: None: the overrides have all of it.
            overrides: Values that replace the file's, as for a study file.

        Raises:
            StudyFileError: Naming file, key, rule and value of each error.
        """
        where = str(path or INLINE)
        values = read_toml(path, StudyFileError) if path else {}
        override(values, overrides)
        try:
            file = cls(**lists_to_tuples(values))
        except pydantic.ValidationError as error:
            raise StudyFileError("\n".join(format_errors(error, where, cls))) from error
        if file.own_corpus and (problems := further_errors(file.own_corpus, vocab_size)):
            raise StudyFileError("\n".join(f"{where}: {problem}" for problem in problems))
        return file


class ContinuationFile(FurtherRun):
    """A continuation file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    n_tokens: PositiveInt  # tokens of the continuation, without the parent's
    learning_rate_factor: PositiveFloat = 1.0  # factor on the parent's peak rate
    learning_rate: PositiveFloat | None = None  # the peak itself, at the base shape, instead of the factor
    rewarm_tokens: Annotated[int, Field(ge=0)] = 0  # tokens over which the rate rises from zero
    schedule: ContinuedSchedule = "wsd"  # after rewarming
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.15  # share of the continuation; 1: all of it
    final_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1  # share of the peak, at the end of "cosine"
    optimizer: OptimizerName | None = None  # replaces the parent's, whose moments are dropped
    seed: int | None = None  # seed of the data order of a new corpus; none: the parent's

    @property
    def changes(self) -> dict[str, Any]:
        """Changes of the continuation, by the keys of an amendment; the schedule is always one of them."""
        stated = self.model_dump(
            mode="json", exclude_unset=True, exclude={"name", "parent", "n_tokens", "seed", "corpus"}
        )
        changes = {f"hyperparameters.{name}": value for name, value in ({"schedule": self.schedule} | stated).items()}
        return changes | (
            {"corpus": self.corpus.model_dump(mode="json", exclude_unset=True)} if self.own_corpus else {}
        )

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        require_comparable_rates(self)
        for name, readers in (("cooldown_fraction", COOLING), ("final_fraction", ("cosine",))):
            if name in self.model_fields_set and self.schedule not in readers:
                raise ValueError(
                    f'{name} is for schedule {" and ".join(readers)}, got {getattr(self, name)} with "{self.schedule}"'
                )
        return self


def require_comparable_rates(file: Any) -> None:
    """Refuse a rate that is stated twice, and another optimizer without a stated rate; raise ValueError."""
    rate, factor, rewarm = file.learning_rate, file.learning_rate_factor, file.rewarm_tokens
    if {"learning_rate", "learning_rate_factor"} <= file.model_fields_set:
        raise ValueError(f"learning_rate and learning_rate_factor can't be combined, got {rate} and {factor}")
    if file.optimizer and not (rate and rewarm):
        raise ValueError(
            f'optimizer = "{file.optimizer}" needs learning_rate, because rates of two optimizers are not comparable, '
            f"and rewarm_tokens, because its moments start at zero; got {rate} and {rewarm}"
        )
