"""The last steps of a run are trained again before it goes on: the same losses on the same layout, rounding on another, no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale.errors import StageError
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.replay import JUDGED, TOLERANCE, Replay, replay
from muscale.full_runs.train.attempt import train
from muscale.layout import METRICS, REPLAY, RESULT
from muscale.settings.promote import SpikePolicy
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.spike_handling import Incident, record_incident
from proxy_models.architecture.config import as_decoder
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.guard_settings import GuardSettings
from tests.muscale.forked_ranks import BATCH, STEPS, interrupt, losses
from tests.muscale.gloo_ranks import GlooRanks

AT = 12  # steps at the newest checkpoint; there is another after 6


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    found = Ledger(tmp_path / "ledger.sqlite")
    yield found
    found.close()


@pytest.fixture
def cut(run: FullRun) -> FullRun:
    """A run that was interrupted after twelve of its sixteen steps."""
    run = replace(run, keep_last=3)
    train(run)
    interrupt(run, after=AT)
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("steps", "start"), [(1, 6), (6, 6), (AT, 0), (AT + 5, 0)])
def test_in_one_process_every_loss_is_the_recorded_one_and_the_run_goes_on_as_before(
    cut: FullRun, ledger: Ledger, steps: int, start: int
) -> None:
    before = contents(cut.directory)
    found = replay(cut, steps, train, ledger)
    assert found is not None
    assert (found.start, found.end, found.n_steps) == (start * BATCH, AT * BATCH, AT - start)
    assert (found.deviation, found.over_all, found.passed) == (0.0, 0.0, True)
    assert found.recorded_on == found.again_on
    assert found.again_on["world_size"] == 1
    assert contents(cut.directory) == before
    (row,) = ledger.results(ResultKind.REPLAY)
    assert Replay.from_dict(row["payload"]) == found
    train(cut)
    assert len(losses(cut)) == STEPS
    assert replay(cut, steps, train, ledger) is None, "it has ended"


def altered(cut: FullRun) -> FullRun:
    path = cut.directory / METRICS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[8]["train_loss"] *= 1.01
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return cut


def other_model(cut: FullRun) -> FullRun:
    model, base = (replace(as_decoder(one), rope_theta=100.0) for one in (cut.numerics.model, cut.numerics.base))
    return replace(cut, numerics=replace(cut.numerics, model=model, base=base))


@pytest.mark.parametrize("fault", [altered, other_model])
def test_losses_beyond_rounding_stop_it_with_step_losses_and_machines_and_nothing_has_changed(
    cut: FullRun, ledger: Ledger, fault: Callable[[FullRun], FullRun]
) -> None:
    run = fault(cut)
    before = contents(cut.directory)
    with pytest.raises(StageError) as refusal:
        replay(run, 3, train, ledger)
    found = Replay.from_dict(ledger.results(ResultKind.REPLAY)[0]["payload"])
    assert found.deviation > found.tolerance == TOLERANCE["fp32"]
    assert abs(found.again - found.recorded) > found.tolerance
    if fault is altered:
        assert found.step == 9
    seen = (found.step, f"{found.recorded:.6f}", f"{found.again:.6f}", f"{found.tolerance:g}", found.again_on["torch"])
    assert all(str(value) in str(refusal.value) for value in seen)
    assert contents(cut.directory) == before


def test_the_first_steps_are_judged_and_all_are_shown(run: FullRun, ledger: Ledger) -> None:
    segments = chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * (JUDGED + 10))
    run = replace(run, segments=segments)
    train(run)
    (run.directory / RESULT).unlink()
    path = run.directory / METRICS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[-1]["train_loss"] *= 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = replay(run, JUDGED + 10, train, ledger)
    assert found is not None
    assert (found.n_steps, found.deviation, found.passed) == (JUDGED + 10, 0.0, True)
    assert found.over_all > found.tolerance
    assert found.step == JUDGED + 10


def test_without_an_earlier_checkpoint_those_that_exist_are_named(run: FullRun, ledger: Ledger) -> None:
    with pytest.raises(StageError):
        replay(run, 1, train, ledger)
    run = replace(run, keep_last=3)
    train(run)
    interrupt(run, after=AT)
    with pytest.raises(StageError) as refusal:
        replay(run, 7, train, ledger)
    assert all(str(value) in str(refusal.value) for value in (6 * BATCH, AT * BATCH, 7))
    with pytest.raises(StageError, match="0"):
        replay(run, 0, train, ledger)


def test_skipped_batches_are_skipped_again(run: FullRun, ledger: Ledger) -> None:
    numerics = replace(run.numerics, guard=GuardSettings(action="skip"))
    run = replace(run, keep_last=3, numerics=numerics, on_spike=SpikePolicy(action="skip", max_interventions=3))
    skipped = Incident(
        step=8, reason="planted", action="skip", left_out=(8 * BATCH, 9 * BATCH), at="2026-01-01T00:00:00"
    )
    run.directory.mkdir()
    record_incident(run.directory, skipped)
    train(run)
    interrupt(run, after=AT)
    found = replay(run, 3, train, ledger)
    assert found is not None
    assert (found.n_steps, found.deviation) == (5, 0.0)


@pytest.mark.parametrize("error", [StageError("the devices"), KeyboardInterrupt()])
def test_a_replay_that_fails_or_is_interrupted_leaves_nothing(
    cut: FullRun, ledger: Ledger, error: BaseException
) -> None:
    before = contents(cut.directory)

    def failing(part: FullRun) -> dict[str, Any]:
        train(part)
        raise error

    with pytest.raises(type(error)):
        replay(cut, 3, failing, ledger)
    assert contents(cut.directory) == before
    assert not (cut.directory / REPLAY).exists()
    assert ledger.results(ResultKind.REPLAY) == []


@pytest.mark.parametrize(("end", "steps", "start"), [(6, 3, 2), (6, 5, 0), (12, 2, 6)])
def test_a_replay_may_begin_and_end_inside_a_batch_ramp(
    run: FullRun, ledger: Ledger, end: int, steps: int, start: int
) -> None:
    """Steps of one batch to 4, of two to 8 and then of four; positions in batches of the first step."""
    ramped = Hyperparameters(learning_rate=0.01, batch_tokens=4 * BATCH, batch_doublings=2, batch_ramp_tokens=8 * BATCH)
    segments = chain(ramped, 24 * BATCH)
    run = replace(run, segments=segments, checkpoint_every_tokens=2 * BATCH, keep_last=99)
    train(run)
    (run.directory / RESULT).unlink()
    found = replay(run, steps, train, ledger, end=end * BATCH)
    assert found is not None
    assert (found.start, found.end, found.deviation) == (start * BATCH, end * BATCH, 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_number_of_ranks_changes_losses_by_rounding(
    run: FullRun, ledger: Ledger, gloo_ranks: GlooRanks, precision: Any
) -> None:
    run = replace(run, keep_last=3, min_unit_params=0, numerics=replace(run.numerics, precision=precision))
    train(run)
    interrupt(run, after=AT)

    def on_two(part: FullRun) -> dict[str, Any]:
        gloo_ranks.train(part, 2)
        return {}

    found = replay(run, AT, on_two, ledger)
    assert found is not None
    assert 0 < found.deviation < TOLERANCE[precision] / 3
    assert (found.recorded_on["world_size"], found.again_on["world_size"]) == (1, 2)
