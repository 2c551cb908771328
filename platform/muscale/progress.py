"""What a person sees while a study runs: the stage, what is done of it, the best so far, the time left."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Update = Callable[[float, float, str], None]  # done, total, note


def silent(_done: float, _total: float, _note: str = "") -> None:
    """An update that shows nothing."""


class Display:
    """Progress of stages on standard error; a bar each in a terminal, a line each elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = Console(file=sys.stderr)

    def line(self, text: str) -> None:
        """Print a line above the bars."""
        if not self._quiet:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _lines(self, name: str) -> Update:
        """An update for logs: a line for every tenth of the way, and again of the next where one stage has several."""
        told, before = -1, (0.0, 0.0)

        def update(done: float, total: float, note: str) -> None:
            nonlocal told, before
            if done < before[0] or total != before[1]:
                told = -1
            before = done, total
            if (tenth := int(10 * done / total)) > told:
                told = tenth
                self.line(f"{name:<9} {done:,.0f} of {total:,.0f}  {note}")

        return update

    @contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """Show a stage while it runs; yields the function that moves its bar."""
        if self._quiet:
            yield silent
            return
        if not self._console.is_terminal:
            yield self._lines(name)
            return
        columns = (
            TextColumn("[bold]{task.fields[stage]:<9}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", stage=name, total=None)
            yield lambda done, total, note: progress.update(task, completed=done, total=total, description=note)


@contextmanager
def following(metrics: Path, n_tokens: int, update: Update) -> Iterator[None]:
    """Show the progress of a run in other processes by the last line of its metrics file."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(1.0):
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if not lines:
                continue
            try:
                row = json.loads(lines[-1])
            except ValueError:  # a line that is being written
                continue
            if "train_loss" in row:  # the last batches of a run may be left out
                update(row["tokens"], n_tokens, f"loss {row['train_loss']:.4f}")

    thread = threading.Thread(target=follow, name="follow full run", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
