"""The check for held-out text in a study's training text, and its record in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from muscale.serialization import Recorded, converter
from muscale.settings import corpus as data
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.data.leaks.leak_report import LeakReport
from proxy_models.data.leaks.leak_search import find_leaks

SHOWN = 10
"""Passages that are named in messages."""


@dataclass(frozen=True, kw_only=True)
class LeakCheck(Recorded):
    """How much held-out text the training text holds, and whether that is little enough.

    Attributes:
        most_leaked: Limit on the share of held-out words in leaked documents.
    """

    DERIVED = ("passed",)

    report: LeakReport
    most_leaked: float

    @property
    def passed(self) -> bool:
        """Whether the share is within the limit."""
        return self.report.share <= self.most_leaked

    @property
    def compared(self) -> str:
        """The shares in one line."""
        report = self.report
        checked = "" if report.indexed == 1 else f"; {report.indexed:.1%} of the held-out text was looked up"
        return (
            f"{report.share:.2%} of held-out words are in documents that the training text holds (at most {self.most_leaked:.2%}), "
            f"{report.repeated_share:.2%} in any passage of it{checked}"
        )

    def table(self) -> pd.DataFrame:
        """Return a row for each of the worst passages, with both places."""
        rows = [
            (
                f"{one.file}:{one.line}",
                f"{one.held_out_file}:{one.held_out_line}",
                f"{one.n_units:,} {one.unit}",
                f"{one.share:.0%}",
                one.text,
            )
            for one in self.report.leaks[:SHOWN]
        ]
        return pd.DataFrame(
            rows, columns=["training text", "held-out text", "shared", "of the held-out document", "begins"]
        )

    def __str__(self) -> str:
        lines = [f"leak check {'passed' if self.passed else 'FAILED'}: {self.compared}"]
        for name, source in self.report.held_out.items():
            by_source = ", ".join(
                f"{training} {n / source.n_units:.2%}"
                for training, n in sorted(source.by_source.items(), key=lambda item: -item[1])
            )
            lines.append(
                f"  {name}: {source.leaked_documents:,} of {source.documents:,} held-out documents leaked"
                + (f"; words found in {by_source}" if by_source else "")
                + (f"; {source.skipped:,} too short to look up" if source.skipped else "")
            )
        lines += [f"  {leak}: {leak.text[:60]!r}" for leak in self.report.leaks[:SHOWN]]
        if (more := self.report.n_leaks - SHOWN) > 0:
            lines.append(f"  and {more:,} more passages")
        return "\n".join(lines)


def known_leaks(config: StudyConfig, ledger: Ledger, corpus: Corpus) -> LeakCheck | None:
    """Return the recorded check of a corpus; None if there is none."""
    known = ledger.result(ResultKind.LEAKS, corpus.key)
    if known is None:
        return None
    return LeakCheck(report=converter.structure(known, LeakReport), most_leaked=config.corpus.most_leaked)


def check_leaks(
    config: StudyConfig, ledger: Ledger, corpus: Corpus, directory: Path, on_progress: Callable[[int, int], None]
) -> LeakCheck:
    """Compare the corpus's held-out text with its training text and record the result, or return the recorded one.

    Args:
        on_progress: Called with the bytes read and all bytes.

    Raises:
        CorpusError: If a source can't be read.
    """
    if known := known_leaks(config, ledger, corpus):
        return known
    sources = data.tokenized_sources(config.corpus, directory, directory, on_progress)
    report = find_leaks(
        sources, sources, validation_fraction=config.corpus.validation_fraction, on_progress=on_progress
    )
    ledger.record_result(ResultKind.LEAKS, corpus.key, converter.unstructure(report))
    return LeakCheck(report=report, most_leaked=config.corpus.most_leaked)
