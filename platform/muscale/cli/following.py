"""Commands that look at a full run, here or elsewhere, while it goes and afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from muscale.cli.application import LOOK, command
from muscale.cli.options import Flag, Options
from muscale.cli.running import refuse_dry_run, run_stage
from muscale.errors import StudyFileError

if TYPE_CHECKING:
    from muscale.monitoring.following import Until
    from muscale.monitoring.watch import Watch, Watcher
    from muscale.study import Study


@command(LOOK, example="muscale watch study.toml --until alarm")
def watch(
    study: Path,
    *,
    until: Literal["now", "alarm", "end"] = "end",
    plan: str | None = None,
    every: float = 5.0,
    options: Options = Options(),
) -> int:
    """Show the full run beside its band; exit code 0 if its loss is inside, 1 outside or at an alarm, 2 if there is no run.

    Args:
        study: The study file.
        until: Look once ("now"), or until the run has ended, or is alarming; "alarm" ends with the run, too.
        plan: Key of a plan; by default the one whose run was begun last, here or elsewhere.
        every: Seconds between two looks.
    """
    refuse_dry_run("a watch", options)
    _require_interval(every)
    return run_stage(
        study, options, lambda opened: _followed(opened, opened.watcher(plan), until, every, options), None, _alarming
    )


@command(LOOK, example="muscale observe study.toml losses.csv --follow")
def observe(
    study: Path,
    source: str,
    *,
    follow: Flag = False,
    wandb: Flag = False,
    plan: str | None = None,
    tokens: str | None = None,
    loss: str | None = None,
    every: float = 5.0,
    options: Options = Options(),
) -> int:
    """Hold a full run that goes on elsewhere against its plan.

    What it says is marked as asserted, here and for ever. Exit codes as those of `watch`.

    Args:
        study: The study file.
        source: A CSV file with a column tokens or step, and loss or val_loss (held-out), train_loss or both.
        follow: Go on reading while the file grows, until the run has ended.
        wandb: The source is a run of Weights & Biases, entity/project/run; its key is in WANDB_API_KEY.
        plan: Key of the plan that the run follows, by default the one registered last.
        tokens: Name of the column of tokens or steps, if it is another.
        loss: Name of the column of held-out losses, if it is another.
        every: Seconds between two looks.
    """
    from muscale.monitoring.observe import read_csv, read_wandb

    refuse_dry_run("an observation", options)
    _require_interval(every)

    def observed(opened: Study) -> Any:
        observer = opened.observer(source if wandb else os.path.realpath(source), plan)

        def take() -> None:
            named = {"tokens": tokens, "loss": loss}
            rows = read_wandb(source, **named) if wandb else read_csv(Path(source), growing=follow, **named)
            observer.take(rows)

        take()
        until: Literal["now", "end"] = "end" if follow else "now"
        return _followed(opened, opened.watcher(observer.plan.key), until, every, options, take)

    return run_stage(study, options, observed, None, _alarming)


def _require_interval(every: float) -> None:
    if not every > 0:
        raise StudyFileError(f"--every: must be more than 0 seconds, got {every:g}")


def _followed(
    opened: Study,
    watcher: Watcher,
    until: Until,
    every: float,
    options: Options,
    before_look: Callable[[], None] = lambda: None,
) -> Watch:
    """The run as it stands at the end of the watching; shown on standard error meanwhile."""
    from rich.console import Console

    from muscale.monitoring.following import follow

    console = None if options.json or until == "now" else Console(file=sys.stderr)
    return follow(
        watcher,
        until=until,
        every=every,
        settings=opened.config.promote,
        console=console,
        before_look=before_look,
    )


def _alarming(watch: Watch) -> bool:
    return watch.alarming or watch.inside is False
