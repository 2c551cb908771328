"""The check of a study's text: held-out text in the training text, near-duplicates within it, and their records in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from muscale.serialization import Recorded, converter
from muscale.settings import corpus as data
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from proxy_models.data.cleaning.duplicate_share import NearDuplicateShare, near_duplicate_shares
from proxy_models.data.corpus import Corpus
from proxy_models.data.leaks.leak_report import LeakReport
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.sources import CorpusError, Source

SHOWN = 10
"""Passages that are named in messages."""


@dataclass(frozen=True, kw_only=True)
class LeakCheck(Recorded):
    """How much held-out text the training text holds, and whether that is little enough.

    Attributes:
        most_leaked: Limit on the share of held-out words in leaked documents.
        near_duplicates: Near-duplicates within the training text of each source; None if they were not counted.
    """

    DERIVED = ("passed",)

    report: LeakReport
    most_leaked: float
    near_duplicates: Mapping[str, NearDuplicateShare] | None = None

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
            f"{report.share:.2%} of held-out words are in documents that the training text contains (at most {self.most_leaked:.2%}), "
            f"{report.repeated_share:.2%} in any passage of it{checked}"
        )

    @property
    def repeated(self) -> str:
        """The near-duplicates by source in one line; empty if they were not counted, or no source is text."""
        if not self.near_duplicates:
            return ""
        shares = ", ".join(
            f"{name} {one.share:.2%} ({one.duplicates:,} of {one.documents:,} documents"
            f"{f' in a sample of {one.compared:.1%}' if one.compared < 1 else ''})"
            for name, one in self.near_duplicates.items()
        )
        return f"near-duplicates within the training text: {shares}"

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
        return "\n".join([*lines, self.repeated] if self.repeated else lines)


def known_leaks(config: StudyConfig, ledger: Ledger, corpus: Corpus) -> LeakCheck | None:
    """Return the recorded check of a corpus; None if there is none."""
    known, shares = (ledger.result(kind, corpus.key) for kind in (ResultKind.LEAKS, ResultKind.NEAR_DUPLICATES))
    if known is None:
        return None
    return LeakCheck(
        report=converter.structure(known, LeakReport),
        most_leaked=config.corpus.most_leaked,
        near_duplicates=None if shares is None else converter.structure(shares, dict[str, NearDuplicateShare]),
    )


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


def shared_text(
    new: Corpus, earlier: Corpus, ledger: Ledger, on_progress: Callable[[int, int], None]
) -> LeakReport | None:
    """Look for held-out text of an earlier corpus in the training text of a new one, and record the result.

    None: it can't be compared, since a source is gone or they hold out different shares.
    """
    fractions = {files.manifest["validation_fraction"] for of in (new, earlier) for files in of.sources.values()}
    if len(fractions) != 1 or not (new.sources and earlier.sources):
        return None
    key = input_key(new.key, earlier.key)
    if (known := ledger.result(ResultKind.LEAKS, key)) is None:
        sources = [
            {name: Source(**files.manifest["source"]) for name, files in of.sources.items()} for of in (new, earlier)
        ]
        try:
            report = find_leaks(*sources, validation_fraction=fractions.pop(), on_progress=on_progress)
        except (CorpusError, OSError):
            return None
        known = converter.unstructure(report)
        ledger.record_result(ResultKind.LEAKS, key, known)
    return converter.structure(known, LeakReport)


def count_near_duplicates(
    config: StudyConfig, ledger: Ledger, corpus: Corpus, directory: Path, on_progress: Callable[[int, int], None]
) -> None:
    """Count the near-duplicates within the corpus's training text and record their shares.

    Raises:
        CorpusError: If a source can't be read, or the library that finds them is missing.
    """
    if ledger.result(ResultKind.NEAR_DUPLICATES, corpus.key) is None:
        sources = data.tokenized_sources(config.corpus, directory, directory, on_progress)
        shares = near_duplicate_shares(
            sources, validation_fraction=config.corpus.validation_fraction, on_progress=on_progress
        )
        ledger.record_result(ResultKind.NEAR_DUPLICATES, corpus.key, converter.unstructure(shares))
