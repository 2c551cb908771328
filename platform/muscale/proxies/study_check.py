"""The coordinate check of a study's family, and its record in the ledger."""

from __future__ import annotations

from dataclasses import replace

from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.data.corpus import Corpus
from proxy_models.training.numerics import Numerics


def known_check(config: StudyConfig, numerics: Numerics, ledger: Ledger) -> CoordinateCheck | None:
    """Return the recorded check from the ledger; None if there is none."""
    known = ledger.result(ResultKind.CHECK, _key(config, numerics))
    return CoordinateCheck.from_dict(known) if known else None


def run_check(config: StudyConfig, numerics: Numerics, ledger: Ledger, corpus: Corpus) -> CoordinateCheck:
    """Check the family on the corpus and record the result."""
    from proxy_models.coordinates.measurement import coordinate_check

    settings, optimizer = config.check, config.hyperparameters.optimizer
    result = coordinate_check(
        config.family,
        config.hyperparameters,
        corpus,
        widths=settings.widths,
        depths=settings.depths or None,
        seeds=settings.seeds,
        parametrization=lambda model, base: replace(numerics, model=model, base=base).parametrization(optimizer),
    )
    ledger.record_result(ResultKind.CHECK, _key(config, numerics), result.to_dict())
    return result


def _key(config: StudyConfig, numerics: Numerics) -> str:
    sizes = [list(of) for of in (config.check.widths, config.check.depths, config.check.seeds)]
    return input_key(numerics.to_dict(), config.hyperparameters.to_dict(), *sizes)
