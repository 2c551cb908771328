"""A good and a broken file of every format: what is read, what an error names, and what is skipped and counted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from proxy_models.data import records
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.documents import Piece, in_validation, pieces
from proxy_models.data.sources import CorpusError, Kind, Source
from proxy_models.data.token_files import MANIFEST

TEXTS = [
    "one, two\n",
    'a "quoted"\nsecond line',
    "naïve – 本 🙂",
    " ",
    *(f"text number {n} of many" for n in range(60)),
]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def array(texts: list[str]) -> bytes:
    return json.dumps(
        [{"id": n, "text": text, "more": [n, {"text": ["]"]}]} for n, text in enumerate(texts)], indent=2
    ).encode()


def table(delimiter: str = ",") -> Callable[[list[str]], bytes]:
    def content(texts: list[str]) -> bytes:
        out = io.StringIO()
        writer = csv.writer(out, delimiter=delimiter)
        writer.writerows([["id", "text"], *([n, text] for n, text in enumerate(texts))])
        return out.getvalue().encode()

    return content


def columns(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"text": texts}), sink)
    return bytes(sink.getvalue())


def cleaned(texts: list[str]) -> bytes:
    rows = [{"text": text, "file": f"{n % 7}.txt", "line": n + 1, "split": "train"} for n, text in enumerate(texts)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FORMATS: dict[str, tuple[Kind, Callable[[list[str]], bytes]]] = {
    "a.jsonl": ("jsonl", lines),
    "a.jsonl.gz": ("jsonl", lambda texts: gzip.compress(lines(texts), mtime=0)),
    "a.jsonl.zst": ("jsonl", lambda texts: zstd(lines(texts))),
    "a.json": ("jsonl", array),
    "lines.json": ("jsonl", lines),
    "a.json.gz": ("jsonl", lambda texts: gzip.compress(array(texts), mtime=0)),
    "a.csv": ("csv", table()),
    "a.tsv": ("csv", table("\t")),
    "semicolons.csv": ("csv", table(";")),
    "a.csv.zst": ("csv", lambda texts: zstd(table()(texts))),
    "a.parquet": ("parquet", columns),
    "clean.jsonl": ("cleaned", cleaned),
    "clean.jsonl.zst": ("cleaned", lambda texts: zstd(cleaned(texts))),
}


def read(source: Source, fraction: float = 0.3) -> list[str]:
    return [text for text, _ in documents(source, fraction)]


def documents(source: Source, fraction: float = 0.3) -> list[tuple[str, Piece]]:
    found, content = [], b""
    for piece in pieces(source, fraction):
        content += piece.content
        if piece.closes:
            found.append((content.decode(), piece))
            content = b""
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_every_format_gives_the_texts_that_were_written(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BLOCK", block)
    kind, content = FORMATS[name]
    (tmp_path / name).write_bytes(content(TEXTS))
    found = documents(Source(path=str(tmp_path), kind=kind))
    assert [text for text, _ in found] == TEXTS
    done = [piece.done_bytes for _, piece in found]
    assert done == sorted(done)
    assert 0 < done[-1] <= (tmp_path / name).stat().st_size
    if kind != "cleaned":
        assert {text for text, p in found if p.split == "validation"} == {t for t in TEXTS if in_validation(t, 0.3)}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'[\n{"text": "a"},\n\n{"text":\n"b"}, {"text": "c"}]', [2, 4, 5]),
        ("a.json", b'{"text": "a"}\n\n{\n"text": "b"}\n{"text": "c"}', [1, 3, 5]),
        ("a.json", b'\xef\xbb\xbf[{"text": "a"}]', [1]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b"}', [1, 3]),
        ("a.csv", b'\xef\xbb\xbftext,id\r\n"a\r\nb",1\r\n\r\nc,2\r\n', [2, 5]),
    ],
)
def test_a_record_has_the_line_at_which_it_begins(
    name: str, content: bytes, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    kind: Kind = "csv" if name.endswith("csv") else "jsonl"
    assert [piece.line for _, piece in documents(Source(path=str(tmp_path), kind=kind))] == expected


def test_cleaned_text_keeps_its_side_its_file_and_its_line(tmp_path: Path) -> None:
    rows = [("a", "x/1.txt", 3, "train"), ("b", "x/2.jsonl", 70, "validation"), ("c", "x/1.txt", 9, "train")]
    for name, part in (("0.jsonl", rows[:2]), ("1.jsonl", rows[2:])):
        values = [dict(zip(("text", "file", "line", "split"), row, strict=True)) for row in part]
        (tmp_path / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    found = documents(Source(path=str(tmp_path), kind="cleaned"))
    assert [(text, p.file, p.line, p.split) for text, p in found] == rows
    assert [piece.read_from for _, piece in found] == ["0.jsonl", "0.jsonl", "1.jsonl"]
    corpus = write_corpus(tmp_path / "out", Source(path=str(tmp_path), kind="cleaned"), validation_fraction=0.5)
    assert (bytes(corpus.train), bytes(corpus.validation)) == (b"a\0c\0", b"b\0")
    assert [entry["path"] for entry in corpus.manifest["files"]] == ["0.jsonl", "1.jsonl"]


def test_a_field_within_a_field_is_named_with_a_dot(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": {"text": "in"}, "content.title": "out"}\n')
    for field, text in (("content.text", "in"), ("content.title", "out")):
        assert read(Source(path=str(tmp_path), kind="jsonl", field=field)) == [text]
    for field in ("content", "content.none", "none.text", "content.text.more"):
        with pytest.raises(CorpusError, match=r"a.jsonl: line 1: .*'" + field):
            read(Source(path=str(tmp_path), kind="jsonl", field=field))


def test_json_next_to_json_lines_describes_them_and_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["a"]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(["b"]), mtime=0))
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert read(Source(path=str(tmp_path), kind="jsonl")) == ["a", "b"]


GERMAN = "Der Zug fährt über die Brücke und hält später am Bahnhof in München. Größere Städte haben häufig mehrere Bahnhöfe.\n"
RUSSIAN = "Вчера вечером мы долго гуляли по набережной и говорили о том, как изменился город за последние годы.\n"
JAPANESE = (
    "昨日は友達と一緒に東京の美術館へ行きました。とても混んでいましたが、絵はすばらしかったです。また来月も行きたい。\n"
)
CHINESE = "昨天我和朋友一起去了北京的博物馆。那里的人很多，但是展览非常精彩。下个月我们打算再去一次。\n"


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "latin-1"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        (CHINESE, "gb18030"),
        (CHINESE, "big5"),
        (GERMAN, "utf-16"),
        (GERMAN, "utf-32"),
        (GERMAN, "utf-8"),
    ],
)
def test_text_in_other_encodings_is_read_as_utf_8(
    text: str, encoding: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    text = text.encode(encoding, "ignore").decode(encoding) * 40
    (tmp_path / "a.txt").write_bytes(compress(text.encode(encoding)))
    (tmp_path / "b.txt").write_text("plain")
    assert read(Source(path=str(tmp_path))) == [text, "plain"]
    train, held_out = read(Source(path=str(tmp_path / "a.txt")), 0.25)  # cut by position, between characters
    assert train + held_out == text
    assert len(held_out.encode()) == pytest.approx(0.25 * len(text.encode()), abs=4)


def test_an_encoding_that_cannot_be_detected_must_be_stated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"na\xefve")
    (tmp_path / "t.csv").write_bytes("text\nnaïve".encode("latin-1"))
    for name, kind in (("a.txt", "text"), ("t.csv", "csv")):
        path = str(tmp_path / name)
        with pytest.raises(CorpusError, match=rf"{name}: byte 0xef at .*`encoding`"):
            read(Source(path=path, kind=kind))  # type: ignore[arg-type]
        stated = Source(path=path, kind=kind, encoding="latin-1")  # type: ignore[arg-type]
        assert "".join(read(stated)) == "naïve"
        with pytest.raises(CorpusError, match=rf"{name}: .*(shift_jis|cp932).*encoding"):
            read(Source(path=path, kind=kind, encoding="shift_jis"))  # type: ignore[arg-type]


def test_the_manifest_states_the_encodings_and_what_was_left_out(tmp_path: Path) -> None:
    root = tmp_path / "text"
    (root / ".git").mkdir(parents=True)
    (root / "part" / ".ipynb_checkpoints").mkdir(parents=True)
    for name in (".git/HEAD", ".git/config", "part/.ipynb_checkpoints/a.txt", ".hidden"):
        (root / name).write_text("hidden")
    for n in range(20):
        (root / f"{n:02}.txt").write_text(f"text {n}")
    (root / "german.txt").write_bytes((GERMAN * 9).encode("cp1252"))
    (root / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff")
    with pytest.raises(CorpusError, match=r"image.png: "):
        write_corpus(tmp_path / "stops", Source(path=str(root)), validation_fraction=0.3)
    source = Source(path=str(root), on_error="skip")
    corpus = write_corpus(tmp_path / "out", source, validation_fraction=0.3)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["hidden_files"] == 4
    assert [entry["path"] for entry in manifest["skipped_files"]] == ["image.png"]
    assert "image.png" in manifest["skipped_files"][0]["reason"]
    assert {entry["path"]: entry.get("encoding") for entry in manifest["files"]}.items() >= {
        "german.txt": "cp1250",  # German has the same bytes in both
        "00.txt": None,
    }.items()
    assert corpus.table()["files left out"].tolist() == [5]
    assert write_corpus(tmp_path / "out", source, validation_fraction=0.3) == corpus == Corpus.open(tmp_path / "out")
    with pytest.raises(CorpusError, match="on_error"):
        write_corpus(tmp_path / "out", Source(path=str(root)), validation_fraction=0.3)


# Tokens


def write_index(path: Path, ids: list[list[int]], *, code: int = 8, dtype: str = "<u2", **changes: Any) -> None:
    """A .bin and .idx as Megatron-LM's indexed dataset writes them, one sequence a document."""
    path.parent.mkdir(exist_ok=True)
    content = [np.array(document, dtype=dtype).tobytes() for document in ids]
    values = {"start": b"MMIDIDX\0\0", "version": 1, "first": list(range(len(ids) + 1)), **changes}
    header = values["start"] + int(values["version"]).to_bytes(8, "little") + bytes([code])
    header += len(ids).to_bytes(8, "little") + len(values["first"]).to_bytes(8, "little")
    sizes = np.array([len(document) for document in ids], dtype="<i4").tobytes()
    pointers = np.cumsum([0, *map(len, content)], dtype="<i8")[:-1].tobytes()
    path.with_suffix(".bin").write_bytes(b"".join(content))
    path.with_suffix(".idx").write_bytes(header + sizes + pointers + np.array(values["first"], dtype="<i8").tobytes())


