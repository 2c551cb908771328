"""Losses of a comparison in one unit: the study's, or bits per byte if a variant has another tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from muscale.layout import CORPUS
from muscale.store.ledger import Ledger
from muscale.store.outcome import Outcome
from proxy_models.data.bits_per_byte import UNIT, bits_per_byte, held_out_bytes
from proxy_models.data.corpus import ONE_SOURCE, Corpus


@dataclass(frozen=True, kw_only=True)
class ComparedLosses:
    """Losses of the study's runs and its variants'.

    Attributes:
        ledger: Ledger with the losses by source.
        unit: Unit of the losses.
        study: The study's corpus; None if every variant has the study's tokenizer, so that losses need no conversion.
        held_out: The study's text in the tokens of each variant with another tokenizer.
    """

    ledger: Ledger
    unit: str
    study: Corpus | None
    held_out: Mapping[str, Corpus]

    @classmethod
    def of(cls, ledger: Ledger, corpora: Mapping[str, Corpus], unit: str) -> Self:
        """Choose the unit for variants with these corpora; `unit` is the study's."""
        study = Corpus.open(ledger.directory / CORPUS) if corpora else None
        texts = {name: corpus.held_out for name, corpus in corpora.items() if corpus.held_out}
        others = {name: text for name, text in texts.items() if study and text.key != study.key}
        return cls(ledger=ledger, unit=UNIT if others else unit, study=study if others else None, held_out=others)

    def loss(self, variant: str, outcome: Outcome) -> float:
        """Return the loss of a run of a variant; NaN if it diverged."""
        if outcome.loss is None:
            return math.nan
        if self.study is None:
            return outcome.loss
        row = self.ledger.segment(outcome.key) or {}
        losses = row.get("source_losses") or {ONE_SOURCE: outcome.loss}
        n_bytes = held_out_bytes(next(iter(self.held_out.values())))
        return bits_per_byte(losses, self.held_out.get(variant, self.study), self.study, n_bytes)
