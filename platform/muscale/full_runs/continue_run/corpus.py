"""The corpus of a continuation: how much of it is held out, where it is read on from, and what was read before."""

from __future__ import annotations

from collections.abc import Sequence

from muscale.errors import StageError
from muscale.full_runs.continue_run.lineage import LineageSegment
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus import Corpus


def require_held_out(corpus: Corpus, context_length: int, n_tokens: int) -> None:
    """Refuse a corpus with a held-out split of less than `n_tokens`.

    Raises:
        StageError: If it is shorter.
    """
    try:
        evaluation_sets(corpus, context_length, n_tokens)
    except ValueError as error:
        raise StageError(f"corpus.evaluation_tokens: {error}") from error


def position_in(corpus: Corpus, lineage: Sequence[LineageSegment], seed: int) -> int:
    """Tokens of the corpus at which a continuation starts: after those read before in the same order, so none is repeated.

    Raises:
        StageError: If the data order differs, or the corpus has a mixture whose stages end at fractions of one run.
    """
    before = [past for past in lineage if past.corpus == corpus.key]
    if not before:
        return 0
    if corpus.stages_by_fraction:
        raise StageError(
            "corpus: the mixture stages of this corpus end at fractions of the run that read it; set [corpus] with the mixture to "
            "continue with"
        )
    last = before[-1]
    if seed != last.seed:
        raise StageError(
            f"seed: must be {last.seed}, the data order in which {last.label} read this corpus; another order would repeat tokens; "
            f"got {seed}"
        )
    return last.position + last.tokens


def read_again(corpus: Corpus, lineage: Sequence[LineageSegment]) -> list[str]:
    """A line for each source that was read before as part of another corpus, as it is read from its start again."""
    lines = []
    for name, files in corpus.sources.items():
        readers = [past for past in lineage if past.corpus != corpus.key and files.key in past.sources.values()]
        if readers and corpus.evaluation_weights[name]:
            lines.append(
                f"{name} was already read by {readers[-1].label}; it is read again from its start, in another order"
            )
    return lines
