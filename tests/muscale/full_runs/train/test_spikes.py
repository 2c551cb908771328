"""The handling of spikes is part of a run: of its plan, of its key, and of its row in the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from muscale import StageError, StudyConfig
from muscale.full_runs.promote.promotion import promote
from muscale.layout import FULL_RUNS, RESULT
from muscale.plans.gate import Gate
from muscale.plans.plan import Plan, register
from muscale.plans.planning import Planner
from muscale.settings.promote import SpikePolicy
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from muscale.store.spike_handling import Incident, SpikeHandling
from muscale.store.statements import find
from proxy_models.training.guard_settings import GuardSettings
from tests.muscale.planted import planted_fit, planted_horizon
from tests.muscale.planted_ladder import numerics_of

BATCH = 256
AT = "2026-01-01T00:00:00+00:00"
ROLLBACK = ('promote.on_spike="rollback"', f"promote.spike_margin_tokens={BATCH}")
WENT_BACK = Incident(step=9, reason="", action="rollback", left_out=(8 * BATCH, 11 * BATCH), back_to=6 * BATCH, at=AT)
RESTART = Incident(step=3, reason="killed", action="restart", back_to=0, at=AT)


Planned = Callable[..., tuple[Plan, StudyConfig]]


@pytest.fixture
def planned(make_study: Callable[..., Path], ledger: Ledger) -> Planned:
    """Registers the plan of a study under the settings given."""
    study, horizon, law = make_study(), planted_horizon(), planted_fit()

    def register_plan(*overrides: str) -> tuple[Plan, StudyConfig]:
        config = StudyConfig.read(study, overrides)
        return register(Planner(config, config.hyperparameters, horizon, law).plan(), ledger), config

    return register_plan


def ended(ledger: Ledger, plan: Plan, config: StudyConfig, *incidents: Incident) -> dict[str, Any]:
    """Promote a run whose workers have left their result; its row in the ledger."""
    goodput = {"wall": 1.0, "steps": 1.0, "evaluation": 0.0, "blocked": 0.0, "repeated": 0.0}
    result = {"loss": 2.5, "source_losses": {}, "seconds": 1.0, "environment": {"world_size": 2}, "goodput": goodput}
    directory = ledger.directory / FULL_RUNS / plan.key
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RESULT).write_text(json.dumps(result | {"incidents": [asdict(one) for one in incidents]}))
    found = promote(plan, config, ledger, numerics_of(config), verdict="pass", gate=Gate(plan=plan.key, lines=()))
    assert found.incidents == incidents
    (run,) = ledger.read(find, "runs", {"label": f"plan {plan.key}"}, ["-created_at"], limit=1)
    (row,) = ledger.read(find, "segments", {"key": run["key"]}, [])
    return row


def test_a_plan_s_key_contains_its_spike_handling_only_where_it_has_one(planned: Planned) -> None:
    def key(*overrides: str) -> str:
        return planned(*overrides)[0].key

    assert key() == key("promote.spike_threshold=5.0") == key("promote.max_interventions=9")
    keys = [key(), key('promote.on_spike="skip"'), key(*ROLLBACK), key(*ROLLBACK, "promote.spike_threshold=5.0")]
    keys += [key(*ROLLBACK, f"promote.rewarm_tokens={BATCH}")]
    assert len(set(keys)) == len(keys)
    assert key(*ROLLBACK, "promote.max_interventions=9") == key(*ROLLBACK), (
        "a larger limit continues where a smaller one had ended"
    )


def test_the_ledger_knows_a_run_by_what_it_left_out_and_where_it_went_back_to(planned: Planned, ledger: Ledger) -> None:
    plan, config = planned(*ROLLBACK)
    guarded = plan.chain(replace(numerics_of(config), guard=config.promote.guard))
    undisturbed = replace(guarded, spike_handling=SpikeHandling.of(config.promote.spike_policy, [RESTART]))
    row = ended(ledger, plan, config, RESTART, WENT_BACK)
    assert row["segment"]["spike_handling"]["action"] == "rollback"
    assert row["key"] not in (undisturbed.key, guarded.key)
    disturbed = replace(guarded, spike_handling=SpikeHandling.of(config.promote.spike_policy, [WENT_BACK, RESTART]))
    assert row["key"] == disturbed.key
    elsewhere = replace(WENT_BACK, back_to=3 * BATCH)
    assert (
        replace(guarded, spike_handling=SpikeHandling.of(config.promote.spike_policy, [elsewhere])).key != disturbed.key
    )


def test_without_a_policy_a_run_has_the_key_that_it_always_had(planned: Planned, ledger: Ledger) -> None:
    plan, config = planned()
    row = ended(ledger, plan, config, RESTART)
    assert row["key"] == plan.chain(numerics_of(config)).key
    assert "spike_handling" not in row["segment"]


def test_an_intervention_belongs_to_the_segment_in_which_its_effect_begins(planned: Planned) -> None:
    plan, config = planned(*ROLLBACK)
    whole = plan.chain(replace(numerics_of(config), guard=GuardSettings()))
    border = whole.last.start
    assert border > 12 * BATCH
    policy = SpikePolicy(action="rollback")

    def after(*incidents: Incident) -> Chain:
        return replace(whole, spike_handling=SpikeHandling(policy=policy, interventions=incidents))

    late = replace(WENT_BACK, left_out=(border + BATCH, border + 2 * BATCH), back_to=border)
    into_the_stem = replace(late, back_to=border - BATCH)
    assert after(late).stem == after().stem
    assert after(into_the_stem).stem != after().stem
    assert after(late).key != after().key


def test_a_run_resumes_as_it_was_planned(planned: Planned, ledger: Ledger) -> None:
    plan, config = planned(*ROLLBACK)
    ended(ledger, plan, config)
    ended(ledger, plan, planned(*ROLLBACK, "promote.max_interventions=9")[1])
    _, other = planned('promote.on_spike="skip"')
    with pytest.raises(StageError, match=r"promote.on_spike must.*'rollback', got 'skip'"):
        ended(ledger, plan, other)
    _, lower = planned(*ROLLBACK, "promote.spike_threshold=5.0")
    with pytest.raises(StageError, match=r"promote.spike_threshold must be.*10.0, got 5.0:"):
        ended(ledger, plan, lower)
