"""The scores of a finished run come from its last checkpoint, by one worker or by workers that share the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from muscale import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.final_scores import final_scores
from muscale.full_runs.train.attempt import train
from muscale.layout import LEDGER, RUN
from muscale.settings.tables import ResourceSettings
from muscale.store.evaluations import score_table
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.ablation import Ablation
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from tests.muscale.forked_ranks import result, small_run
from tests.quick import quick_and_soak

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
MEASURES = (HeldOutLoss(), Ablation())
SMALL = ResourceSettings(cpus_per_worker=0.5)


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    run = small_run(corpus, tmp_path_factory.mktemp("run") / "run", layers=2)
    train(run)
    return run


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / LEDGER)
    yield ledger
    ledger.close()


def chain_of(run: FullRun) -> Chain:
    return Chain(numerics=run.numerics, segments=run.segments)


def test_workers_that_share_the_weights_find_the_scores_of_one(trained: FullRun, tmp_path: Path) -> None:
    values = []
    for workers in (1, 2):
        ledger = Ledger(tmp_path / f"{workers}.sqlite")
        found = final_scores(chain_of(trained), trained.directory, ledger, MEASURES, SMALL, workers=workers)
        assert len(found) == len(score_table(ledger)) == 2 + 1 + 2  # the loss also in bits per byte, and two layers
        again = final_scores(chain_of(trained), trained.directory, ledger, MEASURES, SMALL, workers=workers)
        assert again.equals(found), "a measured score is not measured again"
        values.append([*found["value"]])
        ledger.close()
    assert values[1] == pytest.approx(values[0], abs=1e-5)
    assert values[0][0] == pytest.approx(result(trained)["loss"], rel=1e-6)


@pytest.mark.parametrize(("gone", "workers"), quick_and_soak(product((True, False), (1, 2)), (False, 1)))
def test_a_last_checkpoint_that_is_gone_or_damaged_is_named_and_nothing_is_scored_in_its_place(
    trained: FullRun, ledger: Ledger, tmp_path: Path, gone: bool, workers: int
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(trained.directory, directory)
    described = json.loads((directory / RUN).read_text())
    (directory / RUN).write_text(json.dumps(described | {"corpus": str(trained.corpus)}))
    last = directory / CHECKPOINTS / f"tokens={trained.n_tokens}"
    assert len([*last.parent.iterdir()]) > 1
    if gone:
        shutil.move(last, tmp_path / "kept")
    else:
        shard = next(last.glob("*.distcp"))
        content = shard.read_bytes()
        shard.write_bytes(content[:-1])
    with pytest.raises(StageError, match=str(last)):
        final_scores(chain_of(trained), directory, ledger, MEASURES, SMALL, workers=workers)
    assert score_table(ledger).empty
    if gone:
        shutil.move(tmp_path / "kept", last)
    else:
        shard.write_bytes(content)
    assert len(final_scores(chain_of(trained), directory, ledger, MEASURES, SMALL, workers=workers)) == 5


def test_a_cluster_without_room_is_refused(trained: FullRun, ledger: Ledger) -> None:
    with pytest.raises(StageError, match="1000 CPU"):
        final_scores(
            chain_of(trained), trained.directory, ledger, MEASURES, ResourceSettings(cpus_per_worker=1000), workers=2
        )
    assert score_table(ledger).empty
