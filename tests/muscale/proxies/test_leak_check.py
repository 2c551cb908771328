"""A study compares its held-out text with its training text once, and its gate closes if the training text holds too much of it."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import Study
from muscale.findings import Findings
from muscale.pages.contents import gather
from muscale.pages.report import sections_of
from muscale.plans.gate import leak_line
from muscale.proxies.leak_check import LeakCheck, known_leaks
from proxy_models.data.documents import in_validation
from proxy_models.files import LOCK
from tests.muscale.command_lines import muscale

MakeStudy = Callable[..., Path]


def sentence(draw: random.Random) -> str:
    return " ".join("".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(12)) + ".\n"


def with_leak(path: Path, *, leaked: bool) -> tuple[str, str]:
    """Give the study a folder of 40 files, in one of which a held-out file also stands; return the names of both."""
    draw = random.Random(0)
    folder = path.parent / "files"
    folder.mkdir()
    texts = {f"{number}.txt": "".join(sentence(draw) for _ in range(60)) for number in range(40)}
    held_out = next(name for name in texts if in_validation(name, 0.1))
    training = next(name for name in texts if not in_validation(name, 0.1))
    if leaked:
        texts[training] = texts[training] + texts[held_out]
    for name, text in texts.items():
        (folder / name).write_text(text)
    path.write_text(path.read_text().replace('source = "text"', 'source = "files"'))
    assert 'source = "files"' in path.read_text()
    return held_out, training


@pytest.mark.parametrize("leaked", [True, False])
def test_the_gate_closes_on_a_held_out_file_in_the_training_text_and_names_both(
    leaked: bool, make_study: MakeStudy
) -> None:
    path = make_study()
    held_out, training = with_leak(path, leaked=leaked)
    study = Study.open(path, quiet=True)
    found = study.check_data()
    assert found.passed is not leaked
    line = leak_line(found)
    assert (line.status == "failed") is leaked
    if leaked:
        (leak,) = found.report.leaks
        assert (leak.file, leak.line, leak.held_out_file, leak.held_out_line, leak.share) == (
            training,
            61,
            held_out,
            1,
            1.0,
        )
        assert f"{training}:61" in line.compared
        assert f"{held_out}:1" in line.compared
    assert known_leaks(study.config, study.ledger, study.corpus) == found
    raised = Study.open(path, ["corpus.most_leaked=1"], quiet=True)
    assert raised.check_data().passed


def test_the_check_is_made_once_for_a_corpus(make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_study()
    first = Study.open(path, quiet=True).check_data()
    monkeypatch.setattr("muscale.proxies.leak_check.find_leaks", None)
    assert Study.open(path, quiet=True).check_data() == first
    assert Study.open(path, ["model.n_layers=3", "plan.compute_flops=1e12"], quiet=True).config.model.n_layers == 3, (
        "nothing was trained yet"
    )


def test_a_corpus_that_was_not_compared_does_not_block() -> None:
    assert leak_line(None).status == "unknown"


def test_cleaning_opens_the_gate_that_a_copied_file_closes(make_study: MakeStudy) -> None:
    path = make_study()
    held_out, _ = with_leak(path, leaked=False)
    copy = next(f"copy {n}.txt" for n in range(1000) if not in_validation(f"copy {n}.txt", 0.1))
    folder = path.parent / "files"
    (folder / copy).write_text((folder / held_out).read_text())
    assert not Study.open(path, quiet=True).check_data().passed
    cleaned = make_study("cleaned")
    folder.rename(cleaned.parent / "files")
    cleaned.write_text(path.read_text() + '\n[corpus.clean]\nexact_duplicates = "global"\n')
    study = Study.open(cleaned, quiet=True)
    assert study.check_data().passed
    (steps,) = (files.manifest["cleaned"] for files in study.corpus.sources.values())
    assert [(step["step"], [one["file"] for one in step["examples"]]) for step in steps] == [
        ("exact_duplicates", [copy])
    ]
    sections = {section.title: section for section in sections_of(gather(study.contents, Findings()))}
    assert copy in str(sections["Examples of what was removed"].table)
    assert "Held-out text in the training text" in sections


def test_a_report_of_cleaning_that_removed_nothing_has_no_examples(make_study: MakeStudy) -> None:
    path = make_study()
    with_leak(path, leaked=False)
    path.write_text(path.read_text() + '\n[corpus.clean]\nexact_duplicates = "global"\n')
    study = Study.open(path, quiet=True)
    assert len(study.corpus.sources) == 1
    titles = [section.title for section in sections_of(gather(study.contents, Findings()))]
    assert "Cleaning" in titles
    assert "Examples of what was removed" not in titles


@pytest.mark.parametrize("copied", [True, False], ids=["a copy", "a passage"])
def test_the_commands_that_a_check_names_open_a_gate_that_leaks_closed(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str], copied: bool
) -> None:
    path = make_study()
    held_out, training = with_leak(path, leaked=not copied)
    if copied:
        shutil.copy(path.parent / "files" / held_out, path.parent / "files" / training)
    command, done = ["data", "check", str(path)], []
    for _ in range(3):
        shown = muscale(capsys, *command)
        done.append((command[:2], shown.code))
        command = shlex.split(shown.err.rpartition("next: muscale")[2])
    assert done == [(["data", "check"], 1), (["data", "clean"], 0), (["data", "check"], 0)]
    assert command[0] == "run"


def test_removing_leaks_opens_the_gate_and_leaves_the_rest_of_the_document(make_study: MakeStudy) -> None:
    path = make_study()
    held_out, training = with_leak(path, leaked=True)
    folder, draw = path.parent / "files", random.Random(1)
    rest = "".join(sentence(draw) for _ in range(10))
    (folder / training).write_text((folder / training).read_text() + rest)
    own = (folder / training).read_text().replace((folder / held_out).read_text(), "")
    closed = Study.open(path, quiet=True)
    assert closed.check_data().report.share > 0.02
    assert leak_line(closed.check_data()).status == "failed"
    cleaned = make_study("cleaned")
    folder.rename(cleaned.parent / "files")
    cleaned.write_text(path.read_text() + "\n[corpus.clean]\nleaks = true\n")
    study = Study.open(cleaned, quiet=True)
    found = study.check_data()
    assert (found.report.share, found.report.n_leaks) == (0, 0)
    assert leak_line(found).status == "passed"
    (steps,) = (files.manifest["cleaned"] for files in study.corpus.sources.values())
    (step,) = steps
    assert (step["step"], step["documents"], step["documents_left"]) == ("leaks", 40, 40)
    assert step["bytes"] - step["bytes_left"] == len((cleaned.parent / "files" / held_out).read_bytes())
    assert [(one["file"], one["kept"]) for one in step["examples"]] == [(training, f"corpus, {held_out}:1")]
    lines = [line for file in study.clean_data().folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert own in [json.loads(line)["text"] for line in lines]


def test_near_duplicates_within_the_training_text_are_counted_once_and_shown(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_study()
    with_leak(path, leaked=False)
    folder = path.parent / "files"
    training = sorted(one for one in folder.iterdir() if not in_validation(one.name, 0.1))
    copies = [name for n in range(99) if not in_validation(name := f"copy {n}.txt", 0.1)][:3]
    for original, copy in zip(training, copies, strict=False):
        (folder / copy).write_text(original.read_text().replace("\n", "\nand\n", 3))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "rensa", None)
        found = Study.open(path, quiet=True).check_data()
        assert (found.passed, found.near_duplicates) == (True, None)
    study = Study.open(path, quiet=True)
    found = study.check_data()
    assert found.near_duplicates is not None
    counted = found.near_duplicates["corpus"]
    assert (counted.documents, counted.duplicates, counted.compared) == (len(training) + 3, 3, 1)
    assert counted.share == pytest.approx(3 / counted.documents, rel=0.02)
    assert LeakCheck.from_dict(found.to_dict()) == found
    monkeypatch.setattr("muscale.proxies.leak_check.near_duplicate_shares", None)
    assert Study.open(path, quiet=True).check_data() == found
    sections = {section.title: section for section in sections_of(gather(study.contents, Findings()))}
    assert found.repeated in str(sections["Held-out text in the training text"].result)


def test_a_step_without_its_library_stops_before_anything_is_written(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    path.write_text(path.read_text() + '\n[corpus.clean]\nnear_duplicates = "global"\n')
    monkeypatch.setitem(sys.modules, "rensa", None)
    done = muscale(capsys, "data", "clean", path)
    assert done.code == 2
    assert "rensa" in done.err
    assert "muscale[data]" in done.err
    assert [one.name for one in (path.parent / "cleaned").rglob("*") if one.name != LOCK and one.is_file()] == []
