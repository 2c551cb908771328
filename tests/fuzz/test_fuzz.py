"""Files made wrong end in a sentence: no stack trace, no hang, nothing left behind. `tests/fuzz/fuzz.py` goes on for hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.fuzz import finding, fuzz
from tests.fuzz.targets import TARGETS

MANY = 5_000


def findings(name: str, folder: Path, *, readings: int, seed: int) -> list[str]:
    place = folder / "given"
    place.mkdir()
    target, found = TARGETS[name](place), list[str]()
    for valid in target.seeds:
        assert finding(target, valid) is None
        assert target(valid) == "", "a valid file is read"
    fuzz(
        target,
        seed,
        lambda data, _kind, stack: found.append(f"{data[:2000]!r}\n{stack}"),
        until=lambda n: n >= readings,
    )
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_made_wrong_is_read_or_refused_in_words(name: str, tmp_path: Path) -> None:
    assert findings(name, tmp_path, readings=TARGETS[name].few, seed=1) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_thousands_of_files_made_wrong_are_read_or_refused_in_words(name: str, tmp_path: Path) -> None:
    assert findings(name, tmp_path, readings=MANY, seed=2) == []