def joined(parts: Iterable[list[int]]) -> list[int]:
    return [one for part in parts for one in part]


IDS = [[n, *range(n % 9), 99] for n in range(40)]


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "u1")])
def test_documents_of_an_index_stay_whole(code: int, dtype: str, tmp_path: Path) -> None:
    write_index(tmp_path / "ids" / "a", IDS, code=code, dtype=dtype)
    source = Source(path=str(tmp_path / "ids"), kind="tokens", vocab_size=100)
    corpus = write_corpus(tmp_path / "out", source, validation_fraction=0.3)
    held_out = [ids for ids in IDS if in_validation(np.array(ids, dtype=dtype).tobytes(), 0.3)]
    assert corpus.validation.tolist() == joined(held_out)
    assert corpus.train.tolist() == joined(ids for ids in IDS if ids not in held_out)
    assert write_corpus(tmp_path / "out", source, validation_fraction=0.3) == corpus
    (tmp_path / "ids" / "a.idx").write_bytes((tmp_path / "ids" / "a.idx").read_bytes() + b"x")
    with pytest.raises(CorpusError, match=r"1 of 2 .*a.idx"):
        write_corpus(tmp_path / "out", source, validation_fraction=0.3)


def test_sequences_of_a_document_in_an_index_follow_one_another(tmp_path: Path) -> None:
    write_index(tmp_path / "ids" / "a", IDS, first=[*range(0, 40, 4), 40])
    corpus = write_corpus(
        tmp_path / "out", Source(path=str(tmp_path / "ids"), kind="tokens", vocab_size=100), validation_fraction=0.4
    )
    wholes = [joined(IDS[n : n + 4]) for n in range(0, 40, 4)]
    held_out = [ids for ids in wholes if in_validation(np.array(ids, dtype="<u2").tobytes(), 0.4)]
    assert corpus.validation.tolist() == joined(held_out)
    assert corpus.n_tokens + corpus.n_validation_tokens == len(joined(IDS))


