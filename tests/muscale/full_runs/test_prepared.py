"""A run that is prepared here is trained without Ray, and then recorded as any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError, Study
from muscale.full_runs.prepared import prepare, read, train_here
from muscale.full_runs.promotion import begin, promote
from muscale.layout import FULL_RUNS, RESULT
from tests.muscale.planted_ladder import registered_plan

MakeStudy = Callable[..., Path]
SMALL = ("ladder.stems=[{width=16, n_tokens=16384}]", "plan.compute_flops=2e9")
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_torchrun_s_ranks_train_as_one_process_does_and_the_promotion_is_recorded(make_study: MakeStudy) -> None:
    path = make_study()
    study = Study.open(path, SMALL, quiet=True)
    plan = registered_plan(path, study.ledger, *SMALL)
    told = {"verdict": "pass", "forced": False, "gate": None}
    begin(plan, study.config, study.ledger, **told)  # type: ignore[arg-type]
    directory = study.directory / FULL_RUNS / plan.key
    prepared = prepare(plan, study.config, study.numerics, directory)
    assert f"torchrun --nproc-per-node 2 -m muscale train {prepared.path}" in str(prepared)
    moved = study.directory.with_name("elsewhere")  # as to the machine that trains
    shutil.copytree(study.directory, moved)

    together = subprocess.run(
        [*RANKS, "-m", "muscale", "train", prepared.path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert together.returncode == 0, together.stderr
    assert together.stdout.count("`muscale promote` records it") == 1
    result = json.loads((directory / RESULT).read_text())
    single = train_here(moved / FULL_RUNS / plan.key / "prepared.json")
    assert (result["environment"]["world_size"], single["environment"]["world_size"]) == (2, 1)
    assert result["loss"] == pytest.approx(single["loss"], rel=1e-5)

    promotion = promote(plan, study.config, study.ledger, study.numerics, **told)  # type: ignore[arg-type]
    assert (promotion.loss, promotion.world_size) == (result["loss"], 2)
    assert study.ledger.result("promotion", plan.key) is not None


def test_a_file_that_is_no_prepared_run_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "prepared.json"
    path.write_text('{"plan": 3}')
    with pytest.raises(
        StageError, match=r"prepared\.json: can't be read as what `muscale promote --prepare` writes: TypeError"
    ):
        read(path)
    with pytest.raises(StageError, match=r"nothing\.json: there is no such file"):
        read(path.with_name("nothing.json"))
