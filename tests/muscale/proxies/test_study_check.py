"""What follows from the coordinate check of a study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale.proxies.study_check import _key, known_check
from muscale.store.ledger_tables import ResultKind
from muscale.study import Study
from tests.muscale.command_lines import muscale
from tests.muscale.planted import planted_check

MakeStudy = Callable[..., Path]


@pytest.mark.parametrize("growth", [0.5, 0.0])
def test_a_sweep_warns_of_a_check_that_failed(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str], growth: float
) -> None:
    path = make_study()
    study = Study.open(path, quiet=True)
    numerics = study.config.shared_numerics(study.corpus, study.directory)
    study.ledger.record_result(ResultKind.CHECK, _key(study.config, numerics), planted_check(growth).to_dict())
    check = known_check(study.config, numerics, study.ledger)
    assert check is not None
    assert check.passed is (growth == 0)
    done = muscale(capsys, "sweep", path, "--set", "sweep.max_tokens=1024")  # which pays for no trial
    assert done.code == 2
    assert (f"`muscale check {path}" in done.err) is not check.passed
