"""`muscale init`: a study file with one's own text in it, and whether that is enough."""

import gzip
import json
import struct
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muscale.errors import StageError, StudyDirectoryError, StudyFileError
from muscale.new_study import write_study
from muscale.settings.config import StudyConfig
from muscale.settings.corpus import sources
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.documents import in_validation
from proxy_models.data.sources import Source


def texts(folder: Path, *, files: int = 3, n_bytes: int = 100_000) -> Path:
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text("a line of text\n" * (n_bytes // 15 + 1))
    return folder


def test_without_a_source_it_is_the_quickstarts(tmp_path: Path) -> None:
    written = write_study(tmp_path / "mine")
    quickstart = (resources.files("muscale") / "quickstart.toml").read_text()
    assert Path(written.path).read_text() == quickstart.replace('name = "quickstart"', 'name = "mine"')
    assert str(written) == f"wrote {tmp_path}/mine/study.toml"


def test_ones_own_text_and_name_stand_in_it_and_every_comment_stays(tmp_path: Path) -> None:
    source = texts(tmp_path / 'my "texts"')
    written = write_study(tmp_path / "mine", source, 'a "name"')
    config = StudyConfig.read(Path(written.path))
    assert (config.name, config.corpus.source, config.corpus.kind) == ('a "name"', str(source), "text")
    quickstart = (resources.files("muscale") / "quickstart.toml").read_text().splitlines()
    kept = Path(written.path).read_text().splitlines()
    assert [line for line in quickstart[1:] if line.startswith("#")] == [
        line for line in kept[2:] if line.startswith("#")
    ]
    same = set(quickstart) & set(kept)
    assert len(same) >= len(set(quickstart)) - 3, "first line, name and source"


def test_it_shows_the_budgets_share_of_the_corpus(tmp_path: Path) -> None:
    little = write_study(tmp_path / "little", texts(tmp_path / "few", files=1, n_bytes=300_000))
    assert (little.n_files, little.n_bytes) == (1, 15 * 20_001)
    assert little.training_tokens == little.n_bytes - little.n_bytes // 10
    assert little.too_much
    config = StudyConfig.read(Path(little.path))
    assert little.held_out_short == config.corpus.evaluation_tokens + 128 - little.n_bytes // 10
    assert little.needed
    assert little.needed["ladder"] == max(stem.n_tokens for stem in config.ladder.stems)
    n_params = config.plan.budget.compute_flops / (6 * little.needed["full run"])
    assert little.needed["full run"] == pytest.approx(20 * n_params, rel=1e-3)
    assert str(little).count("too little") == 2
    assert "add text, or lower plan.compute_flops" in str(little)
    enough = write_study(tmp_path / "enough", texts(tmp_path / "much", files=1, n_bytes=6_000_000))
    assert not enough.too_much
    assert (little.too_little, enough.too_little) == (True, False)
    assert enough.held_out_short == 0
    assert "too little" not in str(enough)


def test_lines_of_json_are_recognized(tmp_path: Path) -> None:
    source = tmp_path / "mine" / "data"
    source.mkdir(parents=True)
    (source / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    written = write_study(tmp_path / "mine", source)
    config = StudyConfig.read(Path(written.path))
    assert (config.corpus.kind, config.corpus.source) == ("jsonl", "data"), "relative where both may be moved together"
    assert written.training_tokens is None
    assert "once it has read them" in str(written)


def test_the_held_out_part_is_that_of_the_files_and_one_far_too_large_is_said(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    names = [f"{number}.txt" for number in range(60)]
    for name in names:
        (source / name).write_text("a line of text\n" * 1000)
    held_out = [name for name in names if in_validation(name, 0.1)]
    even = write_study(tmp_path / "even", source)
    assert even.training_tokens == 15_000 * (60 - len(held_out))
    assert not even.uneven
    (source / held_out[0]).write_text("a line of text\n" * 100_000)
    written = write_study(tmp_path / "uneven", source)
    corpus = write_corpus(tmp_path / "corpus", Source(path=str(source)), validation_fraction=0.1)
    n_closed = len(names) - len(held_out)  # a token closes each document
    assert corpus.n_tokens == even.training_tokens + n_closed
    assert corpus.n_validation_tokens == written.n_bytes - even.training_tokens + len(held_out)
    assert held_out[0] in written.uneven


def test_what_is_no_text_is_refused_and_nothing_written(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG" + bytes(100))
    empty, hollow = tmp_path / "empty", tmp_path / "hollow"
    empty.mkdir()
    hollow.mkdir()
    (hollow / "a.txt").touch()
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "fine.txt").write_text("Süden, und noch mehr davon")
    for name in ("one.bin", "two.dat"):
        (mixed / name).write_bytes(b"\xff\0\xfe")
    torn, linked = tmp_path / "torn.jsonl.gz", tmp_path / "linked"
    torn.write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:-20])
    linked.mkdir()
    (linked / "fine.txt").write_text("text")
    (linked / "lost.txt").symlink_to("annexed")
    (tmp_path / "torn.txt.gz").write_bytes(gzip.compress(b"text " * 999)[:-20])
    for source, message in (
        (torn, "--source: .*torn.jsonl.gz: can't be read"),
        (tmp_path / "torn.txt.gz", "--source: .*torn.txt.gz: can't be read"),
        (linked, "--source: .*lost.txt: can't be read"),
        (tmp_path / "none", "--source: .*none: no such file or folder"),
        (empty, "--source: .*empty: the corpus is empty"),
        (hollow, "--source: .*hollow: the corpus is empty"),
        (picture, r"--source: .*picture.png: byte 0x89 at 0"),
        (mixed, r"one.bin.*\n(.*\n)*.*two.dat"),  # all faulty files at once
    ):
        with pytest.raises(StageError, match=message):
            write_study(tmp_path / "mine", source)
    with pytest.raises(StudyFileError, match="--name: must be a name"):
        write_study(tmp_path / "mine", None, " ")
    with pytest.raises(StudyFileError, match="--name: "):
        write_study(tmp_path / "mine", None, "a\x7fb")
    with pytest.raises(StudyDirectoryError, match="UTF-8"):
        write_study(tmp_path / "caf\udce9")
    assert not (tmp_path / "mine").exists()
    with pytest.raises(StudyDirectoryError, match=r"picture.png: is a file"):
        write_study(picture / "study")


def test_control_characters_in_paths_make_a_valid_file(tmp_path: Path) -> None:
    source = tmp_path / "te\x7fxt"
    source.mkdir()
    (source / "a.txt").write_text("some text " * 100)
    path = Path(write_study(tmp_path / "my\x7fstudy", source).path)
    written = tomllib.loads(path.read_text())
    assert (written["name"], written["corpus"]["source"]) == ("mystudy", str(source))


def test_text_is_judged_by_whole_characters(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    (source / "a.txt").write_text("ä" * 50_000)  # 65,536 bytes end in the middle of none, 65,535 would
    (source / "b.txt").write_text("x" + "ä" * 50_000)
    (source / "c.txt").write_text("ab€" * 30_000)
    assert tomllib.loads(Path(write_study(tmp_path / "mine", source).path).read_text())["corpus"]["source"] == str(
        source
    )


def test_a_study_file_that_is_there_stays(tmp_path: Path) -> None:
    write_study(tmp_path)
    with pytest.raises(StudyDirectoryError, match="--keep"):
        write_study(tmp_path)


RECORDS = '{"text": "a document"}\n' * 200


def write_parquet(path: Path, field: str) -> None:
    pq.write_table(pa.table({"id": range(50), field: ["a document"] * 50}), path)


def write_tokens(path: Path, field: str) -> None:
    np.save(path, np.arange(500, dtype=np.uint16))


def write_megatron(path: Path, field: str) -> None:
    ids = np.arange(300, dtype=np.uint16)
    path.write_bytes(ids.tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    path.with_suffix(".idx").write_bytes(head + struct.pack("<iqqq", len(ids), 0, 0, 1))


def writer(content: str, compress: Callable[[bytes], bytes] = bytes) -> Callable[[Path, str], None]:
    return lambda path, field: (path.write_bytes(compress(content.replace("text", field).encode())), None)[1]


WRITERS: dict[str, Callable[[Path, str], None]] = {
    "train.jsonl": writer(RECORDS),
    "train.jsonl.gz": writer(RECORDS, gzip.compress),
    "train.json": writer('[\n{"text": "a"},\n{"text": "b"}]'),
    "train.csv": writer("id,text\n" + "1,a\n" * 50),
    "train.tsv": writer("id\ttext\n" + "1\ta\n" * 50),
    "train.parquet": write_parquet,
    "train.npy": write_tokens,
    "train.bin": write_megatron,
}
KINDS = {".jsonl": "jsonl", ".gz": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("field", ["text", "content"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_data_is_recognized_with_the_field_of_its_text(tmp_path: Path, name: str, field: str, as_folder: bool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS[name](folder / name, field)
    (folder / "README.md").write_text("what it is")
    written = write_study(tmp_path / "mine", folder if as_folder else folder / name)
    assert written.n_files == 1
    config = StudyConfig.read(Path(written.path))
    kind = KINDS.get(Path(name).suffix, "tokens")
    assert config.corpus.kind == kind
    if kind == "tokens":
        assert config.corpus.vocab_size == config.model.vocab_size == (500 if name.endswith(".npy") else 300)
    else:
        assert config.corpus.field == field
    named = sources(config.corpus, tmp_path / "mine")["corpus"]
    assert named.files()[1] == [folder / name]


@pytest.mark.parametrize(
    ("record", "stated"),
    [
        ({"prompt": "a", "completion": "b"}, {"prompt_field": "prompt", "field": "completion", "messages_field": None}),
        ({"prompt": "a", "response": "b"}, {"prompt_field": "prompt", "field": "response", "messages_field": None}),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"prompt_field": None, "field": "text", "messages_field": "messages"},
        ),
        ({"prompt": "a", "text": "b"}, {"prompt_field": None, "field": "text", "messages_field": None}),
    ],
)
def test_records_with_prompts_are_recognized(
    tmp_path: Path, record: dict[str, Any], stated: dict[str, str | None]
) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 100)
    study = write_study(tmp_path / "study", tmp_path / "a.jsonl")
    corpus = StudyConfig.read(Path(study.path)).corpus
    assert {name: getattr(corpus, name) for name in stated} == stated


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({"prompt": "a", "completion": ""}, "'completion'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "'messages'"),
        ({"instruction": "a", "output": "b"}, "'text'"),
    ],
)
def test_what_is_wrong_with_a_usual_field_is_named(tmp_path: Path, record: dict[str, Any], key: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 100)
    with pytest.raises(StageError, match=rf"a\.jsonl: line 1: [a-z ]*{key}"):
        write_study(tmp_path / "study", tmp_path / "a.jsonl")


def test_text_in_other_encodings_and_compressed_is_text(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    (source / "wide.txt").write_text("Süden, und noch mehr davon\n" * 20, encoding="utf-16")
    (source / "old.txt").write_text("Съешь же ещё этих мягких французских булок\n" * 20, encoding="cp1251")
    (source / "small.txt.gz").write_bytes(gzip.compress("Süden\n".encode() * 200, mtime=0))
    written = write_study(tmp_path / "mine", source)
    assert (written.n_files, written.training_tokens) == (3, None)
    assert StudyConfig.read(Path(written.path)).corpus.kind == "text"


def test_a_saved_data_set_is_recognized(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    table = pa.table({"content": ["a document"] * 20})
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    config = StudyConfig.read(Path(write_study(tmp_path / "mine", folder).path))
    assert (config.corpus.kind, config.corpus.field) == ("huggingface", "content")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documentation_beside_data_and_names_with_a_dot_are_left_out_and_said(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "data"
    left_out = [".cache/x", "LICENSE", "README.md", "dataset_infos.json"]
    for name in left_out:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(RECORDS)
    WRITERS[f"train.{kind}"](source / f"train.{kind}", "text")
    written = write_study(tmp_path / "mine", source)
    assert StudyConfig.read(Path(written.path)).corpus.kind == kind
    assert (written.n_files, written.left_out) == (1, tuple(left_out))
    assert all(name in str(written) for name in left_out)


def test_a_repository_of_text_is_its_text(tmp_path: Path) -> None:
    source = texts(tmp_path / "text", files=8)
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_bytes(b"\xff")
    (source / "README.md").write_text("text")
    written = write_study(tmp_path / "mine", source)
    assert (written.n_files, written.left_out) == (9, (".git/HEAD",))


@pytest.mark.parametrize(
    ("names", "content", "odd"),
    [
        (["train.txt"], RECORDS.encode(), "train.txt"),
        (["a.jsonl", "notes.txt"], RECORDS.encode(), "notes.txt"),
        (["a.jsonl", "b.parquet"], RECORDS.encode(), "b.parquet"),
        (["a.jsonl", "more.json"], RECORDS.encode(), "more.json"),
        (["a.csv", "more.bin"], b"id,text\n1,a\n" * 50, "more.bin"),
        (["a.jsonl"], b"no JSON\n", "a.jsonl"),
        (["a.jsonl"], b'{"words": "x"}\n', "a.jsonl: line 1.*words"),
        (["a.csv"], b"id,words\n1,a\n" * 50, "a.csv.*words"),
        (["a.parquet"], b"no table", "a.parquet"),
        (["a.bin"], b"\0\1" * 50, "a.bin.*dtype"),
        (["a.txt.bz2"], b"BZh91AY" + bytes(50), "a.txt.bz2: is compressed"),
    ],
)
def test_data_under_another_suffix_is_refused_by_its_name(
    tmp_path: Path, names: list[str], content: bytes, odd: str
) -> None:
    source = tmp_path / "data"
    source.mkdir()
    for name in names:
        (source / name).write_bytes(content)
    with pytest.raises(StageError, match=odd):
        write_study(tmp_path / "mine", source)
    assert not (tmp_path / "mine").exists()


def test_code_may_hold_some_json(tmp_path: Path) -> None:
    source = texts(tmp_path / "code")
    (source / "package.json").write_text('{"name": "x"}')
    assert write_study(tmp_path / "mine", source).n_files == 4
