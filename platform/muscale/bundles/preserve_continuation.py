"""The bundle of a finished continuation, with its lineage; trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from muscale.bundles import bundle as parts
from muscale.bundles.bundle import Bundle
from muscale.bundles.bundle_writing import write_bundle
from muscale.errors import StageError
from muscale.findings import StudyContents
from muscale.full_runs.continue_run.continuation import NOT_FORECAST
from muscale.full_runs.continue_run.lineage import find_continuation, plain
from muscale.full_runs.continue_run.train import Continued
from muscale.layout import BUNDLES, FULL_RUNS
from muscale.store.lineage import Chain
from muscale.store.tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class FinishedContinuation:
    """A finished continuation for its bundle; attributes as in `muscale.bundles.bundle_writing.FinishedRun`."""

    study: str
    done: Continued
    chain: Chain
    directory: Path
    corpus: Corpus
    config: dict[str, Any]
    plan: dict[str, Any] | None
    runs: pd.DataFrame

    @property
    def lineage(self) -> dict[str, Any]:
        """The lineage, and the plan of its first segment."""
        return {"segments": plain(self.done.lineage), "plan": self.plan}

    @property
    def loss(self) -> float:
        """Final loss on its own corpus."""
        return self.done.after.own

    @property
    def n_tokens(self) -> int:
        """Tokens of the corpus that it and earlier runs have read."""
        return self.done.lineage[-1].position + self.done.n_tokens

    @property
    def outcome(self) -> tuple[str, dict[str, Any]]:
        """File and content: the losses before and after."""
        return parts.CONTINUED, self.done.to_dict()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the manifest."""
        return {"continuation": self.done.key, "finished_at": self.done.finished_at}

    def card(self, averaging: dict[str, Any] | None) -> str:
        """The model card in Markdown; text from users is escaped."""
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
        )
        text = (resources.files("muscale.bundles") / "continuation_card.md.jinja").read_text(encoding="utf-8")
        return environment.from_string(text).render(
            study=" ".join(self.study.split()),
            done=self.done,
            numerics=self.chain.numerics,
            model=self.chain.numerics.model,
            losses=self.done.changes,
            not_forecast=NOT_FORECAST,
            epochs=self.corpus.epochs(self.n_tokens),
            corpus=self.corpus,
            averaging=averaging,
        )


def preserve_continuation(study: StudyContents, continuation: str, *, average: int = 1) -> Bundle:
    """The bundle of a finished continuation in the study's directory, written once.

    Args:
        study: The study.
        continuation: Key or name.
        average: As in `muscale.bundles.preserve.preserve`.

    Raises:
        StageError: If there is no such continuation, it has not ended, or its last weights are gone.
        BundleError: If its bundle exists and is damaged.
    """
    ledger = study.ledger
    key, started = find_continuation(continuation, ledger)
    result = ledger.result(ResultKind.CONTINUATION, key)
    if started is None or result is None:
        state = "has not ended yet" if started else "does not exist"
        raise StageError(
            f"bundle: --continuation must be a finished continuation of this study; {continuation!r} {state}"
        )
    path = study.directory / BUNDLES / (key if average == 1 else f"{key}-average-{average}")
    if path.exists():
        return Bundle.open(path)
    done = Continued.from_dict(result)
    segments = tuple(map(Segment.from_dict, started["segments"]))
    registered = ledger.forecast(done.lineage[0].run)
    run = FinishedContinuation(
        study=study.config.name,
        done=done,
        chain=Chain(numerics=Numerics.from_dict(started["numerics"]), segments=segments),
        directory=study.directory / FULL_RUNS / key,
        corpus=Corpus.open(study.directory / started["folder"]),
        config=study.config.to_dict(),
        plan=registered and registered["payload"],
        runs=ledger.runs(),
    )
    return write_bundle(run, path, average=average)
