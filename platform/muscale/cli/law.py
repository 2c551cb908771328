"""Commands of the law: transfer, ladder, fit, plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import app
from muscale.cli.options import Options
from muscale.cli.running import run_stage

if TYPE_CHECKING:
    from muscale.study import Study


@app.command
def transfer(study: Path, *, options: Options = Options()) -> int:
    """Check that the best learning rate stays put across widths and depths; exit code 1 unless it does."""
    return run_stage(
        study, options, lambda opened: opened.transfer(), "transfer", failed=lambda result: not result.passed
    )


@app.command
def ladder(study: Path, *, options: Options = Options()) -> int:
    """Train the runs that the law is fitted from."""
    return run_stage(study, options, lambda opened: opened.ladder(), "ladder")


@app.command
def fit(study: Path, *, options: Options = Options()) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to the tuned runs."""
    return run_stage(study, options, lambda opened: opened.fit(), "fit")


@app.command
def plan(study: Path, *, export: Path | None = None, options: Options = Options()) -> int:
    """Decide the full run for the budget, register its forecast, write its file, and say which runs would make it surer.

    Args:
        study: The study file.
        export: Also write the plan into this folder for another framework: every tensor's values and the schedule.
    """

    def planned(opened: Study) -> Any:
        plan = opened.plan()
        if export:
            opened.export(export, plan)
        if options.json:
            return plan
        return f"{plan}\n  written to {opened.plan_path(plan)}\n{opened.band(plan)}\n{opened.next_runs(plan)}"

    return run_stage(study, options, planned, "promote")
