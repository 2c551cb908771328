"""The command that the gate prints settles the verdict that the gate reads."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from muscale import StageError, Study
from muscale.findings import Findings
from muscale.proxies import transfer
from muscale.search.sweep_result import SweepResult
from muscale.store.ledger_tables import segments
from scaling import AxisLaw, Verdict
from tests.muscale.planted import planted_fit
from tests.muscale.planted_ladder import registered_plan
from tests.muscale.search.conftest import MicroPlanted, planted_result

MakeStudy = Callable[..., Path]
SET = "promote.keep_last=3"


def swept(path: Path, *settings: str) -> SweepResult:
    study = Study.open(path, settings, quiet=True)
    return planted_result(study.ledger, study.config, "planted", losses=MicroPlanted())


def opened(path: Path, sweep: SweepResult, *settings: str) -> Study:
    study = Study.open(path, settings, quiet=True)
    study._stages.known = Findings(sweep=sweep)
    return study


def finished(study: Study, sweep: SweepResult, *, above: float = 3, drift: float = 0) -> Verdict:
    """The verdict of grids whose best rate is three octaves above the sweep's, so that it lies beyond the first grid.

    Args:
        drift: Octaves by which the best rate moves with each doubling of the experts from 4.
    """
    centre = np.log2(sweep.best.learning_rate) + above
    noises = np.random.default_rng(0)
    for member in transfer.members(study.config, study._numerics, sweep.best):
        off = np.log2(member.value) - centre - drift * (member.along == "experts") * np.log2(member.size / 4)
        off += 0.3 * np.log2(member.n_tokens / study.config.transfer.n_tokens) * (drift != 0)
        loss = 3 + 0.02 * off**2 - 0.1 * np.log2(member.size) + 1e-4 * noises.standard_normal() * (drift != 0)
        row = {"trained_from": 0, "loss": float(loss), "source_losses": {}, "seconds": 1.0, "environment": {}}
        for chain in (member.job.chain.parent, member.job.chain):
            if chain is not None:
                study.ledger.insert(segments, **chain.row(), **row)
    return study.transfer()


def test_the_printed_command_runs_as_it_stands_and_its_verdict_is_the_gate_s(make_study: MakeStudy) -> None:
    path = make_study()
    sweep = swept(path, SET)
    study = opened(path, sweep, SET)
    assert finished(study, sweep).verdict == "not enough evidence"

    plan = registered_plan(path, study.ledger, SET)
    gate = study._dry_run(plan, study.config, None).gate
    assert "transfer" in gate.failed
    command = gate.lines[0].advice.removeprefix("settle it: ")
    words = shlex.split(command)
    assert words[:3] == ["muscale", "transfer", str(path)]
    settings = words[4::2]
    assert set(words[3::2]) == {"--set"}
    assert {SET, "transfer.rates=9", "transfer.octaves=8.0"} <= set(settings)

    settled = finished(opened(path, sweep, *settings), sweep)
    assert settled.verdict == "pass"
    again = opened(path, sweep, SET)
    assert again.transfer().verdict == "not enough evidence", "the plan's law stays that of its own grids"
    assert again._gate_verdict.verdict == settled.verdict
    assert "transfer" not in again._dry_run(plan, again.config, None).gate.failed


def test_a_registered_plan_is_tried_without_the_ladder_of_a_changed_study_file_but_not_without_grids(
    make_study: MakeStudy,
) -> None:
    path = make_study()
    sweep = swept(path)
    study = opened(path, sweep)
    finished(study, sweep)
    plan = registered_plan(path, study.ledger)
    assert study.dry_run(plan).plan.key == plan.key
    with pytest.raises(StageError):
        study.dry_run()
    with pytest.raises(StageError, match="muscale transfer"):
        opened(path, sweep, "transfer.seeds=[5]").dry_run(plan)


def test_the_plan_s_rate_follows_the_law_of_experts_that_the_gate_reads(make_study: MakeStudy) -> None:
    path = make_study()
    experts = ["n_experts=8", "experts_per_token=2", "expert_ratio=1.0", "mlp_ratio=2.0"]
    own = [*(f"model.{one}" for one in experts), "plan.explicit.experts_per_token=4", "transfer.experts=[8, 16]"]
    sweep = swept(path, *own)
    study = opened(path, sweep, *own)
    finished(study, sweep, above=0, drift=-0.6)
    study._stages.known = replace(study._stages.known, fit=planted_fit())
    kept = study._stages.plan()
    assert "experts^" not in kept.rules["learning_rate"]

    wider = opened(path, sweep, *own, "transfer.experts=[8, 16, 32]")
    law = finished(wider, sweep, above=0, drift=-0.6).axis_laws["experts"]
    assert isinstance(law, AxisLaw)
    moved = study._stages.plan()
    assert str(law) in moved.rules["learning_rate"]
    ratio = moved.hyperparameters.learning_rate / kept.hyperparameters.learning_rate
    assert ratio == pytest.approx(law.factor(16, 8))
    assert study._gate_verdict.axis_laws["experts"] == law


def test_larger_grids_that_are_not_finished_or_do_not_hold_the_study_s_are_not_read(make_study: MakeStudy) -> None:
    path = make_study()
    sweep = swept(path)
    study = opened(path, sweep)
    own = finished(study, sweep)
    finished(opened(path, sweep, "transfer.rates=8"), sweep)
    Study.open(path, ["transfer.seeds=[0, 1]"], quiet=True)  # begun, not finished
    assert transfer.widest_verdict(sweep, study.config, study._numerics, study.ledger) is None
    assert study._gate_verdict.verdict == own.verdict
