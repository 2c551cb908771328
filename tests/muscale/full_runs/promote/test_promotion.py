"""The promotion of a finished full run is found from a later plan of the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyConfig
from muscale.full_runs.promote.promotion import begin, promote, promotion_of_same_run
from muscale.layout import FULL_RUNS, LEDGER, RESULT
from muscale.plans.gate import Gate
from muscale.store.ledger import Ledger
from proxy_models.training.numerics import Numerics
from tests.muscale.planted_ladder import registered_plan

OUTCOME: dict[str, Any] = {
    "loss": 2.5,
    "source_losses": {},
    "seconds": 9.0,
    "environment": {"world_size": 2},
    "goodput": {"wall": 10.0, "steps": 9.0, "evaluation": 0.5, "blocked": 0.0, "repeated": 0.0},
    "incidents": [],
}
SKIPPED = {"step": 3, "reason": "spike", "action": "skip", "left_out": [768, 1024], "at": "2026-01-01T00:00:00+00:00"}


@pytest.mark.parametrize("incidents", [[], [SKIPPED]])
@pytest.mark.parametrize("on_spike", ["stop", "skip"])
def test_a_later_fit_s_plan_of_a_finished_run_is_not_a_new_run(
    make_study: Callable[..., Path], on_spike: str, incidents: list[dict[str, Any]]
) -> None:
    path = make_study()
    setting = f'promote.on_spike="{on_spike}"'
    config, ledger = StudyConfig.read(path, (setting,)), Ledger(path.parent / LEDGER)
    plan = registered_plan(path, ledger, setting)
    directory = ledger.directory / FULL_RUNS / plan.key
    directory.mkdir(parents=True)
    (directory / RESULT).write_text(json.dumps(OUTCOME | {"incidents": incidents}))
    numerics = Numerics(model=config.model, base=config.model, corpus_key="", seed=0, evaluation_tokens=2048)
    gate = Gate(plan=plan.key, lines=())
    begin(plan, config, ledger, verdict="pass", gate=gate)
    trained = promote(plan, config, ledger, numerics, verdict="pass", gate=gate)

    later = replace(plan, key="of-a-later-fit")
    assert promotion_of_same_run(later, config, ledger, numerics) == trained
    assert promotion_of_same_run(plan, config, ledger, numerics) is None, "another plan's run is asked for"
    assert promotion_of_same_run(replace(later, seed=1), config, ledger, numerics) is None
    other = StudyConfig.read(path, ('promote.on_spike="rollback"',))
    assert promotion_of_same_run(later, other, ledger, numerics) is None
