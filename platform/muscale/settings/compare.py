"""[variants.NAME] and [compare] of the study file: changes to the study, and the runs that measure their compute multiplier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.settings.corpus import ONE_SOURCE, CorpusSettings
from muscale.settings.fixed_values import BY_TENSORS, unfit_values
from muscale.settings.plan import Stem
from muscale.settings.strict import StrictTable, TableError, build_strictly, format_errors
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.data.tokenizer import MIN_TRAINED_VOCAB
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from scaling.variants.verdicts import ERROR, WORTH

BASELINE = "baseline"
"""Name of the study itself among its variants."""
MIN_RATES = 3  # of a grid; a parabola needs three
# keys that must stay the study's: otherwise losses would be on other held-out text
_SHARED_DATA = ("validation_fraction", "evaluation_tokens")
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
    widths: tuple[PositiveInt, ...] = ()  # widths of the rate grids; none: the two smallest of transfer.widths
    stems: tuple[Stem, ...] = ()  # each annealed once, at its end; none: those of [ladder]
    # seeds of weights and data order, paired with the study's
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1)
    # of the run that is decided on; none: the plan's, with one size the largest run's
    target_flops: PositiveFloat | None = None
    # least gain in compute, as a share, that is worth a change
    worth: Annotated[float, Field(ge=0, allow_inf_nan=False)] = WORTH
    error: Annotated[float, Field(gt=0, lt=1)] = ERROR  # probability that any promotion is wrong; or any rejection

    @pydantic.field_validator("seeds", "widths")
    @classmethod
    def _differ(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if len({*values}) < len(values):
            raise ValueError("must all differ")
        return values


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


def corpus_errors(name: str, variant: VariantSettings, base: CorpusSettings, vocab_size: int) -> list[str]:
    """Broken rules of a variant's corpus, one per line; reads no file.

    Args:
        vocab_size: Of the study's model.
    """
    where = f"variants.{name}.corpus"
    if kept := [key for key in _SHARED_DATA if key in variant.corpus]:
        rule = "must stay the study's, because losses are compared on its held-out text"
        return [f"{where}.{key}: {rule}, got {variant.corpus[key]!r}" for key in kept]
    try:
        settings = variant.corpus_of(base)
    except pydantic.ValidationError as error:
        return format_errors(error, where, CorpusSettings, separator=".")
    known = ("corpus", "model") if variant.names_tokenizer(base) else "corpus"
    found = settings.cross_field_errors(variant.model.get("vocab_size", vocab_size))
    return [f"variants.{name}.{line}" for line in found if line.startswith(known)]


def variant_errors(
    name: str,
    variant: VariantSettings,
    base: Member,
    own: Member | None,
    h: Hyperparameters,
    stems: tuple[Stem, ...],
    widths: tuple[int, ...],
    *,
    trainer: bool,
    new_tokens: bool,
) -> list[str]:
    """Broken rules of one variant, one per line: `variants.NAME.table: rule, got value`.

    Args:
        base: The study's model.
        own: The variant's model, if it is a custom model or a program and was imported or described.
        stems, widths: Runs and widths at which the variant will be trained.
        new_tokens: Whether the variant names a tokenizer.
    """
    where = f"variants.{name}"
    if name == BASELINE:
        return [f"{where}: is the name of the study itself; choose another name"]
    if trainer and variant.model:
        return [
            f"{where}.model: the [trainer] program defines the model, so use {where}.trainer; got {', '.join(variant.model)}"
        ]
    if variant.trainer and not trainer:
        return [
            f"{where}.trainer: needs a study with [trainer], because its program trains all variants; got {variant.trainer!r}"
        ]
    shared_model = ("context_length",) if new_tokens else ("context_length", "document_separator")
    for table, shared in (("model", shared_model), ("trainer", ("data",))):
        values: Mapping[str, Any] = getattr(variant, table)
        if kept := [key for key in shared if key in values]:
            rule = "must stay the study's, because losses are compared on the same held-out text"
            return [f"{where}.{table}.{key}: {rule}, got {values[key]!r}" for key in kept]
    if variant.is_own(base) and own is None:
        return []  # its errors are listed already, or the variant is not trained here
    checks: dict[str, Callable[[], None]] = {
        "model": lambda: _sized(own or variant.model_of(base), stems, widths),
        "hyperparameters": lambda: _trainable(variant.hyperparameters_of(h), own or variant.model_of(base), stems),
    }
    for table, check in checks.items():
        try:
            check()
        except ValueError as error:
            return [f"{where}.{table}: {line}" for line in str(error).splitlines()]
    return []


def _sized(model: Member, stems: tuple[Stem, ...], widths: tuple[int, ...]) -> None:
    family = ModelFamily(base=model)
    for stem in stems:
        stem.of(family)
    for width in widths:
        family.at(width=width)


def _trainable(h: Hyperparameters, model: Member, stems: tuple[Stem, ...]) -> None:
    if h.swap_optimizer or h.schedule == "constant":
        raise ValueError(f"a variant must be annealed with one optimizer, got {h.swap_optimizer or h.schedule!r}")
    for name in BY_TENSORS:
        if unfit := unfit_values(model, name, [getattr(part, name) for part in h.stretches]):
            raise ValueError(f"{name}: {unfit}")
    if h.batch_tokens % model.context_length:
        raise ValueError(
            f"batch_tokens: must be a multiple of the context {model.context_length}, got {h.batch_tokens}"
        )
    for stem in stems:
        chain(h, h.whole_batches(stem.n_tokens))
