"""Data that a run has seen: the documents of a step, and the starts of epochs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Self

import pandas as pd

from muscale.actors.corpora import open_corpus
from muscale.errors import StageError
from muscale.findings import StudyContents
from muscale.full_runs.amend.parent import find_full_run
from muscale.full_runs.promote.promotion import FULL_RUN_LABEL
from muscale.store.ledger import Ledger
from muscale.store.run_selection import one_run
from muscale.store.statements import find
from proxy_models.data.batch_documents import batch_documents
from proxy_models.data.batches import Stream, training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class SeenData:
    """Data of a run, from which each of its batches follows.

    Attributes:
        segments: All segments of the run.
        position: Tokens of the corpus at which the run starts; 0 except for a continuation.
    """

    corpus: Corpus
    numerics: Numerics
    segments: tuple[Segment, ...]
    position: int = 0

    @classmethod
    def of(cls, study: StudyContents, run: str) -> Self:
        """Find the data of a run by the beginning of its key or, for a full run, of its plan's; of a continuation by its name.

        Raises:
            StageError: If the trainer reads its own data, or the run's corpus is not known.
            RunSelectionError: If no run, or more than one, matches.
        """
        own = study.corpus
        if own is None or own.is_own_data:
            raise StageError(
                "runs: --batch needs a corpus, but this study has none: no run has started, or the trainer reads its own data"
            )
        runs = study.ledger.runs(without=("hyperparameters", "environment", "seconds"))
        for key in (run, _plan_of(run, runs, study.ledger)):
            if full := find_full_run(key, study.ledger, own, study.config.shared_numerics(own, study.directory)):
                return cls(corpus=full.corpus, numerics=full.numerics, segments=full.segments, position=full.position)
        row = one_run(runs, run)
        segments = tuple(_segments(study.ledger, row["key"]))
        numerics = Numerics.from_dict(row["numerics"])
        corpus = open_corpus(study.directory, numerics.corpus_key)
        if corpus is None:
            raise StageError(f"runs: the corpus {numerics.corpus_key} of run {row['key']} is not in {study.directory}")
        return cls(corpus=corpus, numerics=numerics, segments=segments)

    @property
    def _stream(self) -> Stream:
        n = self.numerics
        return training_stream(self.corpus, n.model.context_length, n.seed, run_tokens=n.run_tokens)

    def batch(self, step: int) -> pd.DataFrame:
        """Return the parts of documents of a step, counted from 0, as `batch_documents` describes them.

        Raises:
            StageError: If the run has no such step.
        """
        steps = chain.from_iterable(segment.steps() for segment in self.segments)
        found = next(islice(steps, step, None), None) if step >= 0 else None
        if found is None:
            last = self.segments[-1]
            raise StageError(
                f"runs: --batch: the step must lie between 0 and {last.recipe.ramp.n_steps(last.end) - 1}, got {step}"
            )
        tokens, batch_tokens = found
        context = self.numerics.model.context_length
        return batch_documents(self.corpus, self._stream, context, self.position + tokens, batch_tokens)

    def epoch_starts(self) -> pd.DataFrame:
        """Return source, epoch and tokens of the run for each epoch after the first that begins within the run."""
        end = self.position + self.segments[-1].end
        rows = self._stream.epoch_starts(self.position, end)
        table = pd.DataFrame(rows, columns=["source", "epoch", "tokens"])
        return table.assign(tokens=table["tokens"] - self.position)


def _plan_of(run: str, runs: pd.DataFrame, ledger: Ledger) -> str:
    """Key of the one plan that begins so, or whose full run does; "" if there is none, or if another run's key begins so."""
    found = runs[runs["key"].str.startswith(run)] if run else runs.iloc[:0]
    plans = {plan for row in ledger.read(find, "forecasts") if run and (plan := row["plan"]).startswith(run)}
    plans |= {label.removeprefix(FULL_RUN_LABEL) for label in found.loc[found["purpose"] == "full", "label"]}
    return plans.pop() if len(plans) == 1 and (found["purpose"] == "full").all() else ""


def _segments(ledger: Ledger, key: str) -> Iterator[Segment]:
    row: dict[str, Any] | None = ledger.segment(key)
    if row is None:
        raise StageError(f"runs: segment {key} is not in the ledger")
    if row["parent"]:
        yield from _segments(ledger, row["parent"])
    yield Segment.from_dict({name: value for name, value in row["segment"].items() if name != "spike_handling"})
