"""docs/study_file.md lists every key of a study file, as the settings' classes define it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study_file", DOCS / "study_file.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_settings(script: ModuleType) -> None:
    """`python docs/study_file.py` renews it."""
    assert (DOCS / "study_file.md").read_text() == script.page()


def test_every_key_has_a_meaning(script: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", script.page(), re.MULTILINE)
    assert len(rows) > 200
    assert [name for name, meaning in rows if not meaning.strip()] == []
