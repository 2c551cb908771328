"""A roll call of the ranks: if no step ends for too long, it reports each rank's last step and current line.

A collective that times out does not name the rank at fault: gloo reports a neighbour's error, and NCCL's watchdog ends the
process. So a thread of each rank writes the rank's last step to the ranks' store and, if no step follows in time, the current line.
Rank 0's thread compares the ranks.
"""

from __future__ import annotations

import logging
import math
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from muscale.formatting import listed

_LOOKS = 20  # checks within the patience
_LONGEST_TICK = 0.2  # seconds; the store is written at most once per step
_FOR_ANSWERS = 1.3  # times the patience, after which all ranks that can answer have done so


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of a rank: the last step that it took (on a GPU: queued), and the line that it executes, if it answered."""

    rank: int
    host: str
    step: int
    line: str = ""

    @classmethod
    def read(cls, rank: int, answer: str) -> Self:
        """Parse the answer of a rank's thread."""
        step, host, line = answer.split(" ", 2)
        return cls(rank=rank, host=host, step=int(step), line=line)


class RollCall:
    """Answers for this rank until it is ended; the calling thread takes the steps.

    Attributes:
        patience: Seconds without a step after which ranks are named; infinite: never.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        """Begin to answer; `step` is the last step that this rank took."""
        self.patience = math.inf
        self._step = step
        store: Any = _get_default_store()
        self._store = store.clone()  # a separate connection: a thread may wait in the other
        self._rank, self._n_ranks = dist.get_rank(), dist.get_world_size()
        self._trains = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roll call", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        answered, since, located, named = -1, time.monotonic(), False, False
        while True:
            idle = time.monotonic() - since
            try:
                if (step := self._step()) != answered:
                    self._answer(step)
                    answered, since, located, named = step, time.monotonic(), False, False
                elif not located and idle > self.patience:
                    self._answer(step, self._line())
                    located = True
                elif self._rank == 0 and not named and idle > _FOR_ANSWERS * self.patience:
                    logging.getLogger(__name__).warning("%s", describe(self._answers(), idle))
                    named = True
            except dist.DistError:
                return  # rank 0 is gone, and the store with it
            if self._ended.wait(min(self.patience / _LOOKS, _LONGEST_TICK)):
                return

    def _line(self) -> str:
        """The line that the training thread executes."""
        frame = sys._current_frames().get(self._trains)
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame else ""

    def _answer(self, step: int, line: str = "") -> None:
        self._store.set(_key(self._rank), f"{step} {platform.node()} {line}")

    def _answers(self) -> list[RankState]:
        answers = self._store.multi_get([_key(number) for number in range(self._n_ranks)])
        return [RankState.read(number, answer.decode()) for number, answer in enumerate(answers)]


def _key(rank: int) -> str:
    return f"muscale/step/{rank}"


def describe(ranks: Sequence[RankState], seconds: float) -> str:
    """A message that no step has ended for `seconds`, with the ranks by location; those behind, and those alone, come first."""
    locations: defaultdict[tuple[int, str], list[RankState]] = defaultdict(list)
    for rank in ranks:
        locations[rank.step, rank.line or "without an answer"].append(rank)
    lines = [
        f"  after step {step}, {line}: {_names(there)}"
        for (step, line), there in sorted(locations.items(), key=lambda found: (found[0][0], len(found[1])))
    ]
    return "\n".join([f"no step has finished for {seconds:.3g} s:", *lines])


def _names(ranks: Sequence[RankState]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([f'{rank.rank} on {rank.host}' for rank in ranks])}"
