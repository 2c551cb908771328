"""The overview of a study: its stages, their results and their cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import muscale
from muscale import Study
from muscale.plans.costs import estimate


def test_a_new_study_lists_missing_stages_and_their_cost(make_study: Callable[[], Path]) -> None:
    path = make_study()
    study = Study.open(path, {"sweep.trials": 3}, quiet=True)
    assert str(study).splitlines() == [
        f"study     micro, in {path.parent}",
        "check     not yet",
        "forecast  not yet",
    ]
    assert study._repr_html_().startswith("<pre>study     micro")
    costs = estimate(study.config).set_index("stage")
    assert costs.loc["sweep", "runs"] == 3
    assert costs.loc["promote", "compute_flops"] == study.config.plan.budget.compute_flops


def test_what_a_stage_returns_shows_itself_in_a_notebook() -> None:
    without = {"StudyConfig", *(name for name in muscale.__all__ if name.endswith("Error") or name.islower())}
    for name in set(muscale.__all__) - without:
        shown = {"_repr_html_", "_repr_pretty_"}  # in IPython's console, the second
        assert shown <= set(dir(getattr(muscale, name))), name
