"""What follows from the coordinate check of a study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muscale.findings import Findings
from muscale.pages.contents import gather
from muscale.pages.overview import overview
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


def test_pages_show_the_check_of_the_settings_that_the_study_has(make_study: MakeStudy) -> None:
    """Back at earlier settings, whose check is not recorded again, the latest check is that of others."""
    path = make_study()
    settings: list[dict[str, Any]] = [{}, {"check.widths": [16, 32, 64, 256]}]
    for overrides, growth in zip(settings, (0.0, 0.5), strict=True):
        study = Study.open(path, overrides, quiet=True)
        numerics = study.config.shared_numerics(study.corpus, study.directory)
        study.ledger.record_result(ResultKind.CHECK, _key(study.config, numerics), planted_check(growth).to_dict())
    for overrides, passed in zip(settings, (True, False), strict=True):
        contents = Study.open(path, overrides, quiet=True).contents
        check = gather(contents, Findings()).check
        assert check is not None
        assert check.passed is passed
        assert f"check{'':5}{'passed' if passed else 'failed'}" in overview(contents)
    assert gather(Study.open(path, {"check.widths": [16, 32, 64, 512]}, quiet=True).contents, Findings()).check is None
