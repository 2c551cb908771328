"""Search for items of tasks in the training text, by the rules of the leak check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from proxy_models.data.leaks.leak_search import search_texts, source_texts, text_indexes
from proxy_models.data.leaks.text_units import Text
from proxy_models.data.sources import CorpusError, Source
from proxy_models.evaluation.harness import item_texts, loaded
from proxy_models.evaluation.tasks import Tasks


def contaminated_items(
    tasks: Tasks, training: Mapping[str, Source], *, validation_fraction: float
) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each task's items of which the training text holds a passage, for `Tasks.contaminated`.

    A passage has at least 13 words, or is the whole item: question and right answer. What more than three items share is
    boilerplate, and items of fewer than five words can't be found.

    Args:
        training: Sources of the training text; sources of tokens are not searched.
        validation_fraction: Share that each source holds out, which is not searched.

    Raises:
        CorpusError: If no source is text, or one can't be read.
        ValueError: As `Tasks.measure`.
    """
    sources = {name: source for name, source in training.items() if source.kind != "tokens"}
    if not sources:
        raise CorpusError(f"contaminated items: a source must be text, got only tokens: {', '.join(training)}")
    with loaded(tasks.files, seed=tasks.seed) as found:
        items = [
            Text(source=name, file="", line=number, split="validation", has_lines=False, content=_content(text))
            for name, task in found.items()
            for number, text in item_texts(task, tasks.limit).items()
        ]
    indexes = text_indexes(items, Counter())
    for number, passages, sequences in search_texts(indexes, _training_texts(sources, validation_fraction)):
        indexes[number].keep(passages, sequences)
    numbers: dict[str, set[int]] = {name: set() for name in found}
    for index in indexes:
        for document in np.unique(index.document[index.repeated(index.rare())]):
            numbers[index.texts[document].source].add(index.texts[document].line)
    return {name: tuple(sorted(each)) for name, each in numbers.items()}


def _content(text: str) -> bytes:
    return text.encode().replace(b"\0", b"")


def _training_texts(sources: Mapping[str, Source], validation_fraction: float) -> Iterator[Text]:
    for name, source in sources.items():
        for text, _ in source_texts(name, source, validation_fraction):
            if text.split == "train":
                yield text
