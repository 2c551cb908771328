"""[variants.NAME] and [compare] of the study file: changes to the study, and the runs that measure their compute multiplier."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

from muscale.settings.corpus import ONE_SOURCE, CorpusSettings
from muscale.settings.plan import Stem
from muscale.settings.strict import AllDiffer, StrictTable, TableError, build_strictly
from proxy_models.architecture.member import Member
from proxy_models.data.tokenizer import MIN_TRAINED_VOCAB
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling.variants.verdicts import ERROR, WORTH

BASELINE = "baseline"
"""Name of the study itself among its variants."""
MIN_RATES = 3  # of a grid; a parabola needs three
TOKENIZER = frozenset(("tokenizer", "end_of_document"))
_Changed = TypeVar("_Changed", Member, Hyperparameters)


class VariantSettings(StrictTable):
    """[variants.NAME]: changes to the study. An empty table is a second baseline, which no verdict should favour."""

    # changed keys of [model]; for a custom family also family, and args of its class
    model: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] = Field(default_factory=dict)  # keys of [trainer], if the study has one
    hyperparameters: dict[str, Any] = Field(default_factory=dict)  # learning_rate: centre of the variant's rate grid
    corpus: dict[str, Any] = Field(default_factory=dict)  # keys of [corpus]; evaluated on the study's held-out text

    def is_own(self, base: Member) -> bool:
        """Whether the variant's model is a family to import or a program to run, other than the study's model unchanged."""
        return bool(self.trainer) or "family" in self.model or (bool(self.model) and base.is_custom)

    def model_of(self, base: Member) -> Member:
        """The variant's model at the base shape: a changed decoder, or the study's model."""
        return changed(base, self.model)

    def hyperparameters_of(self, base: Hyperparameters) -> Hyperparameters:
        """The variant's hyperparameters; the learning rate is the centre of its grid."""
        return changed(base, self.hyperparameters)

    def names_tokenizer(self, base: CorpusSettings) -> bool:
        """Whether the variant names a tokenizer, or trains the study's kind to its own vocabulary."""
        is_trained = base.tokenizer in MIN_TRAINED_VOCAB and "vocab_size" in self.model
        return is_trained or not TOKENIZER.isdisjoint(self.corpus)

    def has_corpus(self, base: CorpusSettings) -> bool:
        """Whether the variant needs another corpus than the study's."""
        return bool(self.corpus) or self.names_tokenizer(base)

    def corpus_of(self, base: CorpusSettings) -> CorpusSettings:
        """The variant's corpus: the study's with other keys; without a tokenizer if the variant names none.

        Raises:
            ValidationError: If a value breaks its rule.
        """
        dropped = ONE_SOURCE if "sources" in self.corpus else ("sources", "stages") if "source" in self.corpus else ()
        if "tokenizer" in self.corpus or not self.names_tokenizer(base):
            dropped = (*dropped, *TOKENIZER)
        own = base.model_dump(exclude_unset=True)
        kept = {key: value for key, value in own.items() if key not in dropped}
        return CorpusSettings(**_merged(kept, self.corpus))


class CompareSettings(StrictTable):
    """[compare]: how variants are tuned, and the runs that compare them with the study."""

    rates: Annotated[int, Field(ge=MIN_RATES)] = 3  # the middle ones of [transfer]'s grid; one more if the grid is even
    # widths of the rate grids; none: the two smallest of transfer.widths
    widths: Annotated[tuple[PositiveInt, ...], AllDiffer] = ()
    stems: Annotated[tuple[Stem, ...], AllDiffer] = ()  # each annealed once, at its end; none: those of [ladder]
    # seeds of weights and data order, paired with the study's
    seeds: Annotated[tuple[int, ...], Field(min_length=1), AllDiffer] = (0, 1)
    # of the run that is decided on; none: the plan's, with one size the largest run's
    target_flops: PositiveFloat | None = None
    # least gain in compute, as a share, that is worth a change
    worth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = WORTH
    error: Annotated[float, Field(gt=0, lt=1)] = ERROR  # probability that any promotion is wrong; or any rejection


def changed(base: _Changed, changes: Mapping[str, Any]) -> _Changed:
    """The base with some fields changed, checked as a study file is; raises ValueError with a line for each broken rule."""
    own = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    try:
        return build_strictly(type(base), own | dict(changes), "")
    except TableError as error:
        raise ValueError("\n".join(line.lstrip(".: ") for line in error.lines)) from error


def _merged(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; other values are replaced."""
    both = {
        key: _merged(own[key], value) if isinstance(value, dict) and isinstance(own.get(key), dict) else value
        for key, value in changes.items()
    }
    return {**own, **both}
