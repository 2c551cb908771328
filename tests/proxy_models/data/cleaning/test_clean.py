"""Steps remove what was planted and nothing else, are counted exactly, and continue after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy_models.data.cleaning import text_shards
from proxy_models.data.cleaning.clean import RemovesTooMuchError, clean
from proxy_models.data.cleaning.cleaned import Cleaned
from proxy_models.data.cleaning.cleaning_step import CleaningStep
from proxy_models.data.cleaning.exact_duplicates import ExactDuplicates
from proxy_models.data.cleaning.heuristics import Heuristics
from proxy_models.data.cleaning.languages import Languages
from proxy_models.data.cleaning.leaks import Leaks
from proxy_models.data.cleaning.line_duplicates import LineDuplicates
from proxy_models.data.cleaning.near_duplicates import NearDuplicates
from proxy_models.data.cleaning.quality import Quality
from proxy_models.data.cleaning.shingles import jaccard, shingles
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.documents import in_validation
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.sources import CorpusError, Source
from tests.quick import quick_and_soak

FRACTION = 0.2
SYLLABLES = ["ba", "de", "fi", "go", "lu", "mar", "nes", "pol", "rit", "sun", "tev", "zak"]


def words(number: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(SYLLABLES, k=3)) for _ in range(number)]


def text_of(seed: int, number: int = 60) -> str:
    return " ".join(words(number, seed))


def write_lines(folder: Path, texts: Sequence[str]) -> Source:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(path=str(folder), kind="jsonl")


def cleaned(folder: Path, sources: dict[str, Source], *steps: CleaningStep, **options: Any) -> Cleaned:
    return clean(sources, folder, steps, validation_fraction=FRACTION, **options)


def left(found: Cleaned, source: str = "corpus") -> list[dict[str, Any]]:
    files = sorted((found.folder / source).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def counts(found: Cleaned) -> dict[tuple[str, str], tuple[int, int]]:
    table = found.table()
    return {(row["step"], row["source"]): (row["documents"], row["documents_left"]) for row in table.to_dict("records")}


def on_side(held_out: bool, count: int, start: int = 0) -> list[str]:
    """Texts that are held out, or for training."""
    found: list[str] = []
    seed = start
    while len(found) < count:
        if in_validation(text := text_of(seed), FRACTION) == held_out:
            found.append(text)
        seed += 1
    return found


def test_exact_duplicates_within_a_source_or_all(tmp_path: Path) -> None:
    texts = [text_of(seed) for seed in range(50)]
    one, other = write_lines(tmp_path / "one", [*texts, *texts[:7]]), write_lines(tmp_path / "other", texts[40:])
    sources = {"one": one, "other": other}
    within = cleaned(tmp_path / "within", sources, ExactDuplicates(scope="source"))
    assert counts(within) == {("exact_duplicates", "one"): (57, 50), ("exact_duplicates", "other"): (10, 10)}
    found = cleaned(tmp_path / "all", sources, ExactDuplicates(), most_removed=1)
    assert counts(found) == {("exact_duplicates", "one"): (57, 50), ("exact_duplicates", "other"): (10, 0)}
    row = found.manifest["removed"]["one"][0]
    assert row["bytes"] - row["bytes_left"] == sum(len(text) for text in texts[:7])
    assert [(e["file"], e["line"], e["kept"]) for e in row["examples"]] == [
        ("texts.jsonl", 51 + number, f"one, texts.jsonl:{1 + number}") for number in range(5)
    ]
    assert [document["text"] for document in left(found, "one")] == texts
    assert [document["line"] for document in left(found, "one")] == list(range(1, 51))


def test_a_held_out_near_duplicate_is_kept_and_its_training_copies_go(tmp_path: Path) -> None:
    held_out = on_side(True, 1)[0]
    edited = [
        variant
        for position in range(0, 60, 3)
        if not in_validation(
            variant := " ".join([*(w := held_out.split())[:position], "changed", *w[position + 1 :]]), FRACTION
        )
    ][:4]
    near = [jaccard(shingles(held_out), shingles(text)) >= 0.8 for text in edited]
    assert near == [True] * 4
    source = write_lines(tmp_path / "text", [*edited, *on_side(False, 20, 1000), held_out])
    found = cleaned(tmp_path / "near", {"corpus": source}, NearDuplicates())
    assert counts(found) == {("near_duplicates", "corpus"): (25, 21)}
    assert {e["kept"] for e in found.manifest["removed"]["corpus"][0]["examples"]} == {"corpus, texts.jsonl:25"}
    assert left(found)[-1] == {"text": held_out, "file": "texts.jsonl", "line": 25, "split": "validation"}


def test_near_duplicates_are_those_whose_similarity_reaches_the_threshold(tmp_path: Path) -> None:
    """Versions of a text with 0 to 8 changed words; a comparison of all pairs says which of them go."""
    texts: list[str] = []
    expected: set[str] = set()
    for seed in range(100):
        original = words(120, seed)
        versions = [" ".join(original)]
        for n_changed in (1, 2, 4, 8):
            changed = list(original)
            for position in random.Random(seed + n_changed).sample(range(120), n_changed):
                changed[position] = f"new{seed}"
            versions.append(" ".join(changed))
        kept: list[str] = []
        for text in sorted(versions, key=lambda text: not in_validation(text, FRACTION)):
            if any(jaccard(shingles(text), shingles(other)) >= 0.8 for other in kept):
                expected.add(text)
            else:
                kept.append(text)
        texts += versions
    found = cleaned(tmp_path / "near", {"corpus": write_lines(tmp_path / "t", texts)}, NearDuplicates(), most_removed=1)
    removed = set(texts) - {document["text"] for document in left(found)}
    assert len(expected) > 150
    assert len(removed ^ expected) <= 0.01 * len(expected)
    for example in found.manifest["removed"]["corpus"][0]["examples"]:
        kept_text = texts[int(example["kept"].rsplit(":", 1)[1]) - 1]
        assert jaccard(shingles(texts[example["line"] - 1]), shingles(kept_text)) >= 0.8


def test_case_and_punctuation_do_not_count_and_characters_without_spaces_are_words(tmp_path: Path) -> None:
    chinese = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少"
    texts = [
        text_of(1),
        text_of(1).upper().replace(" ", ", "),
        chinese * 2,
        (chinese * 2)[:-1],
        "",
        "?",
        "!",
        text_of(3),
    ]
    found = cleaned(tmp_path / "near", {"corpus": write_lines(tmp_path / "t", texts)}, NearDuplicates(), most_removed=1)
    assert counts(found) == {("near_duplicates", "corpus"): (7, 5)}


def test_lines_of_many_documents_are_removed_from_all(tmp_path: Path) -> None:
    notice, menu = "All rights reserved by the publisher of this site.", "Home"
    texts = [f"{menu}\n{text_of(seed)}\n  {notice}\n" for seed in range(12)] + [text_of(99), notice]
    found = cleaned(tmp_path / "lines", {"corpus": write_lines(tmp_path / "t", texts)}, LineDuplicates())
    assert counts(found) == {("line_duplicates", "corpus"): (14, 13)}
    row = found.manifest["removed"]["corpus"][0]
    assert row["lines_removed"] == 1
    assert row["bytes"] - row["bytes_left"] == 12 * (len(notice) + 3) + len(notice)
    assert row["examples"][0]["text"] == notice
    assert left(found)[0]["text"] == f"{menu}\n{text_of(0)}\n"
    kept = cleaned(
        tmp_path / "all", {"corpus": Source(path=str(tmp_path / "t"), kind="jsonl")}, LineDuplicates(max_documents=13)
    )
    assert counts(kept) == {("line_duplicates", "corpus"): (14, 14)}


def with_leaks() -> tuple[list[str], list[str]]:
    """Texts, and what the leak step leaves of them: 20 are held out, 40 clean, 10 mostly copied, and 10 have a leaked line."""
    held_out, clean = on_side(True, 20), on_side(False, 40, 1000)
    copies, long, left = [], [], []
    for number, text in enumerate(held_out[:10]):
        copy = f"Copied:\n{text.upper()}\n{text_of(3000 + number, 10)}"
        copies.append(next(there for n in range(99) if not in_validation(there := f"{copy} {n}", FRACTION)))
        leaked, own = text.replace(" ", "\u00a0"), [text_of(4000 + 3 * number + line) for line in range(3)]
        for n in range(99):
            lines = [own[0], f"He wrote: {leaked}.", *own[1:], f"{n}\n"]
            if not in_validation("\n".join(lines), FRACTION):
                break
        long.append("\n".join(lines))
        left.append("\n".join([lines[0], *lines[2:]]))
    return [*held_out, *clean, *copies, *long], [*held_out, *clean, *left]


def test_held_out_text_goes_from_training_documents_by_lines_or_as_a_whole(tmp_path: Path) -> None:
    texts, expected = with_leaks()
    source = {"corpus": write_lines(tmp_path / "t", texts)}
    assert find_leaks(source, source, validation_fraction=FRACTION).share == 0.5
    found = cleaned(tmp_path / "c", source, Leaks())
    assert [document["text"] for document in left(found)] == expected
    assert counts(found) == {("leaks", "corpus"): (80, 70)}
    row = found.manifest["removed"]["corpus"][0]
    assert (row["passages"], row["held_out_looked_up"]) == (20, 1)
    assert row["bytes"] - row["bytes_left"] == sum(map(len, map(str.encode, texts))) - sum(map(len, expected))
    assert [(one["line"], one["kept"]) for one in row["examples"]] == [
        (61 + number, f"corpus, texts.jsonl:{1 + number}") for number in range(5)
    ]
    assert find_leaks(found.sources, found.sources, validation_fraction=FRACTION).n_leaks == 0


def test_held_out_text_of_one_source_goes_from_another_and_frequent_text_stays(tmp_path: Path) -> None:
    notice = text_of(1, 20)
    held_out = on_side(True, 3)
    training = [f"{text}\n{notice}" for text in on_side(False, 30, 1000)]
    with_notice = next(text for n in range(999) if in_validation(text := f"{text_of(2000 + n)}\n{notice}", FRACTION))
    training = [text for text in training if not in_validation(text, FRACTION)]
    leaked = next(
        text for n in range(99) if not in_validation(text := f"{held_out[0]}\n{text_of(9000, 200)} {n}", FRACTION)
    )
    sources = {
        "one": write_lines(tmp_path / "one", [*held_out, with_notice]),
        "other": write_lines(tmp_path / "other", [*training, leaked]),
    }
    found = cleaned(tmp_path / "c", sources, Leaks())
    assert [document["text"] for document in left(found, "one")] == [*held_out, with_notice]
    assert [document["text"] for document in left(found, "other")] == [*training, leaked.split("\n")[1]]


PROSE = (
    "The committee met on Tuesday to discuss the bridge that crosses the river near the old mill. Several members said that "
    "repairs would have to begin before winter, and the engineer agreed with them. A budget was drawn up to be sent to the "
    "council, which will decide next month whether the work can start in spring or must wait for another season of floods."
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PROSE, ""),
        ("too short to be of use", "6 words"),
        (PROSE.replace(" ", "# "), "# per word"),
        (PROSE.replace(" ", "... "), "… per word"),
        ("\n".join(f"- {line}" for line in PROSE.split(". ")), "begin with a bullet point"),
        (" ".join(f"{number} 123456" if number % 2 else "the of words" for number in range(60)), "have a letter"),
        (text_of(5, 80).replace("ba", "qx"), "distinct stop words"),
        ("a b c d e f g h i j " * 10, "characters per word"),
        (f"{PROSE}\n{PROSE}\n{PROSE}\n", "of lines occurred before"),
        (f"{PROSE} and that is to be all of it, " + "buy this now " * 30, "the most frequent runs of 2 words"),
        (f"{PROSE} {PROSE}", "in repeated runs of 5 words"),
    ],
)
def test_each_heuristic_removes_what_it_is_for(text: str, reason: str) -> None:
    found = Heuristics(max_word_length=12).reason_of(text)
    assert reason in found
    assert bool(reason) == bool(found)


def test_languages_keep_the_named_ones(tmp_path: Path) -> None:
    german = (
        "Der Ausschuss traf sich am Dienstag, um über die Brücke zu sprechen, die den Fluss bei der alten Mühle quert."
    )
    french = "Le comité s'est réuni mardi pour discuter du pont qui traverse la rivière près du vieux moulin."
    texts = [PROSE, german, french, PROSE + " Again.", german + " Noch einmal."]
    source = write_lines(tmp_path / "t", texts)
    found = cleaned(tmp_path / "en", {"corpus": source}, Languages(languages=("en", "fr")))
    assert [document["line"] for document in left(found)] == [1, 3, 4]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_classifier_of_scored_texts_keeps_the_better_documents(tmp_path: Path, suffix: str) -> None:
    good, bad = ["proof", "theorem", "lemma", "measure", "bound"], ["cheap", "offer", "click", "winner", "casino"]

    def text(seed: int, special: list[str]) -> str:
        chance = random.Random(seed)
        return " ".join([*words(40, seed), *chance.choices(special, k=6)])

    scored = [(text(seed, good if seed % 2 else bad), float(seed % 2)) for seed in range(400)]
    scores = tmp_path / f"scores.{suffix}"
    if suffix == "csv":
        scores.write_text("quality,words\n" + "".join(f"{score},{text}\n" for text, score in scored))
    else:
        scores.write_text("".join(json.dumps({"words": text, "quality": score}) + "\n" for text, score in scored))
    texts = [text(seed, good if seed % 4 else bad) for seed in range(1000, 1200)]
    source = write_lines(tmp_path / "t", texts)
    for options in ({"min_score": 0.5}, {"keep": 0.75}):
        step = Quality(scores=scores, text="words", score="quality", **options)
        found = cleaned(tmp_path / str(options), {"corpus": source}, step)
        assert counts(found) == {("quality", "corpus"): (200, 150)}
        row = found.manifest["removed"]["corpus"][0]
        assert row["held_out_auc"] > 0.98
        assert row["scored_texts"] == 400
        assert [document["line"] for document in left(found)] == [line for line in range(1, 201) if (line - 1) % 4]
    scores.write_text(scores.read_text() + "\n" + scores.read_text().splitlines()[-1])
    with pytest.raises(CorpusError, match="steps"):
        cleaned(tmp_path / str(options), {"corpus": source}, step)


def test_a_step_that_removes_too_much_asks_and_continues_after_the_answer(tmp_path: Path) -> None:
    texts = [text_of(seed) for seed in range(20)] * 3
    source = {"corpus": write_lines(tmp_path / "t", texts)}
    steps = (LineDuplicates(), ExactDuplicates())
    with pytest.raises(RemovesTooMuchError, match="exact_duplicates.*66.7%.*corpus.*most_removed"):
        cleaned(tmp_path / "c", source, *steps)
    assert not (tmp_path / "c" / "cleaning.json").exists()
    first = (tmp_path / "c" / ".work" / "step1.json").stat().st_mtime_ns
    asked: list[str] = []

    def refuse(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(RemovesTooMuchError):
        cleaned(tmp_path / "c", source, *steps, confirm=refuse)
    assert len(asked) == 1
    assert (tmp_path / "c" / ".work" / "step1.json").stat().st_mtime_ns == first
    assert len(left(cleaned(tmp_path / "c", source, *steps, confirm=lambda question: True))) == 20
    assert len(left(cleaned(tmp_path / "d", source, *steps, most_removed=0.7))) == 20


def test_a_finished_folder_is_compared_and_never_overwritten(tmp_path: Path) -> None:
    source = {"corpus": write_lines(tmp_path / "t", [text_of(seed) for seed in range(20)])}
    found = cleaned(tmp_path / "c", source, ExactDuplicates())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    assert cleaned(tmp_path / "c", source, ExactDuplicates()) == found
    with pytest.raises(CorpusError, match="steps"):
        cleaned(tmp_path / "c", source, ExactDuplicates(scope="source"))
    with pytest.raises(CorpusError, match="validation_fraction"):
        clean(source, tmp_path / "c", [ExactDuplicates()], validation_fraction=0.3)
    write_lines(tmp_path / "t", [text_of(seed) for seed in range(21)])
    with pytest.raises(CorpusError, match=r"texts\.jsonl"):
        cleaned(tmp_path / "c", source, ExactDuplicates())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before
    with pytest.raises(CorpusError, match=r"texts\.jsonl"):
        cleaned(tmp_path / "t", source, ExactDuplicates())
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["texts.jsonl"]


def test_documents_of_every_kind_keep_their_places_and_sides(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for seed in range(40):
        (folder / f"{seed:02}.txt").write_text(text_of(seed % 30))
    (tmp_path / "alone.txt").write_text("\n".join(text_of(seed) for seed in range(30)))
    sources = {"files": Source(path=str(folder)), "alone": Source(path=str(tmp_path / "alone.txt"))}
    found = cleaned(tmp_path / "c", sources, ExactDuplicates(scope="source"))
    assert counts(found) == {("exact_duplicates", "alone"): (2, 2), ("exact_duplicates", "files"): (40, 30)}
    for document in left(found, "files"):
        assert document["split"] == ("validation" if in_validation(document["file"], FRACTION) else "train")
    assert [document["split"] for document in left(found, "alone")] == ["train", "validation"]
    corpus = write_corpus(tmp_path / "tokens", found.sources["files"], validation_fraction=FRACTION)
    assert corpus.n_tokens == sum(len(d["text"]) + 1 for d in left(found, "files") if d["split"] == "train")
    assert corpus.manifest["cleaned"] == found.manifest["removed"]["files"]
    assert write_corpus(tmp_path / "tokens", found.sources["files"], validation_fraction=FRACTION) == corpus


def test_parallel_shards_give_the_same_files_and_progress_only_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_shards, "SHARD_BYTES", 3000)
    texts = [text_of(seed % 150) for seed in range(200)]
    source = {"corpus": write_lines(tmp_path / "t", texts)}
    steps = (ExactDuplicates(), NearDuplicates(), LineDuplicates(), Leaks())
    progress: list[tuple[int, int]] = []
    one = cleaned(tmp_path / "one", source, *steps, on_progress=lambda done, total: progress.append((done, total)))
    with ThreadPoolExecutor(2) as pool:
        two = cleaned(tmp_path / "two", source, *steps, parallel_map=pool.map)
    assert left(one) == left(two)
    assert len(list((one.folder / "corpus").iterdir())) > 10
    assert one.manifest == two.manifest
    assert progress == sorted(progress)
    n_bytes = (tmp_path / "t" / "texts.jsonl").stat().st_size
    assert progress[-1] == (9 * n_bytes, 9 * n_bytes)


PROGRAM = """
import sys, time
from pathlib import Path
from proxy_models.data.cleaning import text_shards
from proxy_models.data.cleaning.clean import clean
from proxy_models.data.cleaning.exact_duplicates import ExactDuplicates
from proxy_models.data.cleaning.leaks import Leaks
from proxy_models.data.cleaning.near_duplicates import NearDuplicates
from proxy_models.data.sources import Source

