"""What a command does around its one call: opens the study, prints the result, turns it into an exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.options import Options
from muscale.errors import StudyFileError
from muscale.plain import finite

if TYPE_CHECKING:
    from muscale.study import Study


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
        shown = table["stage"] != "ablate" if name is None else table["stage"] == name  # no stage of `run`
        show(table[shown], as_json=options.json)
        return 0
    from muscale.study import Study

    result = stage(Study.open(path, options.set, quiet=options.json))
    show(result, as_json=options.json)
    return 1 if failed(result) else 0


def show(result: Any, *, as_json: bool) -> None:
    """Print a result, as JSON or as it shows itself."""
    import pandas as pd

    if as_json:
        plain = (
            result.to_dict("records")
            if isinstance(result, pd.DataFrame)
            else getattr(result, "to_dict", lambda: str(result))()
        )
        print(json.dumps(finite(plain), indent=1, default=str))
    elif isinstance(result, pd.DataFrame):
        print(result.to_string(index=False) if len(result) else "nothing to train")
    else:
        print(result)
