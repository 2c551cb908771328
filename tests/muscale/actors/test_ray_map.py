"""Cleaning through Ray tasks writes the same files as without, although workers are killed; errors keep their types."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muscale.actors.ray_map import cluster_map
from muscale.errors import StageError
from muscale.settings.tables import ResourceSettings
from proxy_models.data.cleaning import text_shards
from proxy_models.data.cleaning.clean import clean
from proxy_models.data.cleaning.exact_duplicates import ExactDuplicates
from proxy_models.data.cleaning.leaks import Leaks
from proxy_models.data.cleaning.line_duplicates import LineDuplicates
from proxy_models.data.cleaning.near_duplicates import NearDuplicates
from proxy_models.data.documents import in_validation
from proxy_models.data.sources import CorpusError, Source

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

FRACTION = 0.2
STEPS = (ExactDuplicates(), LineDuplicates(max_documents=20), NearDuplicates(), Leaks())


def text_of(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(60))


def planted(folder: Path) -> Source:
    """Lines of text with exact and near-duplicates, a notice, and held-out text in training documents."""
    texts = [text_of(seed) for seed in range(100)]
    held_out = [text for text in texts if in_validation(text, FRACTION)]
    texts += [*texts[:20], *(f"{text} again" for text in texts[20:40])]
    texts += [f"{text_of(1000 + seed)}\nAll rights of this text are reserved." for seed in range(30)]
    texts += [f"{text_of(2000 + n)}\n{text}\n{text_of(3000 + n)}" for n, text in enumerate(held_out)]
    folder.mkdir()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(path=str(folder), kind="jsonl")


def killed_once(marks: Path, function: Callable[[Any], Any], item: Any) -> Any:
    """Kill the worker at the first try of one file of a pass."""
    target: Path = item[1]
    mark = marks / target.parent.parent.name
    if target.stem == "00002" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return function(item)


def killed(_item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(item: int) -> int:
    if item == 2:
        raise CorpusError("item 2 is refused")
    return item


def test_ray_tasks_write_the_same_bytes_although_workers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_shards, "SHARD_BYTES", 12_000)
    source, marks = {"corpus": planted(tmp_path / "text")}, tmp_path / "marks"
    marks.mkdir()
    plain = clean(source, tmp_path / "plain", STEPS, validation_fraction=FRACTION)
    assert all(step["documents"] > step["documents_left"] for step in plain.manifest["removed"]["corpus"][::2])
    with cluster_map(ResourceSettings()) as parallel:

        def with_kills(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            return parallel(partial(killed_once, marks, function), items)

        clean(source, tmp_path / "ray", STEPS, validation_fraction=FRACTION, parallel_map=with_kills)
    written = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "plain", tmp_path / "ray")
    ]
    assert written[0] == written[1]
    assert len(written[0]) > 4
    assert {mark.name for mark in marks.iterdir()} == {"learned", "step1", "step2", "step3", "step4"}


def test_errors_of_tasks_keep_their_types_and_a_worker_that_always_dies_is_an_error(tmp_path: Path) -> None:
    with cluster_map(ResourceSettings()) as parallel:
        with pytest.raises(CorpusError, match="item 2"):
            list(parallel(refuse, range(4)))
        with pytest.raises(StageError):
            list(parallel(killed, range(2)))
        assert list(parallel(refuse, [5, 4, 3])) == [5, 4, 3]
