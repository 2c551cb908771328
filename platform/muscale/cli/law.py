"""Commands of the law and of the decision that it leads to: ladder, fit, plan, calibration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import LAW, command
from muscale.cli.ending import Ending, line
from muscale.cli.options import Options
from muscale.cli.running import refuse_dry_run, run_stage
from muscale.errors import StudyFileError

if TYPE_CHECKING:
    from muscale.study import Study


@command(LAW, example="muscale ladder study.toml --dry-run")
def ladder(study: Path, *, options: Options = Options()) -> int:
    """Train the runs that the law is fitted from.

    Args:
        study: The study file.
    """
    return run_stage(
        study,
        options,
        lambda opened: opened.ladder(),
        "ladder",
        ending=lambda *_: Ending(next=(line("fit", study),)),
    )


@command(LAW, example="muscale fit study.toml --set fit.max_regret=0.01")
def fit(study: Path, *, options: Options = Options()) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to the tuned runs.

    Args:
        study: The study file.
    """
    return run_stage(
        study, options, lambda opened: opened.fit(), "fit", ending=lambda *_: Ending(next=(line("plan", study),))
    )


@command(LAW, example="muscale plan study.toml --set plan.compute_flops=1e21")
def plan(study: Path, *, export: Path | None = None, options: Options = Options()) -> int:
    """Decide the full run for the budget, register its forecast, write its file, and say which runs would make it surer.

    Args:
        study: The study file.
        export: Also write the plan into this folder for another framework: every tensor's values and the schedule.
    """
    if export and export.exists() and not export.is_dir():
        raise StudyFileError(f"plan: --export {export}: is a file; give a folder")
    wrote: dict[str, Path] = {}

    def planned(opened: Study) -> Any:
        plan = opened.plan()
        wrote["plan"] = opened.plan_path(plan)
        if export:
            wrote["for other frameworks"] = opened.export(export, plan)
        return plan if options.json else f"{plan}\n{opened.band(plan)}\n{opened.next_runs(plan)}"

    def ending(_opened: Study, _result: Any) -> Ending:
        return Ending(wrote=wrote, next=(line("promote", study, "--dry-run"), line("promote", study)))

    return run_stage(study, options, planned, "promote", ending=ending)


@command(LAW, example="muscale calibration study.toml ../other-study")
def calibration(study: Path, *others: Path, options: Options = Options()) -> int:
    """Print how often the forecasts of promoted runs held, of this study and of others.

    Args:
        study: The study file.
        others: Further studies: their files, directories or ledgers, which are only read.
    """
    refuse_dry_run("a calibration", options)
    return run_stage(study, options, lambda opened: opened.calibration(*others), None)
