"""Display of a running study: the stage, its progress, the best so far, and the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from muscale import json_lines
from muscale.background import in_background
from muscale.formatting import format_duration

_WORTH_TELLING_SECONDS = 10
_AT_ONCE_SECONDS = 1.0


class Update(Protocol):
    """Function that moves the bar of a stage."""

    def __call__(self, done: float, total: float, note: str, /, *, share: float | None = None) -> None:
        """Show `done` of `total`, and the note.

        Args:
            share: Share of the work that is done, if the counted units differ in size; by default done / total.
        """


def silent(_done: float, _total: float, _note: str = "", *, share: float | None = None) -> None:
    """Show nothing."""


class Pace:
    """Pace of a stage and its expected end; a stage may have several parts, each with its own pace.

    Rich's own estimate forgets everything more than half a minute old, but trials may take longer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: tuple[float, float] | None = None  # time of the first update, and its progress
        self._last = (0.0, 0.0)
        self._arrives: float | None = None

    def update(self, done: float, total: float) -> None:
        """Record the progress; less progress than before, or another total, starts a new part.

        Time counts from the last update before the first progress, since workers start before it.
        """
        now = self._clock()
        if self._begun is None or done < self._last[0] or total != self._last[1] or done == self._begun[1]:
            self._begun, self._arrives = (now, done), None
        self._last = done, total
        since, first = self._begun
        if done > first:
            self._arrives = now + (now - since) * (total - done) / (done - first)

    @property
    def left(self) -> float | None:
        """Seconds left at this pace; None before any progress."""
        return None if self._arrives is None else max(0.0, self._arrives - self._clock())


class _Left(ProgressColumn):
    """Column with the time left, in a terminal."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.left
        return Text(
            "" if left is None or task.finished else f"{format_duration(left)} left", style="progress.remaining"
        )


class Display:
    """Progress of stages on standard error: a bar for each in a terminal, lines elsewhere.

    Args:
        completed: Completes the commands in a line.
    """

    def __init__(
        self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic, completed: Callable[[str], str] = str
    ) -> None:
        self._quiet, self._completed = quiet, completed
        self._clock = clock
        self._console = Console(file=sys.stderr)
        self._bar: Progress | None = None

    def line(self, text: str) -> None:
        """Print a line above the bars."""
        if not self._quiet:
            self._console.print(self._completed(text), highlight=False, markup=False, soft_wrap=True)

    def _lines(self, name: str) -> Update:
        """Return an update for logs: a line for every tenth of a part, starting again for each part of a stage.

        A part that is complete at its start was known already and gets no line. Between its first and its last line a part gets at
        most one line a second.
        """
        shown, before, pace = -1, (0.0, 0.0), Pace(self._clock)
        begun = printed = self._clock()

        def update(done: float, total: float, note: str, *, share: float | None = None) -> None:
            nonlocal shown, before, begun, printed
            now, share = self._clock(), done / total if share is None or done == total else share
            if done < before[0] or total != before[1]:
                shown = 10 if done == total and now - begun < _AT_ONCE_SECONDS else -1
            before = done, total
            begun = now if done == total else begun
            pace.update(share * total, total)
            is_due = shown < 0 or done == total or now - printed >= _AT_ONCE_SECONDS
            if (tenth := int(10 * share)) > shown and is_due:
                shown, printed = tenth, now
                left = (
                    f", {format_duration(pace.left)} left" if pace.left and pace.left >= _WORTH_TELLING_SECONDS else ""
                )
                self.line(f"{name:<9} {done:,.0f} of {total:,.0f}  {note}{left}")

        return update

    @contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """Show a stage while it runs; yield the function that moves its bar."""
        if self._quiet:
            yield silent
            return
        if not self._console.is_terminal:
            yield self._lines(name)
            return
        pace = Pace(self._clock)
        columns = (
            TextColumn("[bold]{task.fields[stage]:<9}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}", style="progress.download"),
            TimeElapsedColumn(),
            _Left(pace),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            self._bar = progress
            task = progress.add_task("", stage=name, total=None, count="")

            def update(done: float, total: float, note: str, *, share: float | None = None) -> None:
                way = done if share is None or done == total else share * total
                pace.update(way, total)
                progress.update(task, completed=way, total=total, description=note, count=f"{done:,.0f}/{total:,.0f}")

            yield update

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away within the block, since it would hide a question to the user."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        yield
        self._bar.start()

    @contextmanager
    def reading(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Show a stage that reads files; yield the function that takes the bytes read and the total."""
        with self.stage(name) as update:
            yield lambda done, total: update(done, total, "bytes read")


@contextmanager
def following(metrics: Path, n_tokens: int, update: Update) -> Iterator[None]:
    """Show the progress of a run in other processes from the last line of its metrics file."""
    begun = (json_lines.last(metrics) or {}).get("tokens", 0)
    update(begun, n_tokens, "tokens; waiting for workers")

    def follow(done: threading.Event) -> None:
        while not done.wait(1.0):
            row = json_lines.last(metrics) or {}
            if row.get("tokens", 0) == begun:  # the time left counts from the last look before the first step
                update(begun, n_tokens, "tokens; waiting for workers")
            elif "train_loss" in row:  # the last batches of a run may be left out
                update(row["tokens"], n_tokens, f"tokens, training loss {row['train_loss']:.4f}")

    with in_background(follow, "follow full run"):
        yield
