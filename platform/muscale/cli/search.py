"""Commands of the search, and of all stages at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from muscale.cli.application import app
from muscale.cli.options import Flag, Options
from muscale.cli.running import run_stage

if TYPE_CHECKING:
    from muscale.study import Study


@app.command
def run(study: Path, *, force: Flag = False, options: Options = Options()) -> int:
    """Run every stage, skipping what the ledger knows: muscale run runs/quickstart/study.toml.

    Args:
        study: The study file.
        force: Go on past a failed coordinate check or a closed gate; the ledger keeps which lines were forced.
    """

    def every_stage(opened: Study) -> Any:
        promoted = opened.run(force=force)
        if not options.json:
            print(f"report: {opened.directory / 'report.html'}")
        return promoted

    return run_stage(study, options, every_stage, None, failed=lambda result: not result.inside)


@app.command
def check(study: Path, *, options: Options = Options()) -> int:
    """Run the coordinate check; exit code 1 if it fails."""
    return run_stage(study, options, lambda opened: opened.check(), "check", failed=lambda result: not result.passed)


@app.command
def sweep(
    study: Path,
    *,
    narrow: Flag = False,
    learn_from: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    options: Options = Options(),
) -> int:
    """Search the space at the base shape: muscale sweep study.toml --set sweep.trials=64.

    Args:
        study: The study file.
        narrow: Where nothing of it is left to do, search as much again around the best region, in the same table; else
            only finish it.
        learn_from: Another study of the same corpus and family whose runs inform the searcher: its file, its directory or
            its ledger.sqlite; may be repeated.
    """
    return run_stage(study, options, lambda opened: opened.sweep(narrower=narrow, learn_from=learn_from), "sweep")


@app.command
def ablate(study: Path, *, options: Options = Options()) -> int:
    """Swap one component of the model at a time, over seeds: muscale ablate study.toml --set ablate.components='["norm"]'."""
    return run_stage(study, options, lambda opened: opened.ablate(), "ablate")
