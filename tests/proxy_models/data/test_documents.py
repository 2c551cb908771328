"""What is read is what was written, in pieces; what is broken is reported with its file and place."""

from __future__ import annotations

import bz2
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from proxy_models.data import documents
from proxy_models.data.documents import in_sample, in_validation, pieces
from proxy_models.data.sources import CorpusError, Kind, Source

TEXTS = [f"document {number}: naïve – 本\n" * (number % 3 + 1) for number in range(40)]


def write_jsonl(folder: Path) -> None:
    lines = [json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("".join(lines[:25]))
    (folder / "b.jsonl").write_text("".join(lines[25:]))


def write_parquet(folder: Path) -> None:
    parquet.write_table(pa.table({"id": range(25), "text": TEXTS[:25]}), folder / "a.parquet", row_group_size=7)
    parquet.write_table(pa.table({"id": range(15), "text": TEXTS[25:]}), folder / "b.parquet")


def write_saved(folder: Path) -> None:
    """As the datasets library's save_to_disk lays it out: Arrow streams, listed in state.json."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, texts in zip(names, (TEXTS[:25], TEXTS[25:]), strict=True):
        table = pa.table({"text": texts})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


WRITERS: dict[Kind, Callable[[Path], None]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "huggingface": write_saved,
}


def read(source: Source, fraction: float = 0.3) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "validation": []}
    content = b""
    for piece in pieces(source, fraction):
        content += piece.content
        if piece.closes:
            found[piece.split].append(content.decode())
            content = b""
    assert not content
    return found


@pytest.mark.parametrize("kind", WRITERS)
def test_every_record_is_read_once_and_split_by_its_text(kind: Kind, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    expected = {
        "train": [text for text in TEXTS if not in_validation(text, 0.3)],
        "validation": [text for text in TEXTS if in_validation(text, 0.3)],
    }
    assert all(expected.values())
    assert read(Source(path=str(tmp_path), kind=kind)) == expected


@pytest.mark.parametrize("kind", WRITERS)
def test_reading_reports_its_progress_in_each_file(kind: Kind, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    for name in {piece.file for piece in pieces(Source(path=str(tmp_path), kind=kind), 0.3)}:
        done = [p.done_bytes for p in pieces(Source(path=str(tmp_path), kind=kind), 0.3) if p.file == name]
        assert done == sorted(done)
        size = (tmp_path / name).stat().st_size
        assert 0.7 * size < done[-1] <= size


@given(text=st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), cut=st.integers(8, 40))
def test_long_documents_are_cut_between_characters(
    text: str, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("long")
    (folder / "a.txt").write_bytes(text.encode() * 5)
    (folder / "b.jsonl").write_text(json.dumps({"text": text * 5}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", cut)
        for source in (Source(path=str(folder / "a.txt")), Source(path=str(folder / "b.jsonl"), kind="jsonl")):
            found = list(pieces(source, 0.25))
            assert b"".join(piece.content for piece in found) == text.encode() * 5
            assert max(len(piece.content) for piece in found) <= 2 * cut
            for piece in found:
                piece.content.decode()


def test_a_single_text_is_cut_by_position_before_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("本" * 100)
    for fraction in (0.1, 0.333, 0.5):
        found = read(Source(path=str(tmp_path / "a.txt")), fraction)
        assert len(found["train"][0]) + len(found["validation"][0]) == 100
        assert len(found["validation"][0]) == pytest.approx(100 * fraction, abs=1)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_blank_lines_and_null_texts_are_skipped_and_counted(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[str | None] = [None, *TEXTS, None, "", None]
    if kind == "jsonl":
        lines = [json.dumps({"text": text}) if text is not None else "" for text in rows]
        (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": null}', "  "]))
    else:
        parquet.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    found = read(Source(path=str(tmp_path), kind=kind))
    assert sorted(found["train"] + found["validation"]) == sorted(TEXTS)
    (record,) = caplog.records
    assert record.args == (tmp_path / f"a.{kind}", 5 if kind == "jsonl" else 3)


def test_names_that_begin_with_a_dot_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / ".kept" / "text"
    for name in ("a.txt", "b/c.txt", ".git/HEAD", "b/.cache/d/e.txt", ".hidden"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    assert Source(path=str(root)).files() == (root, [root / "a.txt", root / "b" / "c.txt"])


LINE = '{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("text", "a.txt", b"ab\xffd", r"a.txt: byte 0xff at 2 \(invalid start byte\); text must be UTF-8"),
        ("text", "a.txt", "naïve".encode("latin-1"), r"a.txt: byte 0xef at 2"),
        ("text", "a.txt", b"ab\0d", r"a.txt: byte 0 at 2"),
        ("text", "a.txt", b"x" * documents.PIECE_BYTES + b"\n\xff", f"byte 0xff at {documents.PIECE_BYTES + 1}"),
        ("jsonl", "a.jsonl", b"", r"a.jsonl: the file is empty"),
        ("jsonl", "a.jsonl", (LINE + '{"text": "fi').encode(), r"a.jsonl: line 2: not JSON .*column 10"),
        ("jsonl", "a.jsonl", b"\n \n", r"a.jsonl: the file is empty"),
        ("jsonl", "a.jsonl", b'\n{"text": null}\n', r"a.jsonl: the file is empty"),
        ("jsonl", "a.jsonl", b"\n[1, 2]", r"a.jsonl: line 2: each line must be an object"),
        ("jsonl", "a.jsonl", bz2.compress(LINE.encode()), r"a.jsonl: .*bunzip2"),
        ("text", "a.txt.bz2", bz2.compress(b"text"), r"a.txt.bz2: .*bunzip2"),
        ("jsonl", "a.jsonl", b"[1, 2]", r"a.jsonl: line 1: each line must be an object, got \[1, 2\]"),
        ("jsonl", "a.jsonl", (LINE + '{"txt": 1}').encode(), r"a.jsonl: line 2: no field 'text', only 'txt'"),
        ("jsonl", "a.jsonl", b'{"text": 7}', r"a.jsonl: line 1: field 'text' must be a string, got 7"),
        ("jsonl", "a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl: line 1: field 'text': character 0 is half of a pair"),
        ("jsonl", "a.jsonl", b'{"text": "a\\u0000"}', r"a.jsonl: line 1: byte 0 at 1"),
        ("jsonl", "a.jsonl", b'{"text": "\xff"}', r"a.jsonl: line 1: byte 0xff at 10"),
        ("parquet", "a.parquet", b"", r"a.parquet: can't be read as Parquet"),
        ("parquet", "a.parquet", b"PAR1 no", r"a.parquet: can't be read as Parquet"),
    ],
)
def test_bad_data_is_reported_with_file_place_rule_and_value(
    kind: Kind, name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        list(pieces(Source(path=str(tmp_path), kind=kind), 0.3))


@pytest.mark.parametrize("kept", [0.5, 0.95])
def test_a_truncated_table_is_refused(kept: float, tmp_path: Path) -> None:
    names: dict[Kind, str] = {"parquet": "b.parquet", "huggingface": "data-00001-of-00002.arrow"}
    for kind, path in names.items():
        WRITERS[kind](tmp_path)
        content = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(content[: int(len(content) * kept)])
        with pytest.raises(CorpusError, match=f"{path}: can't be read"):
            list(pieces(Source(path=str(tmp_path), kind=kind), 0.3))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"txt": ["a"]}, r"no column 'text', only 'txt'"),
        ({"text": [1, 2]}, r"column 'text' must hold strings, got int64"),
    ],
)
def test_a_wrong_column_is_named(table: dict[str, list[object]], message: str, tmp_path: Path) -> None:
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=f"a.parquet: {message}"):
        list(pieces(Source(path=str(tmp_path), kind="parquet"), 0.3))


def test_a_folder_that_save_to_disk_did_not_write_is_refused(tmp_path: Path) -> None:
    source = Source(path=str(tmp_path), kind="huggingface")
    with pytest.raises(CorpusError, match=r"state.json: can't be read .*save_to_disk writes one"):
        source.files()
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"state.json:"):
        source.files()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(CorpusError, match=r"holds several data sets \(train, test\); name the folder of one"):
        source.files()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "xml"}, "kind must be one of .* got 'xml'"),
        ({"kind": "tokens", "vocab_size": 5, "dtype": "int8"}, "must be one of uint8, uint16, uint32, got 'int8'"),
        ({"kind": "jsonl", "encoding": "latin-1"}, "encoding is for .* got 'latin-1'"),
        ({"encoding": "rot13"}, "encoding must .* got 'rot13'"),
        ({"on_error": "ignore"}, "on_error must be one of stop, skip, got 'ignore'"),
        ({"kind": "tokens", "dtype": "uint8"}, "needs a vocab_size of at least 1, got None"),
        ({"dtype": "uint8"}, "dtype and vocab_size are for kind \"tokens\", got them for 'text'"),
        ({"path": "python-stdlib", "kind": "jsonl"}, "is of kind \"text\", got 'jsonl'"),
    ],
)
def test_a_contradictory_source_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Source(**{"path": "x", **values})  # type: ignore[arg-type]


def test_a_folder_without_a_readable_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match=re.escape(f"{tmp_path}: ") + r".*\*\.jsonl, \*\.json"):
        Source(path=str(tmp_path), kind="jsonl").files()


def test_each_piece_has_the_line_at_which_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 8)
    (tmp_path / "alone.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    begins = {piece.line: piece.content for piece in pieces(Source(path=str(tmp_path / "alone.txt")), 0.4)}
    assert len(begins) > 2
    whole = (tmp_path / "alone.txt").read_bytes().splitlines(keepends=True)
    assert all(content.splitlines(keepends=True)[0] in whole[line - 1] for line, content in begins.items())


@pytest.mark.parametrize(("kind", "lines"), [("jsonl", [1, 2, 4]), ("parquet", [0, 1, 3]), ("huggingface", [0, 1, 3])])
def test_a_record_has_the_number_of_its_line_or_row(kind: Kind, lines: list[int], tmp_path: Path) -> None:
    texts = ["a", "b", None, "d"]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == "parquet":
        parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    else:
        table = pa.table({"text": texts})
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    assert [piece.line for piece in pieces(Source(path=str(tmp_path), kind=kind), 0.5)] == lines


@pytest.mark.parametrize(("fraction", "share"), [(0.1, 0.05), (0.1, 0.5), (0.4, 0.2)])
def test_a_sample_takes_its_share_of_either_split(fraction: float, share: float) -> None:
    """The split is by a hash of the text too, so that the same hash would sample one side alone."""
    texts = [f"text {number}".encode() for number in range(6000)]
    for held_out in (True, False):
        side = [text for text in texts if in_validation(text, fraction) is held_out]
        assert sum(in_sample(text, share) for text in side) / len(side) == pytest.approx(share, abs=0.06)
