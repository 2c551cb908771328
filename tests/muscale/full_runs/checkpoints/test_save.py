"""Checkpoints are whole or not there: after a kill at the worst moment, by tokens and by time, while training continues."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from muscale.errors import StageError
from muscale.full_runs.checkpoints import folder as checkpoint_folder
from muscale.full_runs.checkpoints import save as checkpoints
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, MANIFEST
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.full_runs.train.module import FullRunModule
from muscale.layout import RESULT
from proxy_models.hashing import file_sha256
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training import optimizer
from proxy_models.training.guard_settings import GuardSettings
from tests.muscale.forked_ranks import BATCH, STEPS, Fault, ended, interrupt, losses, result, rows, start, train_on
from tests.quick import quick_and_soak


def standing(run: FullRun) -> list[int]:
    """After how many steps there is a checkpoint."""
    return [tokens // BATCH for tokens, _ in reversed(Checkpoints(run.directory / CHECKPOINTS).found())]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_the_second(name: str, rank: int) -> None:
    """Rank 0 is killed where the second checkpoint reaches a function of the module; its shards are on the disk by then."""
    if rank == 0:
        reached, real = 0, getattr(checkpoints, name)

        def faulty(*given: object) -> None:
            nonlocal reached
            reached += 1
            if reached == 2:
                die()
            real(*given)

        setattr(checkpoints, name, faulty)


def before_the_manifest(rank: int) -> None:
    dies_at_the_second("write_manifest", rank)


def after_the_manifest(rank: int) -> None:
    dies_at_the_second("put_in_place", rank)


def while_the_other_writes(rank: int) -> None:
    """Rank 1 is killed where the second checkpoint reaches its shard; rank 0 writes its own."""
    if rank == 1:
        reached, real = 0, FileSystemWriter.write_data

        def faulty(self: FileSystemWriter, *given: Any) -> Any:
            nonlocal reached
            reached += 1
            if reached == 2:
                die()
            return real(self, *given)

        FileSystemWriter.write_data = faulty  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize(
    ("fault", "killed", "shards", "has_manifest"),
    quick_and_soak(
        [(before_the_manifest, 0, 2, False), (after_the_manifest, 0, 2, True), (while_the_other_writes, 1, 1, False)],
        (before_the_manifest, 0, 2, False),
        (while_the_other_writes, 1, 1, False),
    ),
)
def test_a_kill_during_a_save_leaves_the_checkpoint_before_it_and_the_same_losses(
    run: FullRun, tmp_path: Path, fault: Fault, killed: int, shards: int, has_manifest: bool
) -> None:
    undisturbed = replace(run, directory=tmp_path / "undisturbed")
    train(undisturbed)
    codes = ended(start(run, 2, fault=fault))
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1, "the other rank lost its peer, and does not wait for it"
    (torn,) = (run.directory / CHECKPOINTS).glob("*.unfinished")
    assert len(list(torn.glob("*.distcp"))) <= shards
    assert (torn / MANIFEST).exists() == has_manifest
    assert standing(run) == [6]

    train_on(run, 3)  # of eight sequences a step, so that shares are 3, 3 and 2
    assert result(run)["resumed_from"] == BATCH * 6
    assert result(run)["environment"]["world_size"] == 3
    assert result(run)["loss"] == pytest.approx(result(undisturbed)["loss"], rel=1e-4)
    np.testing.assert_allclose(losses(run), losses(undisturbed), rtol=1e-3)
    assert not torn.exists()
    assert standing(run) == [12, 16]


@pytest.mark.parametrize("world_size", quick_and_soak((1, 3), 3))
def test_a_swapped_optimizer_and_a_later_stage_resume_in_their_middle_at_another_world_size(
    run: FullRun, tmp_path: Path, world_size: int
) -> None:
    # The checkpoint after 12 steps lies between the swap at 10 and the end, and holds the guard's snapshot of the new optimizer.
    guard = GuardSettings(action="rewind", window=8, snapshot_every=4)
    values = Hyperparameters(
        learning_rate=0.01,
        batch_tokens=BATCH,
        swap_optimizer="muon",
        swap_fraction=10 / STEPS,
        swap_learning_rate=0.003,
        warmup_fraction=0.1,
    )
    segments = chain(values, BATCH * STEPS)
    run = replace(run, numerics=replace(run.numerics, guard=guard), segments=segments, micro_batch=2)
    whole = replace(run, directory=tmp_path / "whole")
    train(whole)
    train_on(run, 2)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-3)
    interrupt(run, after=12)
    train_on(run, world_size)  # under the micro-batch a rank of three has one pass less than the others
    assert result(run)["resumed_from"] == BATCH * 12
    assert result(run)["loss"] == pytest.approx(result(whole)["loss"], rel=1e-4)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-3)


def test_training_continues_while_a_checkpoint_is_written(run: FullRun, monkeypatch: pytest.MonkeyPatch) -> None:
    further, write, taken = threading.Event(), checkpoint_folder.write_manifest, FullRunModule.take_step

    def after_more_steps(folder: Path, hashes: dict[str, str]) -> None:
        assert further.wait(60), "training waited for the write"
        write(folder, hashes)

    def step(module: FullRunModule) -> None:
        taken(module)
        if module.tokens == BATCH * 9:
            assert standing(run) == []
            further.set()

    monkeypatch.setattr("muscale.full_runs.checkpoints.save.write_manifest", after_more_steps)
    monkeypatch.setattr(FullRunModule, "take_step", step)
    train(run)
    assert further.is_set()
    assert standing(run) == [12, 16]


def test_a_gpu_s_state_is_copied_at_once_into_pinned_memory_which_is_kept(
    run: FullRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = checkpoints.staging_options(torch.device("cuda"))
    assert (options.use_pinned_memory, options.use_non_blocking_copy, options.use_async_staging) == (True, True, False)
    made: list[object] = []

    def counted(options: StagingOptions) -> object:
        made.append(options)
        return DefaultStager(options)

    monkeypatch.setattr("muscale.full_runs.checkpoints.save.DefaultStager", counted)
    train(run)
    assert made == [checkpoints.staging_options(torch.device("cpu"))]
    assert standing(run) == [12, 16]


def test_a_write_that_fails_ends_the_run_at_the_next_one(run: FullRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(folder: Path, hashes: dict[str, str]) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("muscale.full_runs.checkpoints.save.write_manifest", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        train(run)
    assert standing(run) == []
    assert rows(run)[-1]["tokens"] == BATCH * 12
    monkeypatch.undo()
    assert train(run)["resumed_from"] == 0


def test_the_newest_are_kept_and_one_for_each_so_many_tokens(run: FullRun) -> None:
    train(replace(run, checkpoint_every_tokens=BATCH * 2, keep_last=3, keep_every_tokens=BATCH * 5))
    assert standing(run) == [6, 10, 12, 14, 16]


def test_checkpoints_by_time_are_made_between_those_by_tokens(run: FullRun, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("muscale.full_runs.train.rank_flags.time.monotonic", lambda: clock[0])
    taken = FullRunModule.take_step

    def step(module: FullRunModule) -> None:
        clock[0] += 60  # a minute a step
        taken(module)

    monkeypatch.setattr(FullRunModule, "take_step", step)
    train(replace(run, checkpoint_every_minutes=4, keep_last=9))
    assert standing(run) == [4, 6, 10, 12, 16]


def test_every_rank_hashes_what_it_wrote_and_draws_no_values_for_a_checkpoint_to_replace(run: FullRun) -> None:
    train_on(run, 2)
    (run.directory / RESULT).unlink()
    newest, before = Checkpoints(run.directory / CHECKPOINTS).found()
    (newest[1] / "__1_0.distcp").write_bytes(b"torn")
    assert ended(start(run, 2, fault=hash_their_own_and_draw_nothing)) == [0, 0]
    assert result(run)["resumed_from"] == before[0]


def hash_their_own_and_draw_nothing(rank: int) -> None:
    """Each process ends where it reads another's shard, or draws an initial value."""

    def only_own(path: Path) -> str:
        if path.name == f"__{1 - rank}_0.distcp":
            die()
        return file_sha256(path)

    checkpoint_folder.file_sha256 = checkpoints.file_sha256 = only_own  # type: ignore[attr-defined]
    optimizer.torch.randn = die  # type: ignore[attr-defined]


def test_damage_is_named_by_file_and_shares_are_every_file_once(run: FullRun, caplog: pytest.LogCaptureFixture) -> None:
    train_on(run, 3)
    newest = Checkpoints(run.directory / CHECKPOINTS).found()[0][1]
    files = sorted(json.loads((newest / MANIFEST).read_text()))
    assert {*files, MANIFEST} == {file.name for file in newest.iterdir()}
    for name in files:
        (newest / name).write_bytes(b"torn")
    for ranks in (1, 2, 3, 8):
        shares = [checkpoint_folder.find_damage(newest, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert sorted(name for share in shares for name in share) == files
        assert len(shares) <= 3 or not any(shares[3:])
    with pytest.raises(StageError, match=r"manifest: \.metadata, __0_0\.distcp, .*parametrization\.json$"):
        checkpoint_folder.require_intact(newest)
    latest = Checkpoints(run.directory / CHECKPOINTS).latest()
    assert latest is not None
    assert latest[1] != newest
    assert "__2_0.distcp" in caplog.text
