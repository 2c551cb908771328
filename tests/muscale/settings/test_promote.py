"""[promote]: what goes together, and what is refused by key, rule and value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muscale import StageError, StudyConfig
from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import PromoteSettings

MakeStudy = Callable[..., Path]


def test_how_a_full_run_is_laid_over_its_workers(make_study: MakeStudy) -> None:
    micro = make_study()
    together = ["promote.tensor_parallel=2", "promote.micro_batch=8", "promote.activation_checkpointing=selective"]
    settings = StudyConfig.read(micro, together).promote
    assert settings.parallelism == Parallelism(tensor_parallel=2, checkpointing="selective")
    hybrid = ["promote.workers=8", "promote.sharding=hybrid", "promote.shard_ranks=4"]
    assert StudyConfig.read(micro, hybrid).promote.parallelism.grid(8) == (1, 2, 4, 1)
    uneven = ["promote.workers=6", "promote.tensor_parallel=2", "promote.micro_batch=2"]
    assert StudyConfig.read(micro, uneven).promote.workers == 6


@pytest.mark.parametrize(
    ("stated", "least"),
    [
        ({}, 16),
        ({"tensor_parallel": 4, "context_parallel": 2}, 2),
        ({"expert_parallel": 4}, 16),
        ({"pipeline_parallel": 4}, 16),
        ({"pipeline_parallel": 4, "pipeline_schedule": "dualpipe_v", "sharding": "zero2"}, 32),
        ({"pipeline_schedule": "dualpipe_v"}, 16),
        ({"tensor_parallel": 2, "sharding": "auto"}, 16),
    ],
)
def test_workers_that_share_a_sequence_need_no_batch_with_one_for_each(stated: dict[str, Any], least: int) -> None:
    settings = PromoteSettings.model_validate({"workers": 16, **stated})
    assert settings.least_sequences == least
    if not settings.open_layout:
        fits = [any(settings.parallelism.unfit(16, sequences=n)) for n in (least - 1, least)]
        assert fits == [True, False], "the least that the gate lets pass"


def test_a_full_run_resumes_with_fewer_workers_only_in_whole_groups(make_study: MakeStudy) -> None:
    micro = make_study()
    groups = ["promote.workers=8", "promote.tensor_parallel=2"]
    assert StudyConfig.read(micro, [*groups, "promote.workers_min=4"]).promote.sizes == (4, 6, 8)
    assert StudyConfig.read(micro, ["promote.workers=4", "promote.workers_min=2"]).promote.sizes == (2, 3, 4)
    hybrid = ["promote.workers=8", "promote.sharding=hybrid"]
    fours = [*hybrid, "promote.shard_ranks=4", "promote.workers_min=4"]
    assert StudyConfig.read(micro, fours).promote.sizes == (4, 8)


def test_an_open_layout_is_refused_where_nothing_chooses_it(make_study: MakeStudy) -> None:
    settings = StudyConfig.read(make_study(), ["promote.tensor_parallel=auto"]).promote
    assert settings.open_layout == ("tensor_parallel",)
    with pytest.raises(StageError, match="promote.tensor_parallel"):
        _ = settings.parallelism
