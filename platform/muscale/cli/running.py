"""What a command does around its one call: opens the study, prints the result, turns it into an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.ending import Ending, tell
from muscale.cli.options import Options
from muscale.errors import StudyFileError
from muscale.formatting import finite

if TYPE_CHECKING:
    from muscale.study import Study

_Ending = Callable[["Study", Any], Ending]


def refuse_dry_run(what: str, options: Options) -> None:
    """Refuse --dry-run for what it can't mean.

    Raises:
        StudyFileError: If it was given.
    """
    if options.dry_run:
        raise StudyFileError(f"--dry-run is for what costs compute or removes something; {what} does neither")


def run_stage(
    path: Path,
    options: Options,
    stage: Callable[[Study], Any],
    name: str | None,
    failed: Callable[[Any], bool] = lambda result: False,
    *,
    ending: _Ending = lambda opened, result: Ending(),
    empty: str = "nothing to train",
) -> int:
    """Open the study, call one method of it, print what it returns and how to go on.

    Args:
        path: The study file.
        options: Of the command line.
        stage: Calls the method.
        name: Of the stage whose cost a dry run tells; None: of all of them.
        failed: Whether the result is an exit code 1.
        ending: The last lines; not told with --json.
        empty: Is printed for a table without rows.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not path.is_absolute():
        raise StudyFileError(
            f"{path}: a job of Ray runs in {Path.cwd()}; give the study file by its absolute path on a file system that "
            "every node has"
        )
    with result_alone(options.json):
        if options.dry_run:
            from muscale.plans.costs import estimate
            from muscale.settings.config import StudyConfig

            table = estimate(StudyConfig.read(path, options.set))
            result = table[table["stage"] != "ablate" if name is None else table["stage"] == name]  # no stage of `run`
        else:
            from muscale.study import Study

            opened = Study.open(path, options.set, quiet=options.json)
            result = stage(opened)
    show(result, as_json=options.json, empty=empty)
    if options.dry_run:
        return 0
    if not options.json:
        tell(ending(opened, result))
    return 1 if failed(result) else 0


@contextmanager
def result_alone(as_json: bool) -> Iterator[None]:
    """With --json, send what libraries and their processes print in the block to standard error, so that stdout stays JSON."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show(result: Any, *, as_json: bool, empty: str = "") -> None:
    """Print a result, as JSON or as it shows itself; pandas is not imported for those that are no table."""
    if as_json:
        print(json.dumps(finite(_plain(result)), indent=1, default=str))
    elif hasattr(result, "to_string"):
        print(result.to_string(index=False) if len(result) else empty)
    else:
        print(result)


def _plain(result: Any) -> Any:
    if hasattr(result, "to_string"):
        return result.to_dict("records")
    if isinstance(result, Mapping):
        return dict(result)
    return getattr(result, "to_dict", lambda: str(result))()
