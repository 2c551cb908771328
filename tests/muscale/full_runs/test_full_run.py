"""A full run's specification takes what [promote] and [resources] say, and by default what follows from the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError, StudyConfig
from muscale.full_runs.full_run import FullRun
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics


@pytest.mark.parametrize(
    ("settings", "compile"),
    [
        ([], False),
        (["resources.gpus_per_worker=1"], "auto"),
        (["resources.gpus_per_worker=1", "promote.compile=false"], False),
        (["resources.compile=true"], True),
    ],
)
def test_blocks_are_compiled_by_default_on_gpus_where_it_pays(
    make_study: Callable[..., Path], settings: list[str], compile: object
) -> None:
    path = make_study()
    config = StudyConfig.read(path, settings)
    numerics = Numerics(model=config.model, base=config.model, corpus_key="", seed=0, evaluation_tokens=1024)
    segments = chain(config.hyperparameters, 1 << 18)
    run = FullRun.of(config, numerics=numerics, segments=segments, directory=path.parent, corpus=path.parent)
    assert run.compile == compile


def test_a_rank_without_a_sequence_is_refused_unless_another_number_fits(make_study: Callable[..., Path]) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    numerics = Numerics(model=config.model, base=config.model, corpus_key="", seed=0, evaluation_tokens=1024)
    segments = chain(config.hyperparameters, 1 << 14)
    run = FullRun.of(config, numerics=numerics, segments=segments, directory=path.parent, corpus=path.parent)
    run.require_ranks((2, 9))
    with pytest.raises(StageError, match="9 ranks.*got 8"):
        run.require_ranks((9,))