text_shards.SHARD_BYTES = 3000
clean(
    {"corpus": Source(path=sys.argv[1], kind="jsonl")},
    Path(sys.argv[2]),
    [ExactDuplicates(), NearDuplicates(), Leaks()],
    validation_fraction=0.2,
    on_progress=lambda done, total: time.sleep(float(sys.argv[3])),
)
"""


@pytest.mark.parametrize(
    "until",
    quick_and_soak(
        (
            "read/corpus/00003.json",
            "step1/corpus/00003.json",
            "step2/corpus/00003.json",
            "step2.json learned/corpus/00003.npz",
            "step3/corpus/00003.json",
        ),
        "read/corpus/00003.json",
        "step2.json learned/corpus/00003.npz",
    ),
)
def test_a_killed_process_is_continued(tmp_path: Path, until: str) -> None:
    texts = [text_of(seed % 150) for seed in range(200)] + with_leaks()[0]
    source = write_lines(tmp_path / "t", texts)
    arguments = [sys.executable, "-c", PROGRAM, source.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    work = tmp_path / "c" / ".work"
    with subprocess.Popen([*arguments, str(tmp_path / "c"), "0.02"], env=environment) as process:
        deadline = time.monotonic() + 240
        while not all((work / path).exists() for path in until.split()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "c" / "cleaning.json").exists()
    subprocess.run([*arguments, str(tmp_path / "whole"), "0"], env=environment, check=True)
    found = clean(
        {"corpus": source},
        tmp_path / "c",
        [ExactDuplicates(), NearDuplicates(), Leaks()],
        validation_fraction=FRACTION,
    )
    whole = Cleaned.open(tmp_path / "whole")
    assert left(found) == left(whole)
    assert found.manifest["removed"] == whole.manifest["removed"]
    assert not work.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.csv", b"text,score\na,nan\n", "row 0.*finite"),
        ("s.jsonl", b'{"text": "a", "score": Infinity}\n', "line 1.*finite"),
        ("s.csv", "text,score\ncaf\xe9,1\n".encode("latin-1"), "UTF-8"),
    ],
)
def test_scores_that_no_classifier_can_learn_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=rf"{name}: .*{message}"):
        list(Quality(scores=tmp_path / name, keep=0.5)._scored())


@pytest.mark.parametrize("name", ["s.csv", "s.jsonl"])
def test_scores_may_begin_with_a_mark_and_have_long_texts(name: str, tmp_path: Path) -> None:
    text = "word " * 40_000
    rows = f"text,score\n{text},1\n" if name == "s.csv" else json.dumps({"text": text, "score": 1}) + "\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert list(Quality(scores=tmp_path / name, keep=0.5)._scored()) == [(text, 1.0)]


def test_cleaned_text_can_be_cleaned_again(tmp_path: Path) -> None:
    texts = [text_of(seed) for seed in range(30)]
    once = cleaned(tmp_path / "once", {"corpus": write_lines(tmp_path / "text", [*texts, *texts])}, ExactDuplicates())
    again = cleaned(tmp_path / "again", dict(once.sources), ExactDuplicates())
    assert counts(again)["exact_duplicates", "corpus"][1] == 30
    assert sorted(row["text"] for row in left(again)) == sorted(texts)
