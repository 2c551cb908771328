"""The public members of a study, one sorted list: what a notebook needs. All else is a function of its room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import muscale
from muscale import Study

MEMBERS = [
    "bundle",
    "cancel_trial",
    "check",
    "compare",
    "config",
    "contents",
    "continue_run",
    "corpus",
    "directory",
    "dry_run",
    "fit",
    "ladder",
    "ledger",
    "next_runs",
    "open",
    "plan",
    "prepare",
    "promote",
    "register",
    "report",
    "run",
    "runs",
    "smoke_test",
    "sweep",
    "transfer",
    "watch",
]


def test_a_study_s_public_members_are_these(make_study: Callable[[], Path]) -> None:
    study = Study.open(make_study(), quiet=True)
    assert [name for name in dir(study) if not name.startswith("_")] == MEMBERS
    study.ledger.close()


def test_the_package_s_names_are_sorted_and_there() -> None:
    assert muscale.__all__ == sorted(muscale.__all__)
    assert all(hasattr(muscale, name) for name in muscale.__all__)
