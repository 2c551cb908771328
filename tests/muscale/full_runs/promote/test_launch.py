"""How many workers a full run starts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muscale.full_runs.promote.launch import largest_fitting, launch
from muscale.layout import RESULT
from muscale.settings.promote import PromoteSettings
from muscale.settings.tables import ResourceSettings
from tests.muscale.forked_ranks import small_corpus, small_run


def test_the_largest_group_that_nodes_have_room_for_is_chosen() -> None:
    nodes = [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 64.0}]
    each = {"CPU": 1.0, "GPU": 1.0}
    assert largest_fitting((2, 4, 6, 8), nodes, each) == 4, "three and two"
    assert largest_fitting((2, 4, 6, 8), nodes, {"CPU": 1.0, "GPU": 0.0}) == 8
    assert largest_fitting((6, 8), nodes, each) == 6, "waited for, as Ray does"
    assert largest_fitting((2, 4), [], each) == 2
    assert largest_fitting((1, 2, 5, 6), [{"CPU": 1.0}], {"CPU": 0.2}) == 5, "1.0 // 0.2 is 4"


def write_world_size(config: dict[str, Any]) -> None:
    """A worker that trains nothing."""
    import ray.train

    context = ray.train.get_context()
    if context.get_world_rank() == 0:
        (config["run"].directory / RESULT).write_text(json.dumps({"world_size": context.get_world_size()}))


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_share_products_start_in_whole_groups(tmp_path: Path) -> None:
    import ray

    n_cpus = int(ray.cluster_resources()["CPU"])  # type: ignore[no-untyped-call]
    each = ResourceSettings(cpus_per_worker=2 / 3 if n_cpus == 2 else n_cpus // 2 or 0.4)  # room for two or three
    settings = PromoteSettings(workers=4, workers_min=2, tensor_parallel=2)
    found = launch(
        small_run(small_corpus(tmp_path), tmp_path / "run"), settings, each, name="groups", worker=write_world_size
    )
    assert found["world_size"] == 2
