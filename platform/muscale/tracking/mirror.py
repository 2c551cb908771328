"""Sends trackers what is new in the study; runs alongside the work and never blocks it.

The study's directory records what each tracker was sent, so a pass sends only what is new. An interrupted study, an unreachable
server, and a later `muscale sync` therefore give the same result, and nothing is logged twice. The exception is a kill between
sending and recording: what was sent in that moment is sent again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from muscale import json_lines
from muscale.errors import MuscaleError
from muscale.progress import Update, silent
from muscale.secrets import redacted
from muscale.store.lineage import input_key
from muscale.tracking.tracked import Row, TrackedRun, Tracker

Source = Callable[[], Iterable[TrackedRun]]
EVERY_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
"""Longest time that the end of a stage waits for late trackers (assumed)."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 60.0, 3600.0
"""First and longest pause of a tracker after failures; each failure doubles the pause (assumed)."""
_log = logging.getLogger(__name__)


class Sent:
    """Record of what one tracker was sent, in one file per tracker."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[tuple[str, str], set[int]] = {}
        self._marks: dict[tuple[str, str], str] = {}
        for record in json_lines.read(file):
            self._take(record)

    def _take(self, record: dict[str, object]) -> None:
        run = str(record["run"])
        match record:
            case {"stream": str(stream), "at": list(at)}:
                self._rows.setdefault((run, stream), set()).update(at)
            case {"mark": str(mark), "value": str(value)}:
                self._marks[run, mark] = value

    def new_rows(self, run: TrackedRun) -> dict[str, list[Row]]:
        """Rows by stream that the tracker was not sent yet."""
        known = {stream: self._rows.get((run.key, stream), set()) for stream in run.rows}
        rows = {stream: [row for row in rows if row.at not in known[stream]] for stream, rows in run.rows.items()}
        return {stream: new for stream, new in rows.items() if new}

    def is_new(self, run: TrackedRun, mark: str, value: str) -> bool:
        """Whether the tracker has not been sent this value of the mark."""
        return self._marks.get((run.key, mark)) != value

    def note(self, run: TrackedRun, rows: dict[str, list[Row]], marks: dict[str, str]) -> None:
        """Record that the tracker was sent these rows and marks."""
        records: list[dict[str, object]] = [
            {"run": run.key, "stream": stream, "at": [row.at for row in new]} for stream, new in rows.items()
        ]
        records += [{"run": run.key, "mark": mark, "value": value} for mark, value in marks.items()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        json_lines.append(self._file, *records)
        for record in records:
            self._take(record)


@dataclass(frozen=True, kw_only=True)
class Synced:
    """Report on what a pass sent.

    Attributes:
        updated: Number of updates of runs by tracker.
        failed: Reason by tracker that failed; the next pass sends what it lacks.
        folder: Folder of local files.
    """

    updated: Mapping[str, int]
    failed: Mapping[str, str]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"updated": dict(self.updated), "failed": dict(self.failed), "folder": str(self.folder)}

    def __str__(self) -> str:
        if not self.updated:
            return "sync: no tracker is configured; set tracking.wandb, tensorboard or mlflow"
        given = ", ".join(f"{place} {n}" for place, n in self.updated.items())
        lines = [f"sync: updated runs: {given}; local files in {self.folder}"]
        return "\n".join(lines + [f"sync: {reason}; run it again to send the rest" for reason in self.failed.values()])


class Mirror:
    """Trackers, each with a record of what it was sent."""

    def __init__(self, trackers: Sequence[Tracker[Any]], folder: Path) -> None:
        self._trackers = list(trackers)
        self._folder = folder
        self._sent: dict[str, Sent] = {}
        self._rests: dict[str, tuple[float, float]] = {}  # by name: end of the pause, and length of the next pause
        self._lock = threading.Lock()
        self._reported: dict[str, str] = {}
        self._given: Counter[str] = Counter()  # by name: number of updates of runs that the tracker was sent

    @contextmanager
    def following(self, live: Source, at_end: Source = lambda: ()) -> Iterator[None]:
        """Update the trackers while the block works, and once more after it, waiting `PATIENCE_SECONDS` at most.

        Args:
            live: Runs that may change meanwhile.
            at_end: Runs that are read once more at the end.
        """
        if not self._trackers:
            yield
            return
        done = threading.Event()

        def follow() -> None:
            while not done.wait(EVERY_SECONDS):
                self.bring_up(live)
            self.bring_up(live)
            self.bring_up(at_end)
            self._close()

        thread = threading.Thread(target=follow, name="sync", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(0.0 if "slow" in self._reported else PATIENCE_SECONDS)
            if thread.is_alive():
                self._tell("slow", f"not done after {PATIENCE_SECONDS:.0f} s; no longer waiting for it")

    def send(self, source: Source, update: Update = silent) -> Synced:
        """Send every tracker what is new in these runs, however long that takes."""
        if self._trackers:
            self.bring_up(source, update)
            self._close()
        updated = {tracker.place: self._given[tracker.name] for tracker in self._trackers}
        return Synced(updated=updated, failed=self._reported, folder=self._folder)

    def bring_up(self, source: Source, update: Update = silent) -> None:
        """Send every tracker what is new in these runs."""
        with self._lock:
            try:
                runs = list(source())
            except (MuscaleError, OSError) as error:  # the ledger may be unreachable; training matters more
                self._tell("source", f"the study can't be read: {error}")
                return
            for number, run in enumerate(runs, start=1):
                for tracker in self._trackers:
                    self._give(tracker, run)
                update(number, len(runs), run.name)

    def _give(self, tracker: Tracker[Any], run: TrackedRun) -> None:
        if tracker.name in self._rests and time.monotonic() < self._rests[tracker.name][0]:
            return
        try:
            sent = self._sent_to(tracker)
            rows = sent.new_rows(run)
            summary = input_key(_plain(run.summary), run.ended)
            marks = {"summary": summary} if sent.is_new(run, "summary", summary) else {}
            files = {}
            for name, path in run.files.items():
                digest = sha256(path.read_bytes()).hexdigest()
                if sent.is_new(run, name, digest):
                    files[name], marks[name] = path, digest
            if not rows and not marks:
                return
            ordered = sorted((row for new in rows.values() for row in new), key=lambda row: row.at)
            tracker.show(run, ordered, summary="summary" in marks, files=files)
            sent.note(run, rows, marks)
        # The only place that catches everything: errors of a library, the network or the disk must not end a run.
        except Exception as error:
            _, rest = self._rests.get(tracker.name, (0.0, FIRST_REST_SECONDS))
            self._rests[tracker.name] = time.monotonic() + rest, min(2 * rest, LONGEST_REST_SECONDS)
            self._tell(tracker.name, f"{tracker.name}: {type(error).__name__}: {error}")
        else:
            self._rests.pop(tracker.name, None)
            self._given[tracker.name] += 1

    def _sent_to(self, tracker: Tracker[Any]) -> Sent:
        if tracker.place not in self._sent:
            self._sent[tracker.place] = Sent(self._folder / f"{tracker.place}-sent.jsonl")
        return self._sent[tracker.place]

    def _close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # as in `_give`
                self._tell(tracker.name, f"{tracker.name}: {type(error).__name__}: {error}")

    def _tell(self, about: str, text: str) -> None:
        """Log a warning once for each subject."""
        if about not in self._reported:
            self._reported[about] = line = redacted(" ".join(text.split()))
            _log.warning("tracking: %s; `muscale sync` sends the missing results", line)


def _plain(values: object) -> object:
    return repr(values) if not isinstance(values, dict) else {name: _plain(value) for name, value in values.items()}
