"""A study with a registered plan, for readers that want one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muscale import Plan, StudyConfig
    from muscale.store.ledger import Ledger


def planned_study(folder: Path) -> tuple[Path, StudyConfig, Ledger, Plan]:
    """Its directory, beside a target's folder so that it does not count as left behind, its settings, ledger and plan."""
    from muscale import StudyConfig
    from muscale.store.ledger import Ledger
    from tests.muscale.conftest import MICRO
    from tests.muscale.planted_ladder import registered_plan

    study = folder.with_name(f"{folder.name}-study")
    study.mkdir()
    path = study / "study.toml"
    path.write_text(MICRO)
    ledger = Ledger(study / "ledger.sqlite")
    return study, StudyConfig.read(path), ledger, registered_plan(path, ledger)
