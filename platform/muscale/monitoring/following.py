"""A run followed while it goes: alarms raised as they come, in its driver or in `muscale watch`, and the live view of it."""

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

from muscale.errors import LedgerUnavailableError, PreemptedError, StageError
from muscale.full_runs.records.alarms import Alarm, known_alarms, raise_alarms
from muscale.interrupts import enable_sigint
from muscale.monitoring.watch import Watch, Watcher, format_evaluation
from muscale.settings.promote import PromoteSettings
from muscale.store.ledger import Ledger

Until = Literal["now", "alarm", "end"]
_GUARD_SECONDS = 2.0
_SHOWN = 8  # evaluations in the live view
_PLACES = 31  # characters of the band in a line of it
_log = logging.getLogger(__name__)


def follow(
    watcher: Watcher,
    *,
    until: Until,
    every: float,
    settings: PromoteSettings,
    console: Console | None = None,
    before_look: Callable[[], None] = lambda: None,
) -> Watch:
    """Look again and again, raising alarms, until the run ends or, with "alarm", is alarming; "now" looks once.

    Args:
        watcher: Of the run.
        until: When to return.
        every: Seconds between two looks.
        settings: [promote], for the webhook.
        console: Where to show the run; on no terminal, only what is new. None: nowhere.
        before_look: Called before each look, as to fetch what an outside run has lost since.
    """
    told: set[str] = set()
    shown = Live(console=console, auto_refresh=False) if console and console.is_terminal else nullcontext()
    evaluated = 0
    with shown as live:
        while True:
            before_look()
            watch = watcher.look()
            new = [alarm for alarm in watch.alarms if alarm.key not in told]
            for line in raise_alarms(watcher.ledger, new, webhook=settings.webhook):
                (live.console if live else console or _logged).print(
                    line, soft_wrap=True, highlight=False, markup=False
                )
            told |= {alarm.key for alarm in new}
            if live:
                live.update(view(watch), refresh=True)
            elif console and until != "now" and len(watch.evaluations) > evaluated:
                new_rows = watch.evaluations.iloc[evaluated:].tail(_SHOWN).to_dict("records")
                for line in (str(watch).splitlines()[0], *map(format_evaluation, new_rows)):
                    console.print(line, soft_wrap=True, highlight=False, markup=False)
            if console and not live and until != "now":
                for event in watch.run_events:
                    if event.kind != "alarm" and str(event) not in told:
                        console.print(str(event), soft_wrap=True, highlight=False, markup=False)
                        told.add(str(event))
            evaluated = len(watch.evaluations)
            if until == "now" or watch.ended or (until == "alarm" and watch.alarming):
                return watch
            time.sleep(every)


class _Logged:
    """Where a line goes that nobody looks at."""

    def print(self, line: str, **_style: object) -> None:
        """Log it."""
        _log.warning("%s", line)


_logged = _Logged()


def view(watch: Watch) -> RenderableType:
    """What the terminal shows of a run."""
    table = Table(box=None, pad_edge=False)
    for title in ("tokens", "share", "loss", "low", "expected", "high"):
        table.add_column(title, justify="right")
    table.add_column("in the band")
    for row in watch.evaluations.tail(_SHOWN).to_dict("records"):
        known = row["place"] != "before the band"
        limits = [f"{row[name]:.4f}" if known else "–" for name in ("low", "expected", "high")]
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['share']:.1%}",
            f"{row['loss']:.4f}",
            *limits,
            _in_band(row["loss"], row["low"], row["high"]) if known else Text("before it begins", style="dim"),
        )
    head = Text(str(watch).splitlines()[0], style="bold")
    return Group(
        head,
        ProgressBar(total=watch.n_tokens, completed=min(watch.tokens, watch.n_tokens), width=60),
        Text(str(watch.band), style="dim"),
        table,
        *(Text(str(event), style="red") for event in watch.run_events[-_SHOWN:]),
        *([Text(watch.failure, style="red")] if watch.failure else []),
    )


def _in_band(loss: float, low: float, high: float) -> Text:
    """The loss on a line from the low to the high end of the band; beyond an end it stands outside it."""
    share = (loss - low) / (high - low)
    at = round(min(max(share, -0.1), 1.1) * (_PLACES - 1))
    outside = not 0 <= share <= 1
    line = "".join("x" if i == at else "·" if i in (0, _PLACES // 2, _PLACES - 1) else "-" for i in range(_PLACES))
    left, right = ("x " if at < 0 else "  "), (" x" if at >= _PLACES else "")
    return Text(f"{left}{line}{right}", style="red" if outside else "green")


@contextmanager
def guarding(ledger: Ledger, plan: str, settings: PromoteSettings, tell: Callable[[str], None]) -> Iterator[None]:
    """While a run goes on in the block, raise its alarms, and stop it at a new one where [promote] says so.

    To stop is to interrupt the block as Ctrl-C does: the last checkpoint stays, and the same command goes on from there. An
    alarm that was raised before the block began stops nothing.

    Args:
        ledger: The study's.
        plan: Key of the plan; its run may begin later.
        settings: [promote].
        tell: Is given each line.

    Raises:
        StageError: If the run was stopped.
    """
    done, stopped = threading.Event(), list[Alarm]()

    def guard() -> None:
        watcher, old = None, set[str]()
        while not done.wait(_GUARD_SECONDS):
            try:
                if watcher is None:
                    watcher = Watcher(ledger, plan=plan, alarm_after=settings.alarm_after)
                    old = known_alarms(ledger, watcher.look().alarms)
                watch = watcher.look()
                new = [alarm for alarm in watch.alarms if alarm.key not in old]
                old |= {alarm.key for alarm in new}
                for line in raise_alarms(ledger, new, webhook=settings.webhook):
                    tell(line)
                if new and settings.on_alarm == "stop" and not watch.ended and not done.is_set():
                    stopped.append(new[-1])
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            except StageError:  # not begun yet
                continue
            except (LedgerUnavailableError, OSError) as error:  # training is worth more than watching
                _log.warning("the run is not watched for now: %s", error)

    thread = threading.Thread(target=guard, name="guard full run", daemon=True)
    thread.start()
    try:
        with enable_sigint():
            yield
    except (KeyboardInterrupt, PreemptedError):  # the second where workers were told, and have saved
        if stopped:
            raise StageError(
                f"promote: stopped, as promote.on_alarm says: {stopped[0]}; run the same command again to go on from the "
                "last checkpoint"
            ) from None
        raise
    finally:
        done.set()
        thread.join()
