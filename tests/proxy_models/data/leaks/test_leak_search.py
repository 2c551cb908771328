"""Held-out text is found wherever it stands in the training text, edited or not; other text is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from proxy_models.data.documents import in_validation
from proxy_models.data.leaks import leak_search
from proxy_models.data.leaks.leak_report import LeakReport
from proxy_models.data.leaks.leak_search import find_leaks
from proxy_models.data.sources import Source

FRACTION = 0.3
SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]


def words(n: int, seed: int) -> list[str]:
    """Words of no language, of which sequences do not repeat by chance."""
    draw = random.Random(seed)
    return ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(n)]


def names(split: str) -> Iterator[str]:
    """Names of files that lie on this side."""
    return (
        name for number in range(10**6) if in_validation(name := f"{number}.txt", FRACTION) == (split == "validation")
    )


def written(folder: Path, held_out: Sequence[str], training: Sequence[str]) -> tuple[Source, list[str], list[str]]:
    """A folder of text files, each on the wanted side, and their names."""
    folder.mkdir(exist_ok=True)
    sides = [
        [(name, text) for name, text in zip(names(split), texts, strict=False)]
        for split, texts in (("validation", held_out), ("train", training))
    ]
    for name, text in sides[0] + sides[1]:
        (folder / name).write_text(text)
    return Source(path=str(folder)), [name for name, _ in sides[0]], [name for name, _ in sides[1]]


def leaks(source: Source, other: Source | None = None, fraction: float = FRACTION) -> LeakReport:
    return find_leaks({"training": other or source}, {"own": source}, validation_fraction=fraction)


def as_they_are(text: list[str], _draw: random.Random) -> str:
    return " ".join(text)


def lightly_edited(text: list[str], draw: random.Random) -> str:
    """One word of twenty left out, replaced or added."""
    kept: list[str] = []
    for word in text:
        edit = draw.random()
        kept += [] if edit < 1 / 60 else ["edited"] if edit < 2 / 60 else [word, "edited"] if edit < 3 / 60 else [word]
    return " ".join(kept)


def reformatted(text: list[str], draw: random.Random) -> str:
    shown = [word.upper() if draw.random() < 0.3 else f"“{word}”," if draw.random() < 0.1 else word for word in text]
    return "<p>" + "".join(word + draw.choice((" ", "\n", "\n\n", "\u00a0", " — ")) for word in shown) + "</p>"


LENGTHS = (5, 8, 13, 20, 50, 500)
# An edit of fewer than 8 words may leave nothing to recognize.
CASES = [
    *(pytest.param(as_they_are, 1.0, size, id=f"verbatim-{size}") for size in LENGTHS),
    *(pytest.param(reformatted, 0.95, size, id=f"reformatted-{size}") for size in LENGTHS),
    *(pytest.param(lightly_edited, 0.8, size, id=f"edited-{size}") for size in LENGTHS if size >= 8),
]


@pytest.mark.parametrize(("change", "least", "size"), CASES)
def test_a_leaked_document_of_any_length_is_found(
    change: Callable[[list[str], random.Random], str], least: float, size: int, tmp_path: Path
) -> None:
    draw = random.Random(size)
    items = [words(size, seed) for seed in range(40)]
    hosts = [words(300, 1000 + number) for number in range(40)]
    held_out = [" ".join(item) for item in items] + [" ".join(words(200, 5000 + number)) for number in range(40)]
    training = []
    for item, host in zip(items, hosts, strict=True):
        at = draw.randrange(300)
        training.append(" ".join(host[:at]) + "\n" + change(item, draw) + "\n" + " ".join(host[at:]))
    source, held_out_names, _ = written(tmp_path / "texts", held_out, training)
    found = {leak.held_out_file for leak in leaks(source).leaks}
    assert len(found & set(held_out_names[:40])) >= least * 40
    assert not found & set(held_out_names[40:])


def test_a_leak_has_the_files_lines_and_share_of_both_texts(tmp_path: Path) -> None:
    leaked = words(100, 0)
    held_out = "\n".join([*words(3, 1), " ".join(leaked), *words(97, 2)])
    training = "\n".join([*words(40, 3), " ".join(leaked[:50]), " ".join(leaked[50:]), *words(40, 4)])
    source, (own,), (other,) = written(tmp_path / "texts", [held_out], [training])
    (leak,) = leaks(source).leaks
    assert (leak.file, leak.line, leak.held_out_file, leak.held_out_line) == (other, 41, own, 4)
    assert (leak.n_units, leak.unit, leak.share) == (100, "words", 0.5)
    assert leak.text.startswith(" ".join(leaked[:5]))


def test_records_are_named_by_their_line(tmp_path: Path) -> None:
    texts = [" ".join(words(60, seed)) for seed in range(200)]
    held_out = next(text for text in texts if in_validation(text, FRACTION))
    around = (f"{word} {held_out} after it" for word in SYLLABLES)
    texts.insert(150, next(text for text in around if not in_validation(text, FRACTION)))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (leak,) = leaks(Source(path=str(tmp_path), kind="jsonl")).leaks
    assert (leak.file, leak.line, leak.held_out_line, leak.share) == ("a.jsonl", 151, texts.index(held_out) + 1, 1.0)


def test_counts_are_those_of_the_planted_words(tmp_path: Path) -> None:
    whole, part, clean = words(100, 0), words(400, 1), words(500, 2)
    source, _, _ = written(
        tmp_path / "texts",
        [" ".join(whole), " ".join(part), " ".join(clean), "too short"],
        [" ".join(words(50, 3) + whole), " ".join(part[:100] + words(50, 4))],
    )
    (counts,) = (report := leaks(source)).held_out.values()
    assert (counts.documents, counts.leaked_documents, counts.skipped) == (3, 1, 1)
    assert (counts.n_units, counts.leaked_units, counts.repeated_units) == (1000, 100, 200)
    assert counts.by_source == {"training": 200}
    assert (report.share, report.repeated_share, report.n_leaks) == (0.1, 0.2, 2)


def test_boilerplate_does_not_count_but_a_whole_document_that_is_often_copied_does(tmp_path: Path) -> None:
    licence, copied = words(60, 0), " ".join(words(120, 1))
    held_out = [" ".join(licence + words(300, 10 + number)) for number in range(6)] + [copied]
    training = [" ".join(licence + words(300, 100 + number)) for number in range(30)] + [copied] * 30
    source, own, _ = written(tmp_path / "texts", held_out, training)
    (counts,) = (report := leaks(source)).held_out.values()
    assert counts.leaked_documents == 1
    assert counts.repeated_units == 120
    assert {leak.held_out_file for leak in report.leaks} == {own[-1]}


def test_a_passage_counts_in_each_held_out_copy(tmp_path: Path) -> None:
    shared = words(80, 0)
    held_out = [" ".join(words(20, 1) + shared), " ".join(words(20, 2) + shared)]
    source, _, _ = written(tmp_path / "texts", held_out, [" ".join(words(30, 3) + shared)])
    (counts,) = leaks(source).held_out.values()
    assert counts.repeated_units == 160


def test_text_without_words_is_compared_by_bytes(tmp_path: Path) -> None:
    def dna(n: int, seed: int) -> str:
        return "".join(random.Random(seed).choices("ACGT", k=n))

    own = dna(3000, 0)
    folded = "\n".join(own[start : start + 60] for start in range(7, 2007, 60))
    source, _, _ = written(tmp_path / "texts", [own, dna(3000, 1)], [dna(500, 2) + folded + dna(500, 3)])
    report = leaks(source)
    (leak,) = report.leaks
    assert (leak.unit, leak.n_units) == ("bytes", 2041)  # 34 lines of 60, and a letter that agrees by chance
    assert report.repeated_share == 2041 / 6000


def test_scripts_without_spaces_are_compared_by_characters(tmp_path: Path) -> None:
    def han(n: int, seed: int) -> str:
        draw = random.Random(seed)
        return "".join(chr(draw.randrange(0x4E00, 0x9FA0)) for _ in range(n))

    own = han(60, 0)
    source, _, _ = written(tmp_path / "texts", [own, han(60, 1)], [han(100, 2) + own[:30] + "，\n" + own[30:]])
    (leak,) = leaks(source).leaks
    assert (leak.unit, leak.n_units, leak.share) == ("words", 60, 1.0)


def test_tokens_are_compared_by_ids_and_named_by_their_number(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 30_000, 10_000).astype(np.uint16)
    ids[2000:2300] = ids[9500:9800]  # the last tenth is held out
    ids.tofile(tmp_path / "a.bin")
    source = Source(path=str(tmp_path), kind="tokens", dtype="uint16", vocab_size=30_000)
    report = leaks(source, fraction=0.1)
    (leak,) = report.leaks
    assert (leak.unit, leak.n_units, leak.line, leak.held_out_line) == ("tokens", 300, 2000, 9500)
    assert report.repeated_share == pytest.approx(0.3)


def test_the_training_text_of_another_source_is_searched(tmp_path: Path) -> None:
    own, _, _ = written(tmp_path / "own", [" ".join(words(100, 0))], [" ".join(words(100, 1))])
    other, _, _ = written(tmp_path / "other", [], [" ".join(words(100, 0)), "another file"])
    assert leaks(own).share == 0
    assert leaks(own, other).share == 1


def test_progress_ends_at_all_bytes_of_both_passes(tmp_path: Path) -> None:
    source, _, _ = written(tmp_path / "texts", [" ".join(words(100, 0))], [" ".join(words(100, 1))])
    seen: list[tuple[int, int]] = []
    find_leaks({"a": source}, {"a": source}, validation_fraction=FRACTION, on_progress=lambda *now: seen.append(now))
    total = 2 * sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_of_much_held_out_text_a_stated_share_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    path = tmp_path / "records.jsonl"
    texts = [" ".join(words(20, number)) for number in range(1000)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    held_out = [text for text in texts if in_validation(text, FRACTION)]
    monkeypatch.setattr(leak_search, "MOST_HELD_OUT", share * FRACTION * path.stat().st_size)
    found = leaks(Source(path=str(path), kind="jsonl"))
    assert found.indexed == pytest.approx(share)
    assert sum(of.documents for of in found.held_out.values()) == pytest.approx(share * len(held_out), rel=0.25)