def test_a_stated_dtype_reads_ids_one_after_another_next_to_an_index_too(tmp_path: Path) -> None:
    write_index(tmp_path / "ids" / "a", IDS)
    source = Source(path=str(tmp_path / "ids"), kind="tokens", vocab_size=100, dtype="uint16")
    corpus = write_corpus(tmp_path / "out", source, validation_fraction=0.25)
    assert [*corpus.train.tolist(), *corpus.validation.tolist()] == joined(IDS)
    assert [entry["path"] for entry in corpus.manifest["files"]] == ["a.bin"]


@pytest.mark.parametrize("header", [True, False])
def test_npy_is_read_with_and_without_a_header(header: bool, tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    ids = np.arange(1000, dtype="<u4") % 700
    if header:
        np.save(tmp_path / "ids" / "a.npy", ids)
    else:
        ids.tofile(tmp_path / "ids" / "a.npy")
    source = Source(path=str(tmp_path / "ids"), kind="tokens", vocab_size=700, dtype=None if header else "uint32")
    corpus = write_corpus(tmp_path / "out", source, validation_fraction=0.2)
    assert np.array_equal(np.concatenate([corpus.train, corpus.validation]), ids)
    assert (corpus.n_tokens, corpus.train.dtype.name) == (800, "uint16")


# Broken files: the error names the file and the place, and such files can be skipped


def save(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


GOOD = lines(["fine"])
BROKEN: list[tuple[Kind, str, bytes, str]] = [
    ("text", "b.txt", b"\x89PNG\r\n\x1a\n\0\0\0\xff", r"b.txt: byte 0x89 at 0"),
    ("text", "b.txt", b"ab\0", r"b.txt: byte 0 at 2"),
    ("text", "b.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], r"b.txt.gz: can't be read"),
    ("text", "b.txt.zst", zstd(b"text" * 99)[:-3], r"b.txt.zst: can't be read"),
    ("text", "b.txt", "text".encode("utf-16") + b"\0", r"b.txt: can't be decoded as utf-16"),
    ("jsonl", "b.jsonl", GOOD + b'{"text": "a" "b"}', r"b.jsonl: line 2: "),
    ("jsonl", "b.jsonl.gz", gzip.compress(GOOD + b"{", mtime=0), r"b.jsonl.gz: line 2: "),
    ("jsonl", "b.jsonl.gz", flipped(gzip.compress(GOOD, mtime=0), -6), r"b.jsonl.gz: "),
    ("jsonl", "b.jsonl.zst", zstd(GOOD)[:-1], r"b.jsonl.zst: "),
    ("jsonl", "b.json", b'[{"text": "a"},\n{"text": "b"}', r"b.json: line 2: "),
    ("jsonl", "b.json", b'[{"text": "a"},\n]', r"b.json: line 2: "),
    ("jsonl", "b.json", b'[{"text": "a"}\n{"text": "b"}]', r"b.json: line 2: "),
    ("jsonl", "b.json", b'[{"text": "a"}]\n{"text": "b"}', r"b.json: line 2: "),
    ("jsonl", "b.json", b'{"text": "a"}\n]', r"b.json: line 2: "),
    ("jsonl", "b.json", b'[\n{"text": "a"},\n{"text": b}]' + b" " * 99, r"b.json: line 3: "),
    ("jsonl", "b.json", b'[{"text": "a"},\n"b"]', r"b.json: line 2: .*got 'b'"),
    ("jsonl", "b.json", b'[{"text": "a"},\n{"txt": "b"}]', r"b.json: line 2: .*'text'.*'txt'"),
    ("jsonl", "b.json", b'[{"text": "\xff"}]', r"b.json: after line 1: .*0xff"),
    ("csv", "b.csv", b"id,text\n1,a\n2,b,c\n", r"b.csv: line 3: .*2.* got 3"),
    ("csv", "b.csv", b'id,text\n1,a\n2,"b\n', r"b.csv: line 3: "),
    ("csv", "b.csv", b"id,txt\n1,a\n", r"b.csv: .*'text'.*'id', 'txt'"),
    ("parquet", "b.parquet", columns(TEXTS)[:-20], r"b.parquet: "),
    ("cleaned", "b.jsonl", GOOD, r"b.jsonl: line 1: .*'split': None"),
    ("cleaned", "b.jsonl", b'{"text": "a", "file": "x", "line": 1, "split": "test"}', r"b.jsonl: line 1: .*'test'"),
    ("tokens", "b.npy", save(np.zeros((2, 2), dtype=np.uint16)), r"b.npy: .*uint16.*\(2, 2\)"),
    ("tokens", "b.npy", save(np.zeros(9)), r"b.npy: .*float64"),
    ("tokens", "b.npy", save(np.array([1, -1])), r"b.npy: token 1: .*vocab_size = 100, got -1"),
    ("tokens", "b.npy", save(np.array([1, 2]))[:-3], r"b.npy: "),
    ("tokens", "b.npy", b"\1\0\2\0", r"b.npy: .*`dtype`"),
    ("tokens", "b.bin", b"\1\0\2\0", r"b.bin: .*b.idx.*`dtype`"),
]
GOOD_FILES: dict[Kind, tuple[str, bytes]] = {
    "text": ("a.txt", b"fine"),
    "jsonl": ("a{}", GOOD),
    "csv": ("a.csv", table()(["fine"])),
    "parquet": ("a.parquet", columns(["fine"])),
    "cleaned": ("a.jsonl", cleaned(["fine"])),
}


def test_files_without_a_record_are_listed_and_the_others_read(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name, content in (("a.jsonl", lines([f"text {n}" for n in range(60)])), ("b.jsonl", b""), ("c.jsonl", b"\n")):
        (folder / name).write_bytes(content)
    corpus = write_corpus(tmp_path / "corpus", Source(path=str(folder), kind="jsonl"), validation_fraction=0.2)
    (files,) = corpus.sources.values()
    assert [entry["path"] for entry in files.manifest["empty_files"]] == ["b.jsonl", "c.jsonl"]
    assert files.manifest["text"]["documents"] == 60
    (folder / "a.jsonl").unlink()
    (folder / "c.jsonl").unlink()
    with pytest.raises(CorpusError, match="empty"):
        write_corpus(tmp_path / "none", Source(path=str(folder), kind="jsonl"), validation_fraction=0.2)


def texts_of(source: Source) -> list[str]:
    return [piece.content.decode() for piece in pieces(source, 0.2)]


def test_a_null_on_the_way_to_a_field_is_a_null_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": {"b": "one"}}\n{"a": null}\n{"a": {"b": "two"}}\n')
    assert texts_of(Source(path=str(tmp_path), kind="jsonl", field="a.b")) == ["one", "two"]
    (tmp_path / "a.jsonl").write_text('{"a": {"c": "one"}}\n')
    with pytest.raises(CorpusError, match=r"no field 'a\.b'"):
        texts_of(Source(path=str(tmp_path), kind="jsonl", field="a.b"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_is_nested_too_deep_names_file_and_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "fine"}\n' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "\n")
    (tmp_path / f"fine{name[1:]}").write_text('{"text": "fine"}\n')
    with pytest.raises(CorpusError, match=rf"{name}: line 2: not JSON"):
        texts_of(Source(path=str(tmp_path), kind="jsonl"))
    assert texts_of(Source(path=str(tmp_path), kind="jsonl", on_error="skip")) == ["fine"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" + f"text {number}".encode())
    assert texts_of(Source(path=str(tmp_path))) == ["text 0", "text 1", "text 2"]
    assert texts_of(Source(path=str(tmp_path), encoding="utf-8")) == ["text 0", "text 1", "text 2"]


def test_linked_folders_are_read_once_and_links_upwards_not_at_all(tmp_path: Path) -> None:
    for folder in ("text/own", "elsewhere/deep"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    (tmp_path / "text" / "shard").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "own" / "up").symlink_to(tmp_path / "text")
    (tmp_path / "text" / "latest").symlink_to("own")
    (tmp_path / "text" / "shard copy").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "tail").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "elsewhere" / "around").symlink_to(tmp_path)
    files = Source(path=str(tmp_path / "text")).files()[1]
    assert sorted(path.read_text() for path in files) == ["elsewhere/deep", "text/own"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "tokens"])
def test_a_link_that_leads_nowhere_stops_or_is_skipped_and_listed(kind: Kind, tmp_path: Path) -> None:
    suffix = {"text": "txt", "tokens": "npy"}.get(kind, kind)
    text = tmp_path / "text"
    text.mkdir()
    link = text / f"9.{suffix}"
    link.symlink_to("annexed")
    for number in range(9):
        path = text / f"{number}.{suffix}"
        if kind == "tokens":
            np.save(path, np.arange(9))
        elif kind == "parquet":
            parquet.write_table(pa.table({"text": [f"row {row} of {number}" for row in range(9)]}), path)
        else:
            rows = [json.dumps({"text": f"line {line} of {number}"}) for line in range(9)]
            path.write_text("\n".join(rows))
    source = Source(path=str(text), kind=kind, vocab_size=9 if kind == "tokens" else None)
    with pytest.raises(CorpusError, match="9.*can't be read"):
        write_corpus(tmp_path / "stopped", source, validation_fraction=0.3)
    skipping = replace(source, on_error="skip")
    written = write_corpus(tmp_path / "corpus", skipping, validation_fraction=0.3)
    assert [file["path"] for file in written.manifest["skipped_files"]] == [link.name]
    assert write_corpus(tmp_path / "corpus", skipping, validation_fraction=0.3).key == written.key


def test_a_file_name_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("more")
    with pytest.raises(CorpusError, match="caf.*UTF-8"):
        texts_of(Source(path=str(tmp_path)))
    assert texts_of(Source(path=str(tmp_path), on_error="skip")) == ["fine"]


@pytest.mark.parametrize(("kind", "name", "content", "message"), BROKEN)
def test_a_broken_file_stops_or_is_skipped(kind: Kind, name: str, content: bytes, message: str, tmp_path: Path) -> None:
    from proxy_models.data.documents import ReadReport
    from proxy_models.data.tokenization import blocks
    from proxy_models.data.tokenizer import BytesTokenizer

    vocab_size = 100 if kind == "tokens" else None
    (tmp_path / name).write_bytes(content)
    if kind == "tokens":
        np.save(tmp_path / "a.npy", np.arange(9)) if name.endswith("npy") else write_index(
            tmp_path / "a", [[*range(9)]]
        )
    else:
        good, fine = GOOD_FILES[kind]
        (tmp_path / good.format(Path(name.removesuffix(".gz").removesuffix(".zst")).suffix)).write_bytes(fine)

    def run(on_error: Any) -> tuple[ReadReport, str]:
        report = ReadReport()
        source = Source(path=str(tmp_path), kind=kind, vocab_size=vocab_size, on_error=on_error)
        found = np.concatenate([block.tokens for block in blocks(source, BytesTokenizer(), 0.3, report)])
        return report, bytes(found.astype(np.uint8)).decode().rstrip("\0")

    with pytest.raises(CorpusError, match=message):
        run("stop")
    report, text = run("skip")
    assert list(report.skipped) == [name]
    assert text == (bytes(range(9)).decode() if kind == "tokens" else "fine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": b"NOTANIDX\0"}, r"a.idx: "),
        ({"version": 2}, r"a.idx: version .*1 .* 2"),
        ({"code": 7}, r"a.idx: .*7"),
        ({"first": [0, 41]}, r"a.idx: .*40"),
        ({"first": [0, 30, 20, 40]}, r"a.idx: "),
        ({"first": [0, 30]}, r"a.idx: "),
    ],
)
def test_a_broken_index_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_index(tmp_path / "ids" / "a", IDS, **changes)
    with pytest.raises(CorpusError, match=message):
        write_corpus(tmp_path / "out", Source(path=str(tmp_path / "ids"), kind="tokens", vocab_size=100))
    assert not (tmp_path / "out").exists()


def test_an_index_that_is_cut_is_named(tmp_path: Path) -> None:
    write_index(tmp_path / "ids" / "a", IDS)
    content = (tmp_path / "ids" / "a.idx").read_bytes()
    for size in (0, 20, 200, len(content) - 1):
        (tmp_path / "ids" / "a.idx").write_bytes(content[:size])
        with pytest.raises(CorpusError, match=r"a.idx: "):
            write_corpus(tmp_path / "out", Source(path=str(tmp_path / "ids"), kind="tokens", vocab_size=100))


def test_long_files_are_read_in_bounded_memory(tmp_path: Path) -> None:
    import tracemalloc

    text = "a line of some words that compress well\n" * 100
    content = json.dumps([{"text": text}] * 12_000).encode()  # 48 MB
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content, 1))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((text * 12_000).encode("utf-16"), 1))
    del content
    for name, kind in (("a.json.gz", "jsonl"), ("a.txt.gz", "text")):
        tracemalloc.start()
        source = Source(path=str(tmp_path / name), kind=kind)  # type: ignore[arg-type]
        n = sum(len(piece.content) for piece in pieces(source, 0.3))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert n == len(text) * 12_000
        assert peak < 24 << 20, (name, peak)
