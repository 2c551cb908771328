"""The steps that all study commands share: open the study, call one method, print its result, return the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.ending import Ending, print_ending
from muscale.cli.options import Options, StageOptions
from muscale.commands import StudyCommands
from muscale.errors import StudyFileError
from muscale.formatting import finite
from muscale.layout import LEDGER, LEDGER_PLACE

if TYPE_CHECKING:
    from muscale.settings.config import StudyConfig
    from muscale.study import Study

_Ending = Callable[["Study", Any], Ending]


def run_stage(
    path: Path,
    options: Options,
    stage: Callable[[Study], Any],
    name: str | None,
    failed: Callable[[Any], bool] = lambda result: False,
    *,
    ending: _Ending = lambda opened, result: Ending(),
    empty: str = "nothing to train",
    trains: bool = False,
) -> int:
    """Open the study, call one of its methods, print the result and the next command.

    Args:
        path: The study file.
        options: Options from the command line.
        stage: Calls the method.
        name: The command's name. A dry run then prints its cost and the cost of the stages before it. With None, a dry run calls
            `stage` too.
        failed: Whether the result means exit code 1.
        ending: Returns the last lines, which are not printed with --json.
        empty: Printed instead of a table without rows.
        trains: Whether to import the model family that the file names; commands that only read do not import it.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not path.is_absolute():
        raise StudyFileError(
            f"{path}: must be an absolute path on a file system that every node has, as this Ray job runs in {Path.cwd()}"
        )
    dry_run = name if isinstance(options, StageOptions) and options.dry_run else None
    commands = options.commands(path)
    with result_alone(options.json), commands.completing():
        if dry_run:
            from muscale.settings.config import StudyConfig

            config = StudyConfig.read(path, options.set, trains=trains)
            result: Any = upper_costs(dry_run, config, path, as_json=options.json)
        else:
            from muscale.study import Study

            opened = Study.open(path, options.set, quiet=options.json, trains=trains)
            result = stage(opened)
    show(result, as_json=options.json, empty=empty, commands=commands)
    if dry_run:
        return 0
    if not options.json:
        print_ending(ending(opened, result))
    return 1 if failed(result) else 0


def upper_costs(stage: str, config: StudyConfig, path: Path, *, as_json: bool) -> Any:
    """Return upper bounds of the costs of a stage and the stages before it, as a table or as text with three digits and warnings."""
    from muscale.plans.costs import cost_of, dry_numerics, with_device_hours, with_total
    from muscale.proxies.ladder import planned_warmup_warning

    table = with_total(with_device_hours(cost_of(stage, config), config, path))
    if as_json or table.empty:
        return table
    text = table.to_string(index=False, float_format="{:.3g}".format)
    warning = planned_warmup_warning(config, dry_numerics(config))
    return f"{text}\nwarning: {warning}" if warning else text


def is_begun(path: Path) -> bool:
    """Return whether a study has a ledger. Without one, a dry run reads only the study file and writes nothing."""
    return any((path.parent / name).exists() for name in (LEDGER, LEDGER_PLACE))


@contextmanager
def result_alone(as_json: bool) -> Iterator[None]:
    """With --json, redirect the output of libraries and their processes to standard error, so that stdout has only JSON."""
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


def show(result: Any, *, as_json: bool, empty: str = "", commands: StudyCommands | None = None) -> None:
    """Print a result as JSON, as a table or by its `str()`, without importing pandas.

    Args:
        commands: Completes the commands that the result names.
    """
    if as_json:
        values = finite(_plain(result))
        print(json.dumps(commands.completed_values(values) if commands else values, indent=1, default=str))
    elif hasattr(result, "to_string"):
        print(result.to_string(index=False, na_rep="–") if len(result) else empty)
    else:
        print(commands.completed(str(result)) if commands else result)


def _plain(result: Any) -> Any:
    if hasattr(result, "to_string"):
        return result.to_dict("records")
    if isinstance(result, Mapping):
        return {name: _plain(value) for name, value in result.items()}
    return getattr(result, "to_dict", lambda: result)()
