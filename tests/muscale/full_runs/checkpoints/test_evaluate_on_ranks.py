"""Ranks that hold the parts of a checkpoint's weights find what one process finds that holds all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import muscale as ms
from muscale import CheckpointEvaluation
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint, subject_at
from muscale.full_runs.distributed import process_group
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.layout import EVALUATED
from proxy_models.architecture.sharded import own
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation import loaded_model
from proxy_models.evaluation.ablation import Ablation
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from proxy_models.evaluation.measure import Measure
from proxy_models.evaluation.memorisation import Memorisation
from proxy_models.evaluation.quantised_loss import QuantisedLoss
from proxy_models.evaluation.samples import Samples
from proxy_models.evaluation.tasks import Tasks
from proxy_models.training.fsdp import shard
from tests.muscale.forked_ranks import small_run
from tests.muscale.gloo_ranks import GlooRanks
from tests.quick import quick_and_soak

SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
"""
SPELLED = """
task: spelled
dataset_path: json
dataset_kwargs: {data_files: {test: spelled.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{number}}"
doc_to_target: "{{word}}"
generation_kwargs: {until: ["a"], max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    run = small_run(corpus, tmp_path_factory.mktemp("run") / "run", layers=2)
    train(run)
    return run


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    """Numbers of items that two and three ranks don't divide, with choices of several lengths."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "sums.yaml").write_text(SUMS)
    (folder / "spelled.yaml").write_text(SPELLED)
    items = [
        {"question": "abcd " * (n % 5), "choices": ["efgh abcd", "ha", "cdcdcd"], "answer": n % 3} for n in range(19)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    words = [{"number": "abc" * (1 + n), "word": "dha"} for n in range(5)]
    (folder / "spelled.jsonl").write_text("".join(json.dumps(item) + "\n" for item in words))
    return Tasks(folder=folder)


@contextmanager
def together(where: Path, *, small_units: bool = True) -> Iterator[DeviceMesh]:
    """All ranks, which shard each block by itself, or a small model as one unit."""
    with (
        process_group(torch.device("cpu"), timeout=timedelta(seconds=60), records=where),
        pytest.MonkeyPatch.context() as patch,
    ):
        if small_units:
            patch.setattr(loaded_model, "shard", partial(shard, min_unit_params=0))
        yield init_device_mesh("cpu", (dist.get_world_size(),))


def evaluate_on_rank(where: Path, measures: list[Measure], small_units: bool) -> dict[str, Any]:
    with together(where, small_units=small_units) as mesh:
        return evaluate_checkpoint(where, measures, keep_progress=True, mesh=mesh).to_dict()


def weights_on_rank(where: Path) -> tuple[int, int]:
    """The numbers of weights that a rank holds, and of all."""
    with together(where) as mesh:
        parameters = [*subject_at(where, mesh=mesh)[0].model.parameters()]
        return sum(own(one).numel() for one in parameters), sum(one.numel() for one in parameters)


def assert_same(found: dict[str, Any], alone: CheckpointEvaluation) -> None:
    on_ranks = CheckpointEvaluation.from_dict(found)
    assert on_ranks.val_loss == pytest.approx(alone.val_loss, abs=1e-5)
    assert on_ranks.samples == alone.samples
    for ours, theirs in zip(on_ranks.scores, alone.scores, strict=True):
        assert replace(ours, value=0.0, standard_error=None) == replace(theirs, value=0.0, standard_error=None)
        near = 0.0 if theirs.metric in ("accuracy", "exact_match", "memorised", "memory_bytes") else 1e-4
        assert ours.value == pytest.approx(theirs.value, abs=near, rel=0.0), theirs
        assert ours.standard_error == pytest.approx(theirs.standard_error, abs=1e-4), theirs


@pytest.mark.parametrize(("world_size", "small_units"), quick_and_soak([(2, True), (2, False), (3, True)], (3, True)))
def test_every_measure_is_that_of_one_process(
    trained: FullRun, tasks: Tasks, gloo_ranks: GlooRanks, world_size: int, small_units: bool
) -> None:
    measures: list[Measure] = [
        HeldOutLoss(),
        tasks,
        Samples(prompts=("abc", "h", "cdab"), n_tokens=40),
        Memorisation(prefix_tokens=8, continuation_tokens=8, n_sequences=20),
        QuantisedLoss(),
        Ablation(),
        Ablation(parts="heads"),
    ]
    alone = evaluate_checkpoint(trained.directory, measures)
    found = gloo_ranks.call(evaluate_on_rank, trained.directory, measures, small_units, world_size=world_size)
    for each in found:
        assert_same(each, alone)


def test_each_rank_holds_its_part_of_the_weights(trained: FullRun, gloo_ranks: GlooRanks) -> None:
    (first, whole), (second, _) = gloo_ranks.call(weights_on_rank, trained.directory, world_size=2)
    assert first + second == whole == trained.numerics.model.n_params_total
    assert max(first, second) < 0.6 * whole


def test_answers_are_kept_once_and_read_by_all_ranks(trained: FullRun, tasks: Tasks, gloo_ranks: GlooRanks) -> None:
    shutil.rmtree(trained.directory / EVALUATED, ignore_errors=True)
    kept: list[list[str]] = []
    for _ in range(2):
        first, second = gloo_ranks.call(evaluate_on_rank, trained.directory, [tasks], True, world_size=2)
        assert first["scores"] == second["scores"]
        (log,) = (trained.directory / EVALUATED).rglob("*.jsonl")
        kept.append(log.read_text().splitlines())
    assert kept[0] == kept[1]
    assert len({key for line in kept[0] for key in json.loads(line)}) == len(kept[0])


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_ray_find_the_same(trained: FullRun) -> None:
    measures: list[Measure] = [HeldOutLoss(), Samples(prompts=("abc", "h", "cdab"), n_tokens=20)]
    found = ms.evaluate(trained.directory, measures, workers=2)
    assert_same(found.to_dict(), evaluate_checkpoint(trained.directory, measures))


@pytest.mark.parametrize(
    ("given", "named"), [({"workers": 0}, "workers.*0"), ({"workers": 2, "device": "cuda:1"}, "cuda:1")]
)
def test_bad_workers_are_refused(trained: FullRun, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ms.evaluate(trained.directory, **given)
