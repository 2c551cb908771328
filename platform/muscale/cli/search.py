"""Commands of the search, and of all stages at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import SEARCH, command
from muscale.cli.ending import Ending, line
from muscale.cli.options import Flag, Options, Paths
from muscale.cli.running import run_stage
from muscale.errors import StudyFileError
from muscale.layout import BUNDLES, REPORT

if TYPE_CHECKING:
    from muscale.study import Study


@command(SEARCH, example="muscale run runs/quickstart/study.toml")
def run(study: Path, *, force: Flag = False, options: Options = Options()) -> int:
    """Run every stage, skipping what the ledger knows.

    Args:
        study: The study file.
        force: Go on past a failed coordinate check or a closed gate; the ledger keeps which lines were forced.
    """

    def ending(opened: Study, promoted: Any) -> Ending:
        bundle = opened.directory / BUNDLES / promoted.plan
        wrote = {"report": opened.directory / REPORT}
        if not bundle.exists():
            return Ending(wrote=wrote, next=(line("bundle", study),))
        return Ending(wrote=wrote | {"bundle": bundle}, next=(line("generate", bundle),))

    return run_stage(
        study,
        options,
        lambda opened: opened.run(force=force),
        None,
        failed=lambda result: not result.inside,
        ending=ending,
    )


@command(SEARCH, example="muscale check study.toml")
def check(study: Path, *, options: Options = Options()) -> int:
    """Run the coordinate check; exit code 1 if it fails.

    Args:
        study: The study file.
    """
    return run_stage(
        study,
        options,
        lambda opened: opened.check(),
        "check",
        failed=lambda result: not result.passed,
        ending=lambda _, result: Ending(next=(line("sweep" if result.passed else "report", study),)),
    )


@command(SEARCH, example="muscale sweep study.toml --set sweep.trials=64")
def sweep(
    study: Path,
    *,
    narrow: Flag = False,
    learn_from: Paths = (),
    options: Options = Options(),
) -> int:
    """Search the space at the base shape.

    Args:
        study: The study file.
        narrow: Where nothing of it is left to do, search as much again around the best region, in the same table; else
            only finish it.
        learn_from: Another study of the same corpus and family whose runs inform the searcher: its file, its directory or
            its ledger.sqlite; or results from outside: a CSV, Parquet or JSON Lines file with loss and every searched
            hyperparameter, or a storage of Optuna's. May be repeated.
    """
    from muscale.importers.imported_space import place_of

    if missing := [path for path in learn_from if not (path.exists() or Path(place_of(str(path))[0]).exists())]:
        raise StudyFileError(f"sweep: --learn-from {missing[0]}: there is no such file or directory")
    return run_stage(
        study,
        options,
        lambda opened: opened.sweep(narrower=narrow, learn_from=learn_from),
        "sweep",
        ending=lambda *_: Ending(next=(line("transfer", study), line("sweep", study, "--narrow"))),
    )


@command(SEARCH, example="muscale transfer study.toml --dry-run")
def transfer(study: Path, *, options: Options = Options()) -> int:
    """Check that the best learning rate stays put across widths and depths; exit code 1 unless it does.

    Args:
        study: The study file.
    """
    return run_stage(
        study,
        options,
        lambda opened: opened.transfer(),
        "transfer",
        failed=lambda result: not result.passed,
        ending=lambda _, result: Ending(next=(line("ladder" if result.passed else "report", study),)),
    )


@command(SEARCH, example="""muscale ablate study.toml --set ablate.components='["norm"]'""")
def ablate(study: Path, *, options: Options = Options()) -> int:
    """Swap one component of the model at a time, over seeds.

    Args:
        study: The study file.
    """
    return run_stage(
        study,
        options,
        lambda opened: opened.ablate(),
        "ablate",
        ending=lambda *_: Ending(next=(line("report", study),)),
    )
