"""Public names: a study's members as one sorted list, what a notebook needs, and one meaning for each name of the product."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import muscale
import muscale.search
import proxy_models
from muscale import Study

ROOT = Path(__file__).parents[2]
PACKAGES = ("platform/muscale", "proxy_models", "scaling", "search_spaces")
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
NAMED_AFTER_COMMANDS_AND_TABLES = ("cli", "settings")
"""Rooms whose modules have the name of a command, or of a table in the study file."""
ONE_FOR_EACH_PACKAGE = {"__init__", "errors", "serialization"}

MEMBERS = [
    "amend",
    "anneal_now",
    "bundle",
    "cancel_trial",
    "check",
    "check_data",
    "clean_data",
    "compare",
    "config",
    "contents",
    "continue_run",
    "corpus",
    "directory",
    "dry_run",
    "evaluate",
    "fit",
    "gallery",
    "ladder",
    "ledger",
    "next_runs",
    "open",
    "plan",
    "plan_amendment",
    "plan_continuation",
    "prepare",
    "promote",
    "register",
    "report",
    "run",
    "runs",
    "smoke_test",
    "sweep",
    "transfer",
    "use_case",
    "watch",
]


def test_a_study_s_public_members_are_these(make_study: Callable[[], Path]) -> None:
    study = Study.open(make_study(), quiet=True)
    assert [name for name in dir(study) if not name.startswith("_")] == MEMBERS
    study.ledger.close()


def test_the_package_s_names_are_sorted_and_there() -> None:
    assert muscale.__all__ == sorted(muscale.__all__)
    assert all(hasattr(muscale, name) for name in muscale.__all__)


@pytest.mark.parametrize("package", [muscale, muscale.search, proxy_models])
def test_a_package_lists_its_names_before_they_are_imported(package: ModuleType) -> None:
    fresh = f"import {package.__name__} as package; print(*dir(package))"
    listed = subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True, check=True).stdout.split()
    assert set(package.__all__) <= set(listed)
    assert len(listed) == len(set(listed))


def repeated(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_no_two_public_classes_have_the_same_name() -> None:
    nodes = [node for path in SOURCES for node in ast.parse(path.read_text()).body]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert repeated(names) == []


def test_no_two_modules_have_the_same_name() -> None:
    free = [path.stem for path in SOURCES if path.parent.name not in NAMED_AFTER_COMMANDS_AND_TABLES]
    assert repeated([name for name in free if name not in ONE_FOR_EACH_PACKAGE]) == []
