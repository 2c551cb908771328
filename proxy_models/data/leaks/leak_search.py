"""Search for held-out text in the training text, in two passes over the sources.

The first pass indexes each sequence of a few words of the held-out documents; the second looks up each sequence of the training text.
Hits that follow each other in both texts are a passage, so that a small edit does not end it. Passages that occur often are
boilerplate and do not count, unless they are a whole document. Case, punctuation, line breaks and typography make no difference. A
text whose words are too long to be words (DNA, encoded data) is compared by bytes, and a source of tokens by token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from proxy_models.data.documents import ReadReport, batches, in_sample, pieces
from proxy_models.data.leaks.folded_text import Positions
from proxy_models.data.leaks.held_out_index import HeldOutIndex, HeldOutTexts, Passage
from proxy_models.data.leaks.leak_report import Leak, LeakReport, SourceLeaks
from proxy_models.data.leaks.text_units import (
    BATCH_BYTES,
    BYTES,
    SHORT_TEXTS,
    TOKENS,
    WORDS,
    FoldedBatch,
    Text,
    token_units,
)
from proxy_models.data.sources import Source, Split
from proxy_models.data.token_files import OnProgress
from proxy_models.data.tokenization import blocks
from proxy_models.data.tokenizer import BytesTokenizer

SHARE_OF_LEAKED = 0.9
"""Share of a leaked document's words that the training text holds (assumed)."""
MOST_HELD_OUT = 100_000_000
"""Bytes of held-out text that are indexed, which takes some 15 bytes of memory each; of more text a sample is indexed."""
SHORT = 50
"""Words below which a document is compared as a whole, edits included (assumed)."""
KEPT = 1000
"""Passages that a report names."""
LONGEST_WORD = 24  # bytes; a text with longer words on average has no words (assumed)


def find_leaks(
    training: Mapping[str, Source],
    held_out: Mapping[str, Source],
    *,
    validation_fraction: float,
    on_progress: OnProgress | None = None,
) -> LeakReport:
    """Look for the held-out text of some sources in the training text of the same or of other sources.

    Text is compared with text, and token ids with token ids.

    Args:
        validation_fraction: Share that each source holds out.
        on_progress: Called with the bytes read and all bytes, over both passes.

    Raises:
        CorpusError: If a source can't be read.
    """
    sizes = [{name: sum(source.sizes().values()) for name, source in named.items()} for named in (held_out, training)]
    total = sum(sum(each.values()) for each in sizes)
    indexed = min(1.0, MOST_HELD_OUT / max(1.0, validation_fraction * sum(sizes[0].values())))
    done = 0

    def texts(sources: Mapping[str, Source], split: Split, *, tokens: bool) -> Iterator[Text]:
        nonlocal done
        for name, source in sources.items():
            if (source.kind == "tokens") != tokens:
                continue
            before = done
            for text, read in (_of_tokens if tokens else source_texts)(name, source, validation_fraction):
                done = before + read
                if on_progress:
                    on_progress(done, total)
                if not text.counts or text.split != split:
                    continue  # prompts are often the same, and no loss is too low for that
                if split == "train" or indexed == 1 or in_sample(text.content, indexed):
                    yield text

    skipped: Counter[str] = Counter()
    indexes = text_indexes(texts(held_out, "validation", tokens=False), skipped)
    if indexes:
        for number, passages, sequences in search_texts(indexes, texts(training, "train", tokens=False)):
            indexes[number].keep(passages, sequences)
    tokens = HeldOutTexts(TOKENS)
    for one in batches(texts(held_out, "validation", tokens=True), BATCH_BYTES):
        tokens.add(token_units(one), np.ones(len(one), dtype=np.bool_))
    if tokens.texts:
        index = HeldOutIndex(tokens)
        for one in batches(texts(training, "train", tokens=True), BATCH_BYTES):
            index.keep(*index.search(token_units(one)))
        indexes.append(index)
    return _report(indexes, skipped, indexed)


def text_indexes(held_out: Iterable[Text], skipped: Counter[str]) -> list[HeldOutIndex]:
    """Index texts by words, or by bytes if they have none; counts those that are too short."""
    gathered = {measure: HeldOutTexts(measure) for measure in (WORDS, SHORT_TEXTS, BYTES)}
    for batch in map(FoldedBatch.of, batches(held_out, BATCH_BYTES)):
        n_words = np.bincount(batch.words.text_of, minlength=len(batch.texts))
        has_words = batch.n_letters() <= LONGEST_WORD * n_words
        is_short, is_too_short = n_words < SHORT, n_words < SHORT_TEXTS.seed
        skipped.update(batch.texts[i].source for i in np.flatnonzero(has_words & is_too_short))
        masks = {WORDS: has_words & ~is_short, SHORT_TEXTS: has_words & is_short & ~is_too_short, BYTES: ~has_words}
        for measure, mask in masks.items():
            if mask.any():
                gathered[measure].add(batch.letters if measure is BYTES else batch.words, mask)
    return [HeldOutIndex(held_out) for held_out in gathered.values() if held_out.texts]


