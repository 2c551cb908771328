"""`muscale init`: a study file with one's own text in it, and whether that is enough."""

import gzip
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from muscale.errors import StageError, StudyDirectoryError, StudyFileError
from muscale.new_study import write_study
from muscale.settings.config import StudyConfig
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
    for name, encoding in (("fine.txt", "utf-8"), ("old.txt", "latin-1"), ("wide.txt", "utf-16")):
        (mixed / name).write_text("Süden, und noch mehr davon", encoding=encoding)
    for source, message in (
        (tmp_path / "none", "--source: .*none: no such file or folder"),
        (empty, "--source: .*empty: the corpus is empty"),
        (hollow, "--source: .*hollow: the corpus is empty, no file in it"),
        (picture, r"--source: .*picture.png: is not text in UTF-8 \(byte 0\)"),
        (mixed, r"old.txt.*\(byte 1\)\n(.*\n)*.*wide.txt.*\(byte 0\)"),  # all faulty files at once
    ):
        with pytest.raises(StageError, match=message):
            write_study(tmp_path / "mine", source)
    with pytest.raises(StudyFileError, match="--name: must be a name"):
        write_study(tmp_path / "mine", None, " ")
    assert not (tmp_path / "mine").exists()
    with pytest.raises(StudyDirectoryError, match=r"picture.png: is a file"):
        write_study(picture / "study")


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
    with pytest.raises(StudyDirectoryError, match="is there already; edit it, or pass --keep"):
        write_study(tmp_path)


RECORDS = '{"text": "a document"}\n' * 200


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documentation_beside_data_and_names_with_a_dot_are_left_out_and_said(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "data"
    left_out = [".cache/x", "LICENSE", "README.md", "dataset_infos.json"]
    for name in (f"train.{kind}", *left_out):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(RECORDS)
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
        (["train.json", "README.md"], RECORDS.encode(), "train.json"),
        (["train.txt"], RECORDS.encode(), "train.txt"),
        (["train.json"], b'[\n{"text": "a"},\n{"text": "b"}]', "train.json"),
        (["train.csv"], b"id,text\n1,a\n" * 50, "train.csv"),
        (["a.jsonl", "notes.txt"], RECORDS.encode(), "notes.txt"),
        (["a.jsonl", "b.parquet"], RECORDS.encode(), "b.parquet"),
        (["part0.jsonl.gz"], gzip.compress(RECORDS.encode(), mtime=0), r"part0\.jsonl\.gz"),
        (["a.jsonl", "part0.jsonl.gz"], gzip.compress(RECORDS.encode(), mtime=0), "part0.jsonl.gz"),
    ],
)
def test_data_under_another_suffix_is_refused_by_its_name(
    tmp_path: Path, names: list[str], content: bytes, odd: str
) -> None:
    source = tmp_path / "data"
    source.mkdir()
    for name in names:
        (source / name).write_bytes(b"text" if name == "README.md" else content)
    with pytest.raises(StageError, match=odd):
        write_study(tmp_path / "mine", source)
    assert not (tmp_path / "mine").exists()


def test_code_may_hold_some_json(tmp_path: Path) -> None:
    source = texts(tmp_path / "code")
    (source / "package.json").write_text('{"name": "x"}')
    assert write_study(tmp_path / "mine", source).n_files == 4
