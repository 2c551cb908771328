"""Workers that share a device: what is reported of them, and each check fails on what it is there for."""

from pathlib import Path

import pytest

from muscale.layout import CORPUS
from muscale.machine.gpu.gpu_checks import SMALL
from muscale.machine.gpu.gpu_report import Check
from muscale.machine.gpu.packing import packed, packing_checks
from proxy_models.data.corpus_writing import write_corpus
from tests.muscale.conftest import write_text


def status(found: list[Check]) -> list[str]:
    return [check.status for check in found]


def test_workers_that_share_a_device_each_keep_to_their_part() -> None:
    fact = {"loss": 5.0, "device": "0", "peak_bytes": 30, "device_bytes": 80, "refused": True}
    well = [fact, fact]
    assert status(list(packing_checks(well))) == ["pass"] * 4
    for broken, place in (({"loss": None}, 0), ({"device": "1"}, 1), ({"peak_bytes": 41}, 2), ({"refused": False}, 3)):
        found = status(list(packing_checks([fact, fact | broken])))
        assert [number for number, each in enumerate(found) if each == "fail"] == [place]
    assert status(list(packing_checks([{"loss": 5.0}] * 2))) == ["pass", "skipped"]


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_of_the_pool_train_at_the_same_time(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    write_corpus(tmp_path / CORPUS, str(tmp_path / "text"))
    checks, facts = packed("cpu", tmp_path, SMALL)
    assert status(checks) == ["pass", "skipped"]
    first, second = (fact["loss"] for fact in facts)
    assert first != second, "each has a seed of its own"
