"""The command line: each command parses, calls one method of `Study`, and prints its result.

Exit codes: 0 done, 1 a check failed (coordinate check, transfer verdict, a run outside its forecast), 2 an error that the
user can mend, 75 a full run that was told to end (SIGTERM) and has saved, 130 interrupted otherwise (Ctrl-C, SIGTERM); the same
command goes on after both. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from muscale.errors import StudyFileError
from muscale.layout import STUDY_FILE

if TYPE_CHECKING:
    from muscale.study import Study

app = App(
    name="muscale",
    version=metadata.version("muscale"),
    suppress_keyboard_interrupt=False,
    help="Find the hyperparameters, the size, the tokens and the loss of a large training run, then prove it.",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every stage.

    Attributes:
        set: Replace a setting of the study file, `table.key=value`; may be repeated.
        json: Print the result as JSON.
        dry_run: Print what the stage would cost at most, and train nothing.
    """

    set: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = ()
    json: Annotated[bool, Parameter(name="--json", negative=())] = False
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative=())] = False


@app.command
def init(directory: Path, *, keep: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Write a copy of the quickstart's study file into a directory, to be edited.

    Args:
        directory: Created if it is not there.
        keep: Leave a study file that is there already as it is, instead of refusing.
    """
    from muscale.errors import StudyDirectoryError

    path = directory / STUDY_FILE
    if path.exists():
        if not keep:
            raise StudyDirectoryError(f"{path}: is there already; edit it, or pass --keep to leave it as it is")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text((resources.files("muscale") / "quickstart.toml").read_text())
    print(f"wrote {path}; next: muscale run {path}")
    return 0


@app.command
def wheel(folder: Path = Path("dist")) -> int:
    """Write this muscale as a wheel that `ray job submit` can ship to a cluster: muscale wheel dist.

    Args:
        folder: Created if it is not there.
    """
    from muscale.wheel import write_wheel

    print(write_wheel(folder))
    return 0


@app.command
def run(study: Path, *, force: Annotated[bool, Parameter(negative=())] = False, options: Options = Options()) -> int:
    """Run every stage, skipping what the ledger knows: muscale run runs/quickstart/study.toml.

    Args:
        study: The study file.
        force: Go on past a failed coordinate check or transfer verdict; the ledger keeps that it was forced.
    """

    def every_stage(opened: Study) -> Any:
        promoted = opened.run(force=force)
        if not options.json:
            print(f"report: {opened.directory / 'report.html'}")
        return promoted

    return _stage(study, options, every_stage, None, failed=lambda result: not result.inside)


@app.command
def check(study: Path, *, options: Options = Options()) -> int:
    """Run the coordinate check; exit code 1 if it fails."""
    return _stage(study, options, lambda opened: opened.check(), "check", failed=lambda result: not result.passed)


@app.command
def sweep(
    study: Path,
    *,
    narrow: Annotated[bool, Parameter(negative=())] = False,
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
    return _stage(study, options, lambda opened: opened.sweep(narrower=narrow, learn_from=learn_from), "sweep")


@app.command
def transfer(study: Path, *, options: Options = Options()) -> int:
    """Check that the best learning rate stays put across widths and depths; exit code 1 unless it does."""
    return _stage(study, options, lambda opened: opened.transfer(), "transfer", failed=lambda result: not result.passed)


@app.command
def ladder(study: Path, *, options: Options = Options()) -> int:
    """Train the runs that the law is fitted from."""
    return _stage(study, options, lambda opened: opened.ladder(), "ladder")


@app.command
def fit(study: Path, *, options: Options = Options()) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to the tuned runs."""
    return _stage(study, options, lambda opened: opened.fit(), "fit")


@app.command
def plan(study: Path, *, options: Options = Options()) -> int:
    """Decide the full run for the budget, and register its forecast."""
    return _stage(study, options, lambda opened: opened.plan(), "promote")


@app.command
def promote(
    study: Path, *, force: Annotated[bool, Parameter(negative=())] = False, options: Options = Options()
) -> int:
    """Train the planned run and hold it against its forecast; exit code 1 if it ends outside the interval.

    Args:
        study: The study file.
        force: Promote without a passed transfer verdict; the ledger keeps that it was forced.
    """
    return _stage(
        study, options, lambda opened: opened.promote(force=force), "promote", failed=lambda result: not result.inside
    )


@app.command
def report(study: Path, *, options: Options = Options()) -> int:
    """Write report.html from what the ledger knows; trains nothing."""
    return _stage(study, options, lambda opened: opened.report(), "report")


@app.command
def runs(study: Path, *, options: Options = Options()) -> int:
    """Print the ledger's runs as a table."""

    def table(opened: Study) -> Any:
        if (again := opened.ledger.retrained()) and not options.json:
            print(
                f"{len(again)} times a pruned state was trained again, {sum(row['tokens'] for row in again):,} tokens in all"
            )
        hidden = ["hyperparameters", "source_losses", "numerics", "segment", "environment", "diverged_because"]
        return opened.runs().drop(columns=hidden)

    return _stage(study, options, table, "runs")


@app.command
def gc(study: Path, *, options: Options = Options()) -> int:
    """Remove training states that nothing goes on from, or with --dry-run only show what would go; results stay."""
    removes = replace(options, dry_run=False)  # of which the other dry run, of costs, knows nothing
    return _stage(study, removes, lambda opened: opened.gc(dry_run=options.dry_run), None)


@app.command
def merge(study: Path, *, source: Annotated[Path, Parameter(name="--from")], options: Options = Options()) -> int:
    """Add what another ledger of the same study knows: muscale merge study.toml --from ../colleague.

    Args:
        study: The study file.
        source: Another study's directory, or its ledger.sqlite; it is only read.
    """
    if options.dry_run:
        raise StudyFileError("merge: --dry-run is for what costs compute or removes something; a merge does neither")
    return _stage(study, options, lambda opened: opened.merge(source), None)


def _stage(
    path: Path,
    options: Options,
    stage: Callable[[Study], Any],
    name: str | None,
    failed: Callable[[Any], bool] = lambda result: False,
) -> int:
    """Open the study, call one method of it, print what it returns."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not path.is_absolute():
        raise StudyFileError(
            f"{path}: a job of Ray runs in {Path.cwd()}; give the study file by its absolute path on a file system that "
            "every node has"
        )
    if options.dry_run:
        from muscale.config import StudyConfig
        from muscale.costs import estimate

        table = estimate(StudyConfig.read(path, options.set))
        _show(table if name is None else table[table["stage"] == name], as_json=options.json)
        return 0
    from muscale.study import Study

    result = stage(Study.open(path, options.set, quiet=options.json))
    _show(result, as_json=options.json)
    return 1 if failed(result) else 0


def _show(result: Any, *, as_json: bool) -> None:
    import pandas as pd

    if as_json:
        plain = (
            result.to_dict("records")
            if isinstance(result, pd.DataFrame)
            else getattr(result, "to_dict", lambda: str(result))()
        )
        print(json.dumps(_finite(plain), indent=1, default=str))
    elif isinstance(result, pd.DataFrame):
        print(result.to_string(index=False) if len(result) else "nothing to train")
    else:
        print(result)


def _finite(value: Any) -> Any:
    """JSON has no NaN: null in its place."""
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM is a Ctrl-C: `ray job stop` and batch systems send it."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the command `muscale`."""
    from muscale.errors import EXIT_PREEMPTED, MuscaleError, PreemptedError

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(result_action="return_value")
    except PreemptedError as error:
        print(error, file=sys.stderr)
        code = EXIT_PREEMPTED
    except MuscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        code = 130
    sys.exit(code)
