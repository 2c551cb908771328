"""What a long run meets: spikes, losses that are not finite, notices to leave, lost workers."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from torch import Tensor

from muscale import json_lines
from muscale.errors import EXIT_PREEMPTED, PreemptedError, StageError
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.launch import launch
from muscale.full_runs.records.goodput import ATTEMPTS
from muscale.full_runs.records.preemption import NOTICE, OBEYED
from muscale.full_runs.train import module
from muscale.full_runs.train.attempt import train
from muscale.full_runs.train.module import FullRunModule
from muscale.layout import EVALUATIONS
from muscale.settings.promote import PromoteSettings, SpikePolicy
from muscale.settings.tables import ResourceSettings
from muscale.store.spike_handling import read_incidents
from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.decoder import Decoder
from proxy_models.data.batches import TokenStream
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.samples import Samples
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import warmup_factor
from proxy_models.recipes.segments import chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.step import Stepper
from tests.muscale.forked_ranks import BATCH, STEPS, ended, interrupt, losses, result, rows, start

MARK = 255  # a token that the corpus has not
FACTORS = {"spike": 40.0, "not finite": float("nan")}


def spike_handling(run: FullRun, policy: SpikePolicy) -> FullRun:
    guard = GuardSettings(window=8, threshold=20, max_spikes=policy.max_interventions)
    return replace(run, numerics=replace(run.numerics, guard=guard), on_spike=policy)


def poison(monkeypatch: pytest.MonkeyPatch, factor: float, *steps: int) -> list[int]:
    """Let the batches of some steps carry a mark at which the decoder's outputs go wild; returns how often each was seen."""
    seen: list[int] = []

    class Poisoned(TokenStream):
        def batch(self, tokens_seen: int, batch_tokens: int, *, rank: int = 0, world_size: int = 1) -> Tensor:
            batch = super().batch(tokens_seen, batch_tokens, rank=rank, world_size=world_size)
            if tokens_seen // BATCH in steps:
                seen.append(tokens_seen // BATCH)
                batch[0, 0] = MARK
            return batch

    forward = Decoder.forward

    def wild(self: Decoder, tokens: Tensor, *of: Tensor | None, regularized: bool = False) -> Tensor:
        return forward(self, tokens, *of, regularized=regularized) * (factor if tokens[0, 0] == MARK else 1)

    def stream(corpus: Corpus, length: int, seed: int, **_: object) -> TokenStream:
        return Poisoned(tokens=corpus.train, context_length=length, seed=seed)

    monkeypatch.setattr(module, "training_stream", stream)
    monkeypatch.setattr(Decoder, "forward", wild)
    return seen


def by_hand(run: FullRun, corpus: Corpus, left_out: set[int], rewarmed: tuple[int, int] | None = None) -> list[float]:
    """Losses of a run without the steps left out; the rate is warmed up from a step, over so many steps."""
    module, recipe = Decoder(as_decoder(run.numerics.model)), run.segments[0].recipe
    table = run.numerics.parametrization("adamw")
    initialize(module, table, recipe, seed=0)
    stepper = Stepper(module, make_optimizer(module, table, recipe), replace(run.numerics, guard=None), recipe)
    stream = TokenStream(tokens=corpus.train, context_length=32, seed=0)
    trained = []
    for number in range(STEPS):
        tokens = number * BATCH
        factor = run.segment_at(tokens).rate_factor(tokens)
        if rewarmed and number >= rewarmed[0]:
            factor *= warmup_factor(tokens - rewarmed[0] * BATCH, BATCH, rewarmed[1] * BATCH)
        if number not in left_out:
            batch = stream.batch(tokens, BATCH)
            trained.append(float(stepper.step(batch, number=number, tokens=tokens, rate_factor=factor)[0]))
    return trained


@pytest.mark.parametrize("kind", FACTORS)
def test_a_bad_batch_is_left_out_and_a_resumed_run_leaves_out_the_same(
    run: FullRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = spike_handling(run, SpikePolicy(action="skip"))
    seen = poison(monkeypatch, FACTORS[kind], 9, 14)
    outcome = train(run)
    assert losses(run) == pytest.approx(by_hand(run, corpus, {9, 14}), rel=1e-6)
    assert [(one["step"], one["action"]) for one in outcome["incidents"]] == [(9, "skip"), (14, "skip")]
    assert ("nan" if kind == "not finite" else "above") in outcome["incidents"][0]["reason"]

    curve = losses(run)
    interrupt(run, after=12)
    seen.clear()
    again = train(run)
    assert again["resumed_from"] == BATCH * 12
    assert seen == [], "the position is left out, not judged again"
    assert losses(run) == curve
    assert again["loss"] == outcome["loss"]
    assert [one["action"] for one in again["incidents"]] == ["skip", "skip", "restart"]


@pytest.mark.parametrize("kind", FACTORS)
def test_a_run_goes_back_leaves_out_the_batch_with_a_margin_and_warms_up_again(
    run: FullRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = spike_handling(run, SpikePolicy(action="rollback", margin_tokens=BATCH, rewarm_tokens=3 * BATCH))
    seen = poison(monkeypatch, FACTORS[kind], 9)
    outcome = train(run)
    assert seen == [9], "on the way back it is not tried"
    (incident,) = read_incidents(run.directory)
    assert incident.back_to == 6 * BATCH
    assert incident.left_out == (8 * BATCH, 11 * BATCH)
    assert losses(run) == pytest.approx(by_hand(run, corpus, {8, 9, 10}, rewarmed=(6, 3)), rel=1e-6)
    assert [row["tokens"] // BATCH for row in rows(run)] == [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 15, 16]
    assert outcome["goodput"]["repeated"] > 0

    interrupt(run, after=12)
    again = train(run)
    assert again["resumed_from"] == BATCH * 12
    assert again["loss"] == outcome["loss"]


def test_a_margin_is_left_out_where_the_spike_is_the_first_step_after_a_checkpoint(
    run: FullRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = spike_handling(run, SpikePolicy(action="rollback", margin_tokens=BATCH))
    poison(monkeypatch, float("nan"), 6)
    train(run)
    (incident,) = read_incidents(run.directory)
    assert (incident.back_to, incident.left_out) == (6 * BATCH, (6 * BATCH, 8 * BATCH))
    assert losses(run) == pytest.approx(by_hand(run, corpus, {6, 7}), rel=1e-6)


def test_a_run_without_a_checkpoint_goes_back_to_its_initial_weights_and_may_leave_out_its_end(
    run: FullRun, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = spike_handling(replace(run, checkpoint_every_tokens=BATCH * 100), SpikePolicy(action="rollback"))
    poison(monkeypatch, float("nan"), 2, 15)
    outcome = train(run)
    assert [one["back_to"] for one in outcome["incidents"]] == [0, 0]
    trained = [row["train_loss"] for row in rows(run) if "train_loss" in row]
    assert trained == pytest.approx(by_hand(run, corpus, {2, 15}), rel=1e-6)
    assert rows(run)[-1]["tokens"] == BATCH * STEPS
    assert outcome["loss"] == rows(run)[-1]["val_loss"]


def test_interventions_have_a_budget_and_a_run_without_a_policy_ends(
    run: FullRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, float("nan"), 5, 8, 10)
    policy = SpikePolicy(action="rollback", max_interventions=2)
    with pytest.raises(StageError, match="diverged: .* nan at step 10.*promote.max_interventions"):
        train(spike_handling(run, policy))
    assert [incident.step for incident in read_incidents(run.directory)] == [5, 8]
    with pytest.raises(StageError, match="diverged:.*5"):
        train(replace(run, directory=tmp_path / "plain"))
    with pytest.raises(ValueError, match="on_spike needs a guard"):
        replace(run, on_spike=policy)


def takes_its_time(_rank: int) -> None:
    """A tenth of a second for each step, so that a signal comes in its middle."""
    taken = FullRunModule.take_step

    def step(self: FullRunModule) -> None:
        time.sleep(0.1)
        taken(self)

    FullRunModule.take_step = step  # type: ignore[method-assign]


def test_sigterm_on_one_rank_saves_on_all_and_the_run_resumes_exactly(run: FullRun, tmp_path: Path) -> None:
    whole = replace(run, directory=tmp_path / "whole")
    train(whole)
    ranks = start(run, 2, fault=takes_its_time)
    deadline = time.monotonic() + 600
    while not (run.directory / "checkpoints" / f"tokens={BATCH * 6}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = ranks[1].pid
    assert pid
    os.kill(pid, signal.SIGTERM)
    assert ended(ranks) == [EXIT_PREEMPTED, EXIT_PREEMPTED]
    stops = [record for record in json_lines.read(run.directory / ATTEMPTS) if record["event"] == "stop"]
    assert {record["kind"] for record in stops} == {"preempted"}
    resumed = train(run)
    assert resumed["resumed_from"] == BATCH * stops[0]["step"] > BATCH * 6
    assert resumed["loss"] == pytest.approx(result(whole)["loss"], rel=1e-4)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-3)


def test_a_file_in_the_run_s_directory_is_a_notice_too_and_is_obeyed_once(run: FullRun) -> None:
    run.directory.mkdir()
    (run.directory / NOTICE).touch()
    with pytest.raises(PreemptedError, match="saved at 256 tokens"):
        train(run)
    assert not (run.directory / NOTICE).exists()
    assert (run.directory / OBEYED).exists()
    outcome = train(run)
    assert outcome["resumed_from"] == BATCH
    assert [row["tokens"] for row in rows(run)] == [BATCH * n for n in range(1, STEPS + 1)]
    (restart,) = outcome["incidents"]
    assert restart["action"] == "restart"
    assert "preempted" in restart["reason"]
    assert 0 < outcome["goodput"]["steps"] < outcome["goodput"]["wall"]


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_terminated_driver_saves_a_killed_worker_is_replaced_and_checkpoints_are_evaluated_asynchronously(
    run: FullRun, tmp_path: Path
) -> None:
    long = chain(Hyperparameters(learning_rate=0.01, batch_tokens=BATCH), BATCH * 400)
    run = replace(run, segments=long, checkpoint_every_tokens=BATCH * 50, evaluate_every_tokens=None, keep_last=99)
    whole = replace(run, directory=tmp_path / "whole", evaluate_every_tokens=BATCH * 50)
    train(whole)
    settings = PromoteSettings(workers=2, workers_min=1, max_failures=1, evaluation="async")
    halves = ResourceSettings(cpus_per_worker=0.5)  # so that on two processors the evaluator has one

    def once(reached: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
        def watch() -> None:
            while not reached():
                time.sleep(0.01)
            act()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread

    def starts() -> list[int]:
        return [one["world_size"] for one in json_lines.read(run.directory / ATTEMPTS) if one["event"] == "start"]

    def kill_a_worker() -> None:
        for process in psutil.Process().children(recursive=True):
            if "RayTrainWorker" in " ".join(process.cmdline()):
                process.kill()
                return

    killer = once(lambda: bool(starts()), lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptedError, match="promote: preempted"):
        launch(run, settings, halves, name="killer")
    killer.join()
    saved = Checkpoints(run.directory / CHECKPOINTS).latest()
    assert saved is not None

    later = run.directory / CHECKPOINTS / f"tokens={(saved[0] // (50 * BATCH) + 1) * 50 * BATCH}"
    killed = once(later.exists, kill_a_worker)
    outcome = launch(run, settings, halves, name="killed", measures=[Samples(prompts=("abcd",))])
    killed.join()
    assert len(starts()) == 3
    assert starts()[0] == 2
    assert outcome["resumed_from"] >= int(later.name.removeprefix("tokens="))
    assert outcome["loss"] == pytest.approx(result(whole)["loss"], rel=1e-4)
    assert [row["tokens"] // BATCH for row in rows(run)] == list(range(1, 401))
    assert [one["action"] for one in outcome["incidents"]] == ["restart", "restart"]

    evaluations = json_lines.read(run.directory / EVALUATIONS)
    assert evaluations, "an evaluation still running at the end is awaited"
    assert len({row["tokens"] for row in evaluations}) == len(evaluations)
    within = {row["tokens"]: row["val_loss"] for row in rows(whole) if "val_loss" in row}
    for row in evaluations:
        alone = evaluate_checkpoint(run.directory / CHECKPOINTS / row["checkpoint"], [Samples(prompts=("abcd",))])
        assert (row["val_loss"], row["samples"]) == (alone.val_loss, alone.to_dict()["samples"])
        if row["tokens"] in within:  # not after the notice
            assert row["val_loss"] == pytest.approx(within[row["tokens"]], rel=1e-3)
