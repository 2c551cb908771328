"""A tracked run, and the base class of trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from muscale.serialization import dotted

Kind = Literal["study", "trial", "ladder", "full"]
Opened = TypeVar("Opened")
MOST_OPEN = 64
"""Most runs that a tracker holds open at once; the least recently used is closed, and resumed when needed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Metrics at one point of a run.

    Attributes:
        at: Tokens, or the number of a run; unique within a stream.
        values: Finite values by name, including `tokens` or `number`.
    """

    at: int
    values: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """The values without `tokens` or `number`."""
        return {name: value for name, value in self.values.items() if name not in ("tokens", "number")}


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """State of a run so far.

    Attributes:
        key: Permanent key, by which a tracker resumes the run.
        group: Name that the runs of one study share.
        config: Settings as plain values without secrets.
        rows: Streams of rows by name, each ascending; one may be ahead of another.
        summary: Summary as plain values.
        files: Files by the names that they are kept under.
        ended: Outcome, once the run is over.
    """

    key: str
    name: str
    kind: Kind
    group: str
    config: Mapping[str, Any]
    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    ended: Literal["finished", "failed"] | None = None


class Tracker(ABC, Generic[Opened]):
    """A place where runs are shown. It is sent only what is new; an exception is reported once, and sending is repeated later.

    Attributes:
        name: Name in messages and of the tracker's record.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._open: OrderedDict[str, Opened] = OrderedDict()

    @property
    def place(self) -> str:
        """Name of the tracker's record; unique for each place."""
        return self.name

    def show(self, run: TrackedRun, rows: Sequence[Row], *, summary: bool, files: Mapping[str, Path]) -> None:
        """Add these rows and files to a run and, if new, its summary; a run that is not open is begun or resumed."""
        opened = self._opened(run)
        if rows:
            self._log(opened, rows)
        if summary:
            self._summarize(opened, run)
        for name, path in files.items():
            self._attach(opened, run, name, path)
        if run.ended:
            self._end(self._open.pop(run.key), run.ended)

    def close(self) -> None:
        """Close every open run; each can be resumed."""
        while self._open:
            _, opened = self._open.popitem()
            self._end(opened, None)

    def _opened(self, run: TrackedRun) -> Opened:
        if run.key not in self._open:
            if len(self._open) >= MOST_OPEN:
                _, oldest = self._open.popitem(last=False)
                self._end(oldest, None)
            self._open[run.key] = self._begin(run)
        self._open.move_to_end(run.key)
        return self._open[run.key]

    @abstractmethod
    def _begin(self, run: TrackedRun) -> Opened:
        """Begin the run, or resume the one that has its key."""

    @abstractmethod
    def _log(self, opened: Opened, rows: Sequence[Row]) -> None:
        """Add rows."""

    @abstractmethod
    def _summarize(self, opened: Opened, run: TrackedRun) -> None:
        """Write the run's summary."""

    @abstractmethod
    def _attach(self, opened: Opened, run: TrackedRun, name: str, path: Path) -> None:
        """Keep a copy of a file."""

    @abstractmethod
    def _end(self, opened: Opened, how: Literal["finished", "failed"] | None) -> None:
        """Close the run; None: it may be resumed."""


def flat(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Nested plain values by dotted names, for trackers without nested values; a list becomes its text."""
    leaves = dotted(values).items()
    return {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in leaves}
