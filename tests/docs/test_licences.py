"""Every locked package states a licence that an Apache-2.0 project may use."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
WEAK = {"certifi", "chardet", "hypothesis", "pathspec", "psycopg", "psycopg-binary", "tqdm"}
"""Under the MPL or LGPL, whose terms hold for their own files; they are imported as they are."""


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "docs" / "licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_locked_package_states_its_licence_and_copyleft_ones_are_known(licences: ModuleType) -> None:
    names = licences.locked((ROOT / "requirements.lock").read_text())
    found = {name: licence for name in names if (licence := licences.licence(name)) != "not installed"}
    assert len(found) > len(names) / 2
    assert "not stated" not in found.values()
    copyleft = {name for name, licence in found.items() if licences.COPYLEFT.search(licence)}
    assert copyleft == WEAK & set(found)
