"""Commands of the search, and `run` for all stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import SEARCH, command
from muscale.cli.ending import Ending
from muscale.cli.full_run import after_promotion
from muscale.cli.options import Columns, Flag, Numbers, Paths, StageOptions, StudyFile
from muscale.cli.running import run_stage
from muscale.errors import StudyFileError
from muscale.layout import REPORT

if TYPE_CHECKING:
    from muscale.study import Study


@command(SEARCH, example="muscale run runs/quickstart/study.toml")
def run(study: StudyFile, *, force: Flag = False, options: StageOptions = StageOptions()) -> int:
    """Run all stages; finished work is reused.

    Args:
        force: Continue despite a failed coordinate check or a closed gate; the ledger records the failed conditions.
    """

    def ending(opened: Study, promoted: Any) -> Ending:
        wrote = {"report": opened.directory / REPORT}
        if opened.config.trainer:
            return Ending(wrote=wrote, next=(options.line("plan", study, "--export", "full-run"),))
        return after_promotion(opened, promoted, study, options, wrote)

    return run_stage(
        study,
        options,
        lambda opened: opened.run(force=force),
        "run",
        failed=lambda result: not getattr(result, "inside", True),  # a plan is what a study with [trainer] ends with
        ending=ending,
        trains=True,
    )


@command(SEARCH, example="muscale check study.toml")
def check(study: StudyFile, *, options: StageOptions = StageOptions()) -> int:
    """Run the coordinate check; exit code 1 if it fails."""
    return run_stage(
        study,
        options,
        lambda opened: opened.check(),
        "check",
        failed=lambda result: not result.passed,
        ending=lambda _, result: Ending(next=(options.line("sweep" if result.passed else "report", study),)),
        trains=True,
    )


@command(SEARCH, example="muscale sweep study.toml --set sweep.trials=64")
def sweep(
    study: StudyFile,
    *,
    narrow: Flag = False,
    learn_from: Paths = (),
    cancel: Numbers = (),
    columns: Columns = Columns(),
    options: StageOptions = StageOptions(),
) -> int:
    """Search the hyperparameter space at the base shape.

    Args:
        narrow: Search again around the best region of a finished sweep. If the sweep is unfinished, only finish it.
        learn_from: Prior runs that warm-start the searcher: another study with the same corpus and family (file, directory or
            ledger.sqlite), an Optuna storage, or a CSV, Parquet or JSON Lines file with loss and every searched
            hyperparameter. May be repeated.
        cancel: Stop trial N at its next rung and never train it further; its results are kept. The command itself trains nothing.
            May be repeated.
    """
    if cancel:
        if narrow or learn_from or options.dry_run:
            raise StudyFileError(
                "sweep: --cancel cannot be combined with --narrow, --learn-from or --dry-run; leave them out"
            )
        again = Ending(next=(options.line("sweep", study),))
        return run_stage(study, options, lambda opened: _cancelled(opened, cancel), None, ending=lambda *_: again)
    from muscale.importers.imported_space import place_of

    if columns.to_dict() and not learn_from:
        raise StudyFileError("sweep: column names are for a table given with --learn-from, and there is none")
    if missing := [path for path in learn_from if not (path.exists() or Path(place_of(str(path))[0]).exists())]:
        raise StudyFileError(f"sweep: --learn-from {missing[0]}: there is no such file or directory")
    return run_stage(
        study,
        options,
        lambda opened: opened.sweep(narrower=narrow, learn_from=learn_from, columns=columns.to_dict()),
        "sweep --narrow" if narrow else "sweep",
        ending=lambda *_: Ending(
            next=(
                options.line("transfer", study),
                options.line("sweep", study, "--narrow"),
                options.line("report", study),
            )
        ),
        trains=True,
    )


def _cancelled(opened: Study, trials: Sequence[int]) -> Any:
    """Cancel trials, and return them as a table."""
    import pandas as pd

    for trial in trials:
        opened.cancel_trial(trial, "by muscale sweep --cancel")
    return pd.DataFrame({"cancelled_trial": trials})


@command(SEARCH, example="muscale transfer study.toml --dry-run")
def transfer(study: StudyFile, *, options: StageOptions = StageOptions()) -> int:
    """Check whether the best learning rate transfers across widths and depths; exit code 1 if it does not."""
    return run_stage(
        study,
        options,
        lambda opened: opened.transfer(),
        "transfer",
        failed=lambda result: not result.passed,
        ending=lambda _, result: Ending(
            next=tuple(options.line(then, study) for then in (("ladder", "report") if result.passed else ("report",)))
        ),
        trains=True,
    )
