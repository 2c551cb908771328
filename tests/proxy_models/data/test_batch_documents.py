"""The documents of a step are those whose text the batch holds."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from proxy_models.data.batch_documents import batch_documents
from proxy_models.data.batches import training_stream
from proxy_models.data.cleaning.clean import clean
from proxy_models.data.cleaning.exact_duplicates import ExactDuplicates
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture, MixtureStage
from proxy_models.data.sources import Source
from proxy_models.data.tokenizer import BYTES, TokenizerSettings

CONTEXT, BATCH = 32, 12 * 32
BPE = TokenizerSettings(kind="bpe", vocab_size=300)


def text_of(number: int) -> str:
    """A document of several lines, none of which occurs in another."""
    return "".join(f"document {number} line {line} {'abcdefg'[: line % 7]}\n" for line in range(1 + number % 9))


def write_source(folder: Path, kind: str) -> Source:
    """Sixty documents in three files, or in as many as there are."""
    folder.mkdir(parents=True)
    texts = [text_of(number) for number in range(60)]
    if kind == "text":
        for number, text in enumerate(texts):
            (folder / f"{number:02}.txt").write_text(text)
    for part in range(3):
        own = texts[part::3]
        if kind == "jsonl":
            lines = [json.dumps({"text": text}) for text in own]
            (folder / f"{part}.jsonl").write_text("\n\n".join(lines) + "\n")
        elif kind == "parquet":
            pd.DataFrame({"text": own}).to_parquet(folder / f"{part}.parquet")
    if kind == "single":
        (folder / "all.txt").write_text("".join(texts))
        return Source(path=str(folder / "all.txt"))
    return Source(path=str(folder), kind=kind)  # type: ignore[arg-type]


def origin(folder: Path, kind: str, row: dict[str, Any]) -> str:
    """The text at the line or row that a row names."""
    path, line = folder / row["file"], int(row["line"])
    if kind == "jsonl":
        return str(json.loads(path.read_text().splitlines()[line - 1])["text"])
    if kind == "parquet":
        return str(pd.read_parquet(path)["text"][line])
    return "".join(path.read_text().splitlines(keepends=True)[line - 1 :])


@pytest.mark.parametrize("kind", ["text", "single", "jsonl", "parquet"])
@pytest.mark.parametrize("settings", [BYTES, BPE], ids=["bytes", "bpe"])
def test_file_line_and_text_are_those_of_the_batch(tmp_path: Path, kind: str, settings: TokenizerSettings) -> None:
    source = write_source(tmp_path / "text", kind)
    corpus = write_corpus(tmp_path / "corpus", source, validation_fraction=0.2, tokenizer=settings)
    stream, tokenizer = training_stream(corpus, CONTEXT, 5), corpus.tokenizer()
    for step in (0, 3, 40):
        found = batch_documents(corpus, stream, CONTEXT, step * BATCH, BATCH)
        batch = stream.batch(step * BATCH, BATCH).numpy()
        for number, sequence in enumerate(batch):
            own = found[found["sequence"] == number].to_dict("records")
            assert len(own) == 1 + np.count_nonzero(sequence[:-1] == tokenizer.end_of_document)
            assert sum(row["tokens"] for row in own) == CONTEXT + 1
            end = 0
            for row in own:
                part = sequence[end : end + row["tokens"]]
                end += row["tokens"]
                closes = part[-1] == tokenizer.end_of_document
                assert (corpus.train[row["token"] : row["token"] + row["tokens"]] == part).all()
                assert row["text"] == tokenizer.decode(part[:-1] if closes else part)
                whole = origin(tmp_path / "text", kind, row)
                assert row["text"] in whole
                if kind in ("text", "single"):
                    assert row["text"].split("\n")[0] in whole.split("\n")[0]


def test_a_mixture_names_the_source_and_the_epoch(tmp_path: Path) -> None:
    sources = {name: write_source(tmp_path / name, name) for name in ("text", "jsonl")}
    mixture = Mixture.constant({"text": 1, "jsonl": 3})
    corpus = write_mixture(tmp_path / "corpus", sources, mixture, validation_fraction=0.2)
    stream = training_stream(corpus, CONTEXT, 0)
    found = batch_documents(corpus, stream, CONTEXT, 0, 100 * CONTEXT)
    assert found.groupby("source")["sequence"].nunique().to_dict() == {"text": 25, "jsonl": 75}
    assert all(
        path.endswith(f".{'txt' if name == 'text' else 'jsonl'}")
        for name, path in zip(found["source"], found["file"], strict=True)
    )
    epochs = corpus.epochs(100 * CONTEXT)
    assert {name: int(part.max()) for name, part in found.groupby("source")["epoch"]} == {
        name: math.ceil(count) for name, count in epochs.items()
    }


def test_tokens_are_named_by_file_and_offset(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for number in range(3):
        np.arange(1000 * number, 1000 * (number + 1), dtype="<u2").tofile(folder / f"{number}.bin")
    source = Source(path=str(folder), kind="tokens", dtype="uint16", vocab_size=3000)
    corpus = write_corpus(tmp_path / "corpus", source)
    stream = training_stream(corpus, CONTEXT, 1)
    found = batch_documents(corpus, stream, CONTEXT, 0, 80 * CONTEXT)
    for row in found.to_dict("records"):
        first = int(corpus.train[row["token"]])
        assert row["file"] == f"{first // 1000}.bin"
        assert int(corpus.train[row["token"] + row["tokens"] - 1]) // 1000 == first // 1000, "no part spans two files"
        assert row["text"] is None
    assert found["line"].isna().all()


def test_older_manifests_and_files_that_changed_leave_out_what_is_not_known(tmp_path: Path) -> None:
    source = write_source(tmp_path / "text", "jsonl")
    corpus = write_corpus(tmp_path / "corpus", source)
    stream = training_stream(corpus, CONTEXT, 0)
    known = batch_documents(corpus, stream, CONTEXT, 0, BATCH)
    assert known[["file", "line"]].notna().all(axis=None)
    for path in (tmp_path / "text").iterdir():
        path.write_text(path.read_text() + "\n")
    changed = batch_documents(corpus, stream, CONTEXT, 0, BATCH)
    assert changed["line"].isna().all()
    assert changed.drop(columns="line").equals(known.drop(columns="line"))
    manifest = json.loads((tmp_path / "corpus/manifest.json").read_text())
    for entry in manifest["files"]:
        del entry["training_tokens"]
    (tmp_path / "corpus/manifest.json").write_text(json.dumps(manifest))
    older = batch_documents(Corpus.open(tmp_path / "corpus"), stream, CONTEXT, 0, BATCH)
    assert older["file"].isna().all()
    assert "".join(older["text"]) == "".join(known["text"])


@pytest.mark.parametrize(
    "mixture",
    [
        Mixture.constant({"text": 1, "jsonl": 3}),
        Mixture(
            stages=(
                MixtureStage(weights={"text": 1, "jsonl": 0}, until_fraction=0.3),
                MixtureStage(weights={"text": 0.25, "jsonl": 0.75}, until_fraction=0.7),
                MixtureStage(weights={"text": 0, "jsonl": 1}),
            )
        ),
        None,
    ],
    ids=["constant", "stages", "one"],
)
@pytest.mark.parametrize("first", [0, 333])
def test_epochs_begin_where_the_batches_first_repeat(tmp_path: Path, mixture: Mixture | None, first: int) -> None:
    sources = {name: write_source(tmp_path / name, name) for name in ("text", "jsonl")}
    corpus = (
        write_mixture(tmp_path / "m", sources, mixture) if mixture else write_corpus(tmp_path / "c", sources["text"])
    )
    end = 1500
    stream = training_stream(corpus, CONTEXT, 0, run_tokens=end * CONTEXT)
    places = stream.places(0, end * CONTEXT)
    epochs: dict[str, int] = {}
    expected = []
    for number, place in enumerate(places):
        if place.epoch > epochs.setdefault(place.source, 1):
            assert place.epoch == epochs[place.source] + 1
            epochs[place.source] = place.epoch
            if number >= first:
                expected.append((place.source, place.epoch, number * CONTEXT))
    assert stream.epoch_starts(first * CONTEXT, end * CONTEXT) == expected
    assert len(expected) > 3


def test_documents_of_cleaned_text_have_the_file_and_line_from_which_they_came(tmp_path: Path) -> None:
    write_source(tmp_path / "text", "jsonl")
    given = Source(path=str(tmp_path / "text"), kind="jsonl")
    found = clean({"corpus": given}, tmp_path / "clean", [ExactDuplicates()], validation_fraction=0.2)
    corpus = write_corpus(tmp_path / "corpus", found.sources["corpus"], validation_fraction=0.2, tokenizer=BYTES)
    stream = training_stream(corpus, CONTEXT, 5)
    rows = batch_documents(corpus, stream, CONTEXT, 0, BATCH).to_dict("records")
    assert rows
    for row in rows:
        assert row["text"] in origin(tmp_path / "text", "jsonl", row)
