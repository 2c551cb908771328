"""Records with prompts: what is read of every format, what is refused, what token files hold, and how sequences are packed."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from proxy_models.data.batches import evaluation_sets, training_stream
from proxy_models.data.bits_per_byte import held_out_bytes
from proxy_models.data.corpus_writing import OtherCorpusError, write_corpus, write_mixture
from proxy_models.data.documents import pieces
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.mixture import Mixture
from proxy_models.data.prompts import asked, of_chat
from proxy_models.data.record_packing import Packing
from proxy_models.data.sources import CorpusError, Source
from proxy_models.data.token_files import MANIFEST
from proxy_models.data.uncounted import ids
from tests.proxy_models.prompted import prompted_corpus, write_prompts

PAIRS = [("Capital of Peru? ", "Lima"), ("", "no prompt"), ("naïve 本: ", "yes\nindeed")]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
CHAT_PARTS = [
    ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
    ("Hello<|im_end|>", True),
    ("\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", False),
    ("So long<|im_end|>", True),
]


def rows() -> list[dict[str, str]]:
    return [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    match path.suffixes:
        case [".jsonl"]:
            path.write_bytes(lines)
        case [".jsonl", ".gz"]:
            path.write_bytes(gzip.compress(lines))
        case [".json"]:
            path.write_text(json.dumps(records))
        case [".parquet"]:
            parquet.write_table(pa.Table.from_pylist(records), path)
        case [".csv"]:
            with path.open("w", newline="") as output:
                writer = csv.DictWriter(output, list(records[0]))
                writer.writeheader()
                writer.writerows(records)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.csv"])
def test_prompts_do_not_count_and_close_no_document_in_any_format(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, rows())
    kind = name.split(".")[1].replace("json", "jsonl").replace("ll", "l")
    source = Source(path=str(tmp_path), kind=kind, field="answer", prompt_field="prompt")  # type: ignore[arg-type]
    found = [(piece.content.decode(), piece.counts, piece.closes) for piece in pieces(source, 0.5)]
    assert found == [
        (PAIRS[0][0], False, False),
        (PAIRS[0][1], True, True),
        (PAIRS[1][1], True, True),
        (PAIRS[2][0], False, False),
        (PAIRS[2][1], True, True),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_of_a_chat_the_assistant_s_messages_count(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, [{"chat": CHAT}, {"chat": CHAT[:4]}])
    source = Source(path=str(tmp_path), kind=name.split(".")[1], messages_field="chat")  # type: ignore[arg-type]
    found = [(piece.content.decode(), piece.counts) for piece in pieces(source, 0.5)]
    assert found[:4] == CHAT_PARTS
    assert found[4:] == [*CHAT_PARTS[:2], ("\n<|im_start|>user\nBye<|im_end|>", False)]


def messages(*given: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in given]}


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no completion": ({"prompt_field": "prompt"}, {"prompt": "a"}, "text"),
    "no prompt": ({"prompt_field": "prompt"}, {"text": "a"}, "prompt"),
    "empty completion": ({"prompt_field": "prompt"}, {"prompt": "all of it", "text": " \n"}, "text"),
    "null completion": ({"prompt_field": "prompt"}, {"prompt": "a", "text": None}, "text"),
    "prompt of another type": ({"prompt_field": "prompt"}, {"prompt": ["a"], "text": "b"}, "prompt"),
    "half a pair": ({"prompt_field": "prompt"}, {"prompt": "a", "text": "\ud800"}, "text"),
    "no messages": ({"messages_field": "messages"}, {"messages": []}, "messages"),
    "messages of another type": ({"messages_field": "messages"}, {"messages": "hello"}, "messages"),
    "message of another type": ({"messages_field": "messages"}, {"messages": ["hello"]}, r"messages'\[0\]"),
    "no role": ({"messages_field": "messages"}, {"messages": [{"content": "a"}]}, r"messages'\[0\]"),
    "empty role": ({"messages_field": "messages"}, messages(("", "a")), r"\[0\]\.role"),
    "no assistant": ({"messages_field": "messages"}, messages(("user", "a")), "assistant"),
    "silent assistant": ({"messages_field": "messages"}, messages(("user", "a"), ("assistant", "")), r"\[1\]\.content"),
    "parts of a content": ({"messages_field": "messages"}, messages(("user", [{"type": "text"}])), r"\[0\]\.content"),
}


def test_a_question_has_the_parts_with_which_training_begins_the_answer() -> None:
    chat = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "2"},
    ]
    for answered in (3, 5):
        *before, answer = (text for text, _ in of_chat([chat[:answered]], "", ""))
        assert asked(chat[: answered - 1], "", "") == before
        assert answer == f"{chat[answered - 1]['content']}<|im_end|>"
    with pytest.raises(CorpusError, match=r"messages\[0\] must have the keys"):
        asked([{"role": "user"}], "file", "messages")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_stops_or_its_file_is_skipped(tmp_path: Path, case: str) -> None:
    fields, bad, key = BAD[case]
    good = {"prompt": "a ", "text": "b", **messages(("user", "a"), ("assistant", "b"))}
    write(tmp_path / "a.jsonl", [good, good])
    write(tmp_path / "b.jsonl", [good, bad])
    with pytest.raises(CorpusError, match=rf"b\.jsonl: line 2: .*{key}"):
        list(pieces(Source(path=str(tmp_path), kind="jsonl", **fields), 0.5))
    read = {piece.file for piece in pieces(Source(path=str(tmp_path), kind="jsonl", on_error="skip", **fields), 0.5)}
    assert read == {"a.jsonl"}


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("prompt_field", {"kind": "text", "prompt_field": "prompt"}),
        ("prompt_field", {"kind": "jsonl", "prompt_field": ""}),
        ("prompt_field", {"kind": "jsonl", "prompt_field": "text"}),
        ("messages_field", {"kind": "cleaned", "messages_field": "messages"}),
        ("messages_field", {"kind": "csv", "messages_field": "messages"}),
        ("messages_field", {"kind": "jsonl", "messages_field": "messages", "field": "completion"}),
        ("messages_field", {"kind": "jsonl", "messages_field": "messages", "prompt_field": "prompt"}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=key):
        Source(path="x", **settings)


def test_token_files_hold_the_mask_and_the_manifest_the_share(tmp_path: Path) -> None:
    corpus = prompted_corpus(tmp_path)
    (files,) = corpus.sources.values()
    written = write_prompts(tmp_path / "sft.jsonl")
    pairs = {prompt + completion: len(prompt) for prompt, completion in written}
    counted = n_bytes = 0
    for split in (files.train, files.validation):
        ends = np.flatnonzero(ids(split) == 0) + 1
        for record in np.split(np.asarray(split), ends)[:-1]:
            text = ids(record)[:-1].astype(np.uint8).tobytes().decode()
            n_prompt = pairs[text]
            assert (record >= 0).tolist() == [False] * n_prompt + [True] * (len(record) - n_prompt)
            counted += len(record) - n_prompt
            n_bytes += len(record) - n_prompt - 1
    n_tokens = corpus.n_tokens + corpus.n_validation_tokens
    assert n_tokens == sum(len(prompt + completion) + 1 for prompt, completion in written)
    assert sum(files.manifest["counted"][split] for split in ("train", "validation")) == counted
    assert files.counted_share == counted / n_tokens
    assert files.bytes_per_token == n_bytes / counted
    assert held_out_bytes(corpus) == {"corpus": files.n_validation_counted - int((ids(files.validation) == 0).sum())}
    assert json.loads((corpus.folder / MANIFEST).read_text())["source"]["prompt_field"] == "prompt"
    assert float(corpus.table()["counts"][0].rstrip("%")) == pytest.approx(100 * files.counted_share, abs=0.05)
    plain = Source(path=str(tmp_path / "sft.jsonl"), kind="jsonl", field="completion")
    with pytest.raises(OtherCorpusError):
        write_corpus(corpus.folder, plain)
    without = write_corpus(tmp_path / "plain", plain)
    assert without.all_count
    assert without.key != corpus.key
    assert "counted" not in without.manifest


def test_sequences_begin_with_records_and_count_each_completion_once_in_an_epoch(tmp_path: Path) -> None:
    corpus, context = prompted_corpus(tmp_path), 32
    stream = training_stream(corpus, context, seed=3)
    train = np.asarray(corpus.train)
    ends = np.flatnonzero(ids(train) == 0) + 1
    begins = np.append(0, ends[:-1])
    packing = Packing.of(train, context, 0)
    is_cut = ends - np.maximum(begins - 1, 0) > context + 1
    assert 0 < packing.n_cut == int(is_cut.sum()) < len(ends) == packing.n_records
    size = len(packing.starts)
    seen: list[dict[str, torch.Tensor]] = []
    for epoch in range(2):
        at = epoch * size * context
        sequences = stream.batch(at, size * context)
        assert sequences.shape == (size, context + 1)
        places = stream.places(at, size * context)
        assert {place.epoch for place in places} == {epoch + 1}
        times = np.zeros(len(train), dtype=int)
        for place, sequence in zip(places, sequences.numpy(), strict=True):
            assert place.start == 0 or ids(train)[place.start] == 0
            shown = np.arange(place.start, place.start + context + 1)
            inside = shown < len(train)
            assert (ids(sequence)[inside] == ids(train)[shown[inside]]).all()
            counts = sequence >= 0
            assert (train[shown[inside & counts]] >= 0).all()
            times[shown[1:][counts[1:]]] += 1
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            within = min(end, max(begin - 1, 0) + context + 1) if is_cut[number] else end
            wanted = train[begin:end] >= 0
            wanted[within - begin :] = False
            wanted[0] &= begin > 0  # the first token of all is predicted from nothing
            assert times[begin:end].tolist() == wanted.tolist()
        seen.append({str(place.start): sequence for place, sequence in zip(places, sequences, strict=True)})
    assert list(seen[0]) != list(seen[1])
    assert all(torch.equal(seen[1][start], sequence) for start, sequence in seen[0].items())
    shares = torch.cat([stream.batch(0, 7 * context, rank=rank, world_size=3) for rank in range(3)])
    assert torch.equal(shares, stream.batch(0, 7 * context))


def test_epochs_are_passes_over_the_sequences(tmp_path: Path) -> None:
    """Ends of long records are never read, so a pass may take far fewer tokens than the files have."""
    corpus = prompted_corpus(tmp_path)
    for context in (8, 32, 128):
        ((_, _, size),) = training_stream(corpus, context, seed=0).epoch_starts(context, 1 << 15)[:1]
        assert corpus.epochs(3 * size, context) == {"corpus": 3}
        assert corpus.warnings(4 * size, context) == []
        assert len(corpus.warnings(4 * size + context, context)) == 1
        assert size < corpus.n_tokens if context == 8 else size > corpus.n_tokens
    with pytest.raises(ValueError, match="context_length"):
        corpus.epochs(1000)


def test_an_evaluation_has_whole_records_and_needs_a_token_that_counts(tmp_path: Path) -> None:
    corpus, context = prompted_corpus(tmp_path), 32
    (held_out,) = evaluation_sets(corpus, context, 8 * context).values()
    targets = held_out.sequences[:, 1:]
    assert held_out.size == int((targets >= 0).sum())
    assert held_out.scale is not None
    assert held_out.scale.item() == pytest.approx(targets.numel() / held_out.size)
    with pytest.raises(ValueError, match="validation"):
        evaluation_sets(corpus, context, 10**6)
    with (tmp_path / "long.jsonl").open("w") as output:
        output.writelines(json.dumps({"prompt": f"{n} " * 40, "text": "yes"}) + "\n" for n in range(40))
    source = Source(path=str(tmp_path / "long.jsonl"), kind="jsonl", prompt_field="prompt")
    with pytest.raises(ValueError, match="counts"):
        evaluation_sets(write_corpus(tmp_path / "all prompts", source), context, context)


def test_a_mixture_has_sources_with_and_without_prompts(tmp_path: Path) -> None:
    alone = prompted_corpus(tmp_path)
    (tmp_path / "text.txt").write_text("some plain text " * 300)
    sources = {
        "chat": Source(path=str(tmp_path / "sft.jsonl"), kind="jsonl", field="completion", prompt_field="prompt"),
        "text": Source(path=str(tmp_path / "text.txt")),
    }
    mixed = write_mixture(tmp_path / "mixed", sources, Mixture.constant({"chat": 1.0, "text": 1.0}))
    assert not mixed.all_count
    assert mixed.sources["chat"].key == alone.key
    assert mixed.sources["text"].key == write_corpus(tmp_path / "alone", sources["text"]).key
    assert mixed.sources["text"].counted_share == 1
    chat, text = (mixed.sources[name] for name in ("chat", "text"))
    share = chat.counted_share / (chat.counted_share + 1)  # of the tokens that count in a step
    each = [files.bytes_per_token or math.nan for files in (chat, text)]
    assert mixed.bytes_per_token == pytest.approx(share * each[0] + (1 - share) * each[1])
    stream = training_stream(mixed, 16, seed=0)
    sequences, places = stream.batch(0, 16 * 20), stream.places(0, 16 * 20)
    for place, sequence in zip(places, sequences, strict=True):
        assert bool((sequence >= 0).all()) == (place.source == "text")
    sets = evaluation_sets(mixed, 16, 320)
    assert [held_out.all_count for held_out in sets.values()] == [name == "text" for name in sets]


def test_leaks_are_looked_for_in_the_text_that_counts(tmp_path: Path) -> None:
    """The same long prompt in every record is no leak; a completion on both sides is."""
    words = [f"word{n}" for n in range(4000)]
    shared = " ".join(words[:60])
    found = []
    for times in (1, 2):
        begins = [100 + 40 * (number // times) for number in range(60)]
        records = [
            {"prompt": f"{shared} {n}", "text": " ".join(words[begin : begin + 40])} for n, begin in enumerate(begins)
        ]
        write(tmp_path / f"{times}.jsonl", records)
        sources = {"corpus": Source(path=str(tmp_path / f"{times}.jsonl"), kind="jsonl", prompt_field="prompt")}
        found.append(find_leaks(sources, sources, validation_fraction=0.3))
    assert found[0].share == 0
    assert found[0].held_out["corpus"].n_units == 40 * found[0].held_out["corpus"].documents
    assert found[1].share > 0.3
