"""`muscale data clean` asks in a terminal before a step removes much, continues after a yes, and is an error otherwise."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale.layout import CLEANED
from proxy_models.data.sources import CLEANING
from tests.muscale.command_lines import muscale

MakeStudy = Callable[..., Path]
COPIES = 3


def with_copies(path: Path) -> list[str]:
    """Give the study three copies of every file; return the names of all files."""
    folder = path.parent / "text"
    for file in sorted(folder.iterdir()):
        for number in range(1, COPIES):
            (folder / f"{number} {file.name}").write_bytes(file.read_bytes())
    path.write_text(path.read_text() + '\n[corpus.clean]\nexact_duplicates = "global"\n')
    return sorted(file.name for file in folder.iterdir())


def in_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of the command in a terminal in which its question is answered."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "muscale", *arguments], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        received, answered = b"", False
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            received += part
            if b"[y/N]" in received and not answered:
                os.write(ours, f"{answer}\n".encode())
                answered = True
        code = process.wait(60)
    os.close(ours)
    assert answered
    return code, received.decode()


def test_a_step_that_removes_much_asks_in_a_terminal(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_study()
    names = with_copies(path)
    assert muscale(capsys, "data", "clean", path).code == 2
    for answer in ("n", ""):
        code, shown = in_terminal(answer, "data", "clean", str(path))
        assert code == 2
        assert "corpus.clean" in shown
        assert not list((path.parent / CLEANED).glob(f"*/{CLEANING}"))
    code, _ = in_terminal("y", "data", "clean", str(path))
    assert code == 0
    (manifest,) = (path.parent / CLEANED).glob(f"*/{CLEANING}")
    lines = [line for file in manifest.parent.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == len(names) / COPIES
    assert sorted(file.name for file in (path.parent / "text").iterdir()) == names
    assert muscale(capsys, "data", "clean", path).code == 0


def test_a_failed_check_names_no_command_that_the_kind_of_corpus_refuses(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    texts = [file.read_text() for file in sorted((path.parent / "text").iterdir())]
    rows = [{"prompt": str(number), "completion": text} for number in range(4) for text in texts]
    (path.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = path.read_text()
    fields = 'kind = "jsonl"\nprompt_field = "prompt"\nfield = "completion"'
    prompts = path.with_name("prompts.toml")
    prompts.write_text(
        text.replace('source = "text"', f'source = "rows.jsonl"\n{fields}').replace('"micro"', '"prompts"')
    )
    with_copies(path)
    path.write_text(text)
    for file, follows in ((path, True), (prompts, False)):
        done = muscale(capsys, "data", "check", file)
        assert done.code == 1
        assert ("corpus.clean.leaks=true" in done.out + done.err) is follows
