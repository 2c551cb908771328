"""Rules of [variants.NAME] that depend on the rest of the study file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic

from muscale.settings.compare import BASELINE, VariantSettings
from muscale.settings.corpus import CorpusSettings
from muscale.settings.fixed_values import BY_TENSORS, unfit_values
from muscale.settings.plan import Stem
from muscale.settings.strict import format_errors
from muscale.settings.tables import StudyTables
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain

# keys that must stay the study's: otherwise losses would be on other held-out text
_SHARED_DATA = ("validation_fraction", "evaluation_tokens")


def variants_errors(config: StudyTables) -> Iterator[str]:
    """Yield the broken rules of the variants: `variants.NAME.table: rule, got value`."""
    for name, variant in config.variants.items():
        yield from _variant_errors(config, name, variant)
        if variant.corpus and config.trainer:
            yield f"variants.{name}.corpus: the [trainer] program reads its own data; leave it out"
        elif variant.has_corpus(config.corpus) and (ranks := config.resources.ranks_per_trial) > 1:
            yield f"variants.{name}.corpus: needs resources.ranks_per_trial = 1, got {ranks}"
        elif variant.has_corpus(config.corpus):
            yield from _corpus_errors(config, name, variant)


def _corpus_errors(config: StudyTables, name: str, variant: VariantSettings) -> list[str]:
    """Broken rules of a variant's corpus; reads no file."""
    where = f"variants.{name}.corpus"
    if kept := [key for key in _SHARED_DATA if key in variant.corpus]:
        rule = "must stay the study's, because losses are compared on its held-out text"
        return [f"{where}.{key}: {rule}, got {variant.corpus[key]!r}" for key in kept]
    try:
        settings = variant.corpus_of(config.corpus)
    except pydantic.ValidationError as error:
        return format_errors(error, where, CorpusSettings, separator=".")
    known = ("corpus", "model") if variant.names_tokenizer(config.corpus) else "corpus"
    found = settings.cross_field_errors(variant.model.get("vocab_size", config.model.vocab_size))
    return [f"variants.{name}.{line}" for line in found if line.startswith(known)]


def _variant_errors(config: StudyTables, name: str, variant: VariantSettings) -> list[str]:
    """Broken rules of the other tables of a variant."""
    where, trainer = f"variants.{name}", config.trainer is not None
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
    new_tokens = variant.names_tokenizer(config.corpus)
    shared_model = ("context_length",) if new_tokens else ("context_length", "document_separator")
    for table, shared in (("model", shared_model), ("trainer", ("data",))):
        values: Mapping[str, Any] = getattr(variant, table)
        if kept := [key for key in shared if key in values]:
            rule = "must stay the study's, because losses are compared on the same held-out text"
            return [f"{where}.{table}.{key}: {rule}, got {values[key]!r}" for key in kept]
    if variant.is_own(config.model) and name not in config._variant_models:
        return []  # its errors are listed already, or the variant is not trained here
    stems, widths = config.compare.stems or config.ladder.stems, config.compare.widths or config.transfer.widths
    h = config.hyperparameters
    checks: dict[str, Callable[[], None]] = {
        "model": lambda: _sized(config.variant_model(name), stems, widths),
        "hyperparameters": lambda: _trainable(variant.hyperparameters_of(h), config.variant_model(name), stems),
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
