"""Follows a run: raises alarms for `muscale watch` or the run's driver, and shows a live view in the terminal."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muscale.background import in_background
from muscale.errors import LedgerUnavailableError, PreemptedError, StageError
from muscale.full_runs.records.alarms import Alarm, known_alarms, raise_alarms
from muscale.interrupts import enable_sigint
from muscale.monitoring.monitor import Monitor
from muscale.monitoring.run_status import RunStatus, format_evaluation
from muscale.settings.promote import PromoteSettings
from muscale.store.ledger import Ledger

Until = Literal["now", "alarm", "end"]
_GUARD_SECONDS = 2.0
_SHOWN = 8  # evaluations shown in the live view
_PLACES = 31  # width of the band in the live view, in characters
_log = logging.getLogger(__name__)


def follow_run(
    monitor: Monitor, *, until: Until, every: float, settings: PromoteSettings, console: Console | None = None
) -> RunStatus:
    """Check the run repeatedly and raise alarms until the run ends, with "alarm" until its loss alarms, with "now" once.

    Args:
        every: Seconds between two checks.
        settings: [promote], for the webhook.
        console: Console for the run, live in a terminal and otherwise line by line; None: no output.
    """
    printed: set[str] = set()

    def say(line: str) -> None:
        if console is None:
            _log.warning("%s", line)
        else:
            console.print(line, soft_wrap=True, highlight=False, markup=False)  # above a live view

    shown = Live(console=console, auto_refresh=False) if console and console.is_terminal else nullcontext()
    evaluated = 0
    with shown as live:
        while True:
            status = monitor.look()
            new = [alarm for alarm in status.alarms if alarm.key not in printed]
            for line in raise_alarms(monitor.ledger, new, webhook=settings.webhook):
                say(line)
            printed |= {alarm.key for alarm in new}
            if live:
                live.update(view(status), refresh=True)
            elif console and until != "now" and len(status.evaluations) > evaluated:
                new_rows = status.evaluations.iloc[evaluated:].tail(_SHOWN).to_dict("records")
                for line in (str(status).splitlines()[0], *map(format_evaluation, new_rows)):
                    say(line)
            if console and not live and until != "now":
                for event in status.run_events:
                    if event.kind != "alarm" and str(event) not in printed:
                        say(str(event))
                        printed.add(str(event))
            evaluated = len(status.evaluations)
            if until == "now" or status.ended or (until == "alarm" and status.alarming):
                return status
            time.sleep(every)


def view(status: RunStatus) -> RenderableType:
    """The live view of a run for the terminal."""
    table = Table(box=None, pad_edge=False)
    for title in ("tokens", "share", "loss", "low", "expected", "high"):
        table.add_column(title, justify="right")
    table.add_column("in the band")
    for row in status.evaluations.tail(_SHOWN).to_dict("records"):
        in_band = row["place"] != "before the band"
        limits = [f"{row[name]:.4f}" if in_band else "–" for name in ("low", "expected", "high")]
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['share']:.1%}",
            f"{row['loss']:.4f}",
            *limits,
            _in_band(row["loss"], row["low"], row["high"]) if in_band else Text("before the band", style="dim"),
        )
    head = Text(str(status).splitlines()[0], style="bold")
    return Group(
        head,
        ProgressBar(total=status.n_tokens, completed=min(status.tokens, status.n_tokens), width=60),
        Text(str(status.band), style="dim"),
        table,
        *(Text(str(event), style="red") for event in status.run_events[-_SHOWN:]),
        *(Text(warning, style="red") for warning in (status.experts, status.failure) if warning),
    )


def _in_band(loss: float, low: float, high: float) -> Text:
    """Mark the loss on a line from the low to the high bound of the band; a loss outside the band is marked next to the line."""
    share = (loss - low) / (high - low)
    at = round(min(max(share, -0.1), 1.1) * (_PLACES - 1))
    outside = not 0 <= share <= 1
    line = "".join("x" if i == at else "·" if i in (0, _PLACES // 2, _PLACES - 1) else "-" for i in range(_PLACES))
    left, right = ("x " if at < 0 else "  "), (" x" if at >= _PLACES else "")
    return Text(f"{left}{line}{right}", style="red" if outside else "green")


@contextmanager
def guarding(ledger: Ledger, plan: str, settings: PromoteSettings, print_line: Callable[[str], None]) -> Iterator[None]:
    """Raise alarms of the run that is trained in the block; stop the run at a new alarm if [promote] says so.

    Stopping interrupts the block as Ctrl-C does: the run saves, and the same command resumes it. Alarms raised before the block do
    not stop the run.

    Args:
        plan: Key of the plan; its run may begin later.

    Raises:
        StageError: If the run was stopped.
    """
    stopped = list[Alarm]()

    def guard(done: threading.Event) -> None:
        monitor, old = None, set[str]()
        while not done.wait(_GUARD_SECONDS):
            try:
                if monitor is None:
                    monitor = Monitor(ledger, plan=plan, alarm_after=settings.alarm_after)
                    old = known_alarms(ledger, monitor.look().alarms)
                status = monitor.look()
                new = [alarm for alarm in status.alarms if alarm.key not in old]
                for line in raise_alarms(ledger, new, webhook=settings.webhook):
                    print_line(line)
                old |= {alarm.key for alarm in new}  # only now: after a fault they are raised at the next look
                if new and settings.on_alarm == "stop" and not status.ended and not done.is_set():
                    stopped.append(new[-1])
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            except StageError:  # the run has not begun
                continue
            except (LedgerUnavailableError, OSError) as error:  # training matters more than monitoring
                _log.warning("the run can't be monitored for now: %s", error)

    try:
        with in_background(guard, "guard full run"), enable_sigint():
            yield
    except (KeyboardInterrupt, PreemptedError):  # PreemptedError if the workers were preempted and have saved
        if stopped:
            raise StageError(
                f'promote: stopped by promote.on_alarm = "stop": {stopped[0]}; run the same command again to resume from the '
                "last checkpoint"
            ) from None
        raise
