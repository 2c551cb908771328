"""The command `watch`, for a full run that was promoted here or is trained elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from muscale.cli.application import INSPECT, command
from muscale.cli.options import Flag, Options, StudyFile
from muscale.cli.running import run_stage
from muscale.errors import StudyFileError

if TYPE_CHECKING:
    from muscale.monitoring.run_status import RunStatus
    from muscale.study import Study


@command(INSPECT, example="muscale watch study.toml --until alarm")
def watch(
    study: StudyFile,
    *,
    losses: str | None = None,
    follow: Flag = False,
    until: Literal["now", "alarm", "end"] | None = None,
    plan: str | None = None,
    anneal_now: Flag = False,
    tokens_column: str | None = None,
    loss_column: str | None = None,
    every: float = 5.0,
    options: Options = Options(),
) -> int:
    """Compare a full run's loss with its forecast band while it trains.

    Exit code 0 if its loss is inside the band, 1 if it is outside or raises an alarm, 2 if there is no run.

    Args:
        losses: Losses of a run trained elsewhere: a CSV or .jsonl file with a column tokens or step, and a column loss or val_loss
            (held-out), train_loss, or both; or wandb:entity/project/run, with the key in WANDB_API_KEY. They are recorded as
            reported by the user, not verified.
        follow: With --losses, keep reading until the run has ended.
        until: Stop after one reading ("now"), at the first alarm or at the end ("alarm"), or when the run has ended ("end"). The
            default is "end", or "now" with --losses.
        plan: Key of a plan or an amended run; by default the plan whose run started last, or with --losses the plan of
            the study file and --set.
        anneal_now: Instead, forecast the final loss if the cooldown began now, over 10, 20 and 30 % more tokens.
        tokens_column: Column of tokens or steps; by default tokens or step.
        loss_column: Column of held-out losses; by default loss or val_loss.
        every: Seconds between two readings.
    """
    from muscale.monitoring.losses import LossSource

    if not every > 0:
        raise StudyFileError(f"--every: must be more than 0 seconds, got {every:g}")
    elsewhere = {"--follow": follow, "--tokens-column": tokens_column, "--loss-column": loss_column}
    if losses is None and (unused := [name for name, value in elsewhere.items() if value]):
        raise StudyFileError(f"{unused[0]}: needs --losses; the losses of a promoted run are in the study")
    if follow and until is not None:
        raise StudyFileError(f"--follow: can't be combined with --until, got --until {until}")
    if anneal_now:
        if losses or until:
            raise StudyFileError(f"--anneal-now: can't be combined with {'--losses' if losses else '--until'}")
        return run_stage(study, options, lambda opened: opened.anneal_now(plan), None)
    stop = until or ("end" if follow or losses is None else "now")
    source = losses and LossSource(
        losses=losses, tokens_column=tokens_column, loss_column=loss_column, growing=stop != "now"
    )

    def watched(opened: Study) -> RunStatus:
        from rich.console import Console

        from muscale.monitoring.follow import follow_run
        from muscale.monitoring.monitor import monitor_of

        console = None if options.json or stop == "now" else Console(file=sys.stderr)
        settings = opened.config.promote
        monitor = monitor_of(opened.contents, plan, source or None)
        return follow_run(monitor, until=stop, every=every, settings=settings, console=console)

    return run_stage(study, options, watched, None, lambda status: status.alarming or status.inside is False)