def search_texts(
    indexes: Sequence[HeldOutIndex], training: Iterable[Text]
) -> Iterator[tuple[int, list[Passage], Positions]]:
    """Search batches of texts; yield the number of each index with what it found: passages and known sequences."""
    for batch in map(FoldedBatch.of, batches(training, BATCH_BYTES)):
        for number, index in enumerate(indexes):
            yield number, *index.search(batch.letters if index.measure is BYTES else batch.words)


def source_texts(name: str, source: Source, fraction: float) -> Iterator[tuple[Text, int]]:
    """Yield the pieces of a source, with the bytes read."""
    sizes = source.sizes()
    before, file = 0, ""
    for piece in pieces(source, fraction):
        if piece.read_from != file:
            before, file = before + sizes.get(file, 0), piece.read_from
        text = Text(
            source=name,
            file=piece.file,
            line=piece.line,
            split=piece.split,
            has_lines=source.kind == "text",
            content=piece.content,
            counts=piece.counts,
        )
        yield text, before + piece.done_bytes


def _of_tokens(name: str, source: Source, fraction: float) -> Iterator[tuple[Text, int]]:
    """Yield blocks of the tokens of a source, with the bytes read."""
    before, last, start, file = 0, 0, 0, ""
    for block in blocks(source, BytesTokenizer(), fraction, ReadReport()):
        if block.file != file:
            before, start, file = before + last, 0, block.file
        content = block.tokens.astype(np.uint32).tobytes()
        yield (
            Text(source=name, file=file, line=start, split=block.split, has_lines=True, content=content),
            before + block.done_bytes,
        )
        start, last = start + len(block.tokens), block.done_bytes


def _report(indexes: list[HeldOutIndex], skipped: Mapping[str, int], indexed: float) -> LeakReport:
    counts: dict[str, Counter[str]] = {}
    by_source: dict[str, Counter[str]] = {}
    leaks: list[Leak] = []
    n_leaks = 0
    for index in indexes:
        passages = index.rare()
        n_leaks += len(passages)
        names = np.array([text.source for text in index.texts], dtype=object)[index.document]  # of each unit
        repeated = index.repeated(passages)
        section, sizes = index.sections()
        section_names = names[np.cumsum(sizes) - 1]
        is_leaked = np.bincount(section, weights=repeated) >= SHARE_OF_LEAKED * sizes
        for name in dict.fromkeys(section_names):
            mine = section_names == name
            counts.setdefault(name, Counter()).update(
                documents=int(mine.sum()),
                leaked_documents=int((is_leaked & mine).sum()),
                n_units=int(sizes[mine].sum()),
                leaked_units=int(sizes[is_leaked & mine].sum()),
                repeated_units=int(np.count_nonzero(repeated & (names == name))),
            )
        for training in dict.fromkeys(passage.source for passage in passages):
            of_training = index.repeated(passage for passage in passages if passage.source == training)
            for name, n_units in Counter(names[of_training].tolist()).items():
                by_source.setdefault(name, Counter())[training] += n_units
        leaks += _leaks(index)
    return LeakReport(
        held_out={
            name: SourceLeaks(**count, by_source=dict(by_source.get(name, {})), skipped=skipped.get(name, 0))
            for name, count in counts.items()
        },
        leaks=tuple(sorted(leaks, key=lambda leak: (leak.share < 0.5, -leak.n_units)))[:KEPT],
        n_leaks=n_leaks,
        indexed=indexed,
    )


def _leaks(index: HeldOutIndex) -> Iterator[Leak]:
    for passage in index.rare():
        if passage.place:
            held_out = index.texts[index.document[passage.first]]
            yield Leak(
                source=passage.place.source,
                file=passage.place.file,
                line=passage.place.line,
                held_out_source=held_out.source,
                held_out_file=held_out.file,
                held_out_line=index.line_of(passage),
                n_units=passage.n_units,
                unit=index.measure.unit,
                share=min(1.0, passage.n_units / index.size_of(passage)),
                text=passage.example,
            )
