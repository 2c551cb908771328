"""Record of one sweep in the ledger: every suggestion, every result at a rung, every decision.

Only the driver that holds the sweep's lease writes the record; others may request the end of a trial (`muscale.store.cancels`).
Rows never change, and a trial's status follows from its rows, so reading the record restores the state of the sweep.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from muscale.search.sweep_jobs import AnnealJob, ConfigHistory, history_from_json, history_of, history_to_json
from muscale.store.cancels import cancelled_trials
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind, decisions, rounds, rungs, trials
from muscale.store.statements import EVENTS
from search_spaces import Config, Space


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """A result at a rung: the loss that trials are ranked by, in nats per token, None after a divergence or a failure.

    `tokens` and `seconds` are the cost since the previous rung; a failure has neither, and no segment ("").
    """

    trial: int
    rung: int
    loss: float | None
    segment: str
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """Part of a sweep with one space: the first space, or the space after a narrowing.

    `narrowed` describes the cuts and their reasons, in the form of `search_spaces.Narrowed.to_dict`; None for the first.
    """

    first_trial: int
    searcher: str
    space: Space
    narrowed: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CompleteGeneration:
    """Members of a population that have all arrived at a rung, and (loss, trial) of them there, best first."""

    # First trial of the round, number of trials and number of cancelled trials, which determine the members.
    of: tuple[int, int, int]
    rung: int
    members: list[int]
    ranking: list[tuple[float, int]]


@dataclass(frozen=True, kw_only=True)
class SweepEvent:
    """The start of a trial, its result at a rung, or the decision to train it further; `Record.events` has them in order.

    Attributes:
        config: Values with which the trial trains from here on; for a result, the values that led to it.
        rung: Rung of the result, or rung from which the trial continues; −1 for a start.
        result: The result; None for a start and a decision.
    """

    trial: int
    config: Config
    rung: int
    result: RungResult | None = None


@dataclass(kw_only=True)
class _Rung:
    """(loss, trial) of all trials that arrived at a rung, best first, and of the trials that wait there.

    `changes` has the changes of log loss to the next rung, smallest first; None until they are needed.
    """

    ranking: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    changes: list[float] | None = None


class Record:
    """Rows of a sweep in memory, read from the ledger once and written through to it.

    A trial is in one of three states:

    - Open: from its start, or the decision to continue it, to its result at the target rung, or at an earlier one without a loss.
      The rungs before the target are passed. Such a segment of training has one path.
    - At rest: it has arrived at its last rung, and a scheduler may continue it. It is `waiting` there if it has a loss; a trial
      that diverged can only continue from another member's state.
    - Cancelled: no scheduler continues it. Its job ends at the next rung, or later if the request comes as it leaves the rung.

    A trial has advanced from each rung that it passed, and from each rung from which it was continued. A cancelled trial may end
    at the rung that it passed last, so it counts as advanced from there only if it arrives at the next rung after all.
    """

    def __init__(self, ledger: Ledger, sweep: str) -> None:
        self._ledger, self.sweep = ledger, sweep
        failures = ledger.results(ResultKind.FAILURE)  # read first, so that the trial of each is among the rows
        rows = ledger.sweep_rows(sweep)
        self.rounds = [self._round(row) for row in rows["rounds"]]
        self.configs: dict[int, Config] = {}
        self.paths: dict[int, ConfigHistory] = {}
        self.donors: dict[tuple[int, int], int] = {}
        self.results: dict[tuple[int, int], RungResult] = {}
        self.open: dict[int, int] = {}  # target rung of each running trial
        self.cancelled: dict[int, str] = {}  # trials whose training ends, and why
        # Why a trial could not be trained to a rung, and (trial, rung, seed) of the annealed runs that failed, with the reason.
        self.failed: dict[tuple[int, int], str] = {}
        self.failed_runs: dict[tuple[int, int, int | None], str] = {}
        self.advanced: set[tuple[int, int]] = set()  # (trial, rung) from which it advanced to another
        self.n_advanced: Counter[int] = Counter()  # by rung
        self.tokens, self.seconds = 0, 0.0  # of all results
        self.events: list[SweepEvent] = []
        self.generation: CompleteGeneration | None = None  # the latest, cached for the population
        self._last: dict[int, int] = {}
        # (first rung, path) of each segment of a trial: one from its start, and one from every decision to continue it.
        self._segments: dict[int, list[tuple[int, ConfigHistory]]] = {}
        self._rungs: dict[int, _Rung] = {}
        for row in failures:
            if row["payload"]["sweep"] == sweep:
                self._note_failure(row["payload"])
        for row in sorted(itertools.chain(*(rows[table] for table in EVENTS)), key=lambda row: row["sequence"]):
            if "number" in row:
                self._started(row["number"], row["config"], row["until"])
            elif "until" in row:
                self._gone_on(row["trial"], row["rung"], row["until"], history_from_json(row["path"]), row["donor"])
            else:
                self._add_result(RungResult(**{name: row[name] for name in RungResult.__dataclass_fields__}))
        self.read_cancel_requests()

    def read_cancel_requests(self) -> None:
        """Read new requests to cancel trials: cancelled trials train no further, and their results stay."""
        for trial, reason in cancelled_trials(self._ledger, self.sweep).items():
            if trial not in self.cancelled and trial in self.configs:
                self.cancelled[trial] = reason
                last = self.last_rung(trial)
                if self.open.pop(trial, None) is not None and last >= self._segments[trial][-1][0]:
                    self.advanced.discard((trial, last))  # it was to pass this rung, and may end there
                    self.n_advanced[last] -= 1
                for rung in [*self._rungs]:
                    self._waits_no_more(trial, rung)

    def begin_round(self, searcher: str, space: Space, narrowed: dict[str, Any] | None = None) -> None:
        """Record the space of the coming trials, and the cuts that led to it."""
        row = {"first_trial": len(self.configs), "searcher": searcher, "space": space.to_dict(), "narrowed": narrowed}
        self._ledger.insert(rounds, sweep=self.sweep, round=len(self.rounds), **row)
        self.rounds.append(self._round(row))

    def round_of(self, trial: int) -> int:
        """Number of the round that a trial belongs to."""
        return max(number for number, each in enumerate(self.rounds) if each.first_trial <= trial)

    def start(self, config: Config, until: int) -> int:
        """Record a suggestion before its training, and return its number."""
        number = len(self.configs)
        self._ledger.insert(trials, sweep=self.sweep, number=number, config=config, until=until)
        self._started(number, config, until)
        return number

    def add_result(self, result: RungResult) -> None:
        """Note a result."""
        self._ledger.insert(
            rungs, sweep=self.sweep, **{name: getattr(result, name) for name in result.__dataclass_fields__}
        )
        self._add_result(result)

    def fail(self, trial: int, reason: str) -> RungResult:
        """Record that a trial can't be trained to its next rung: a result without a loss, as after a divergence."""
        rung = self.last_rung(trial) + 1
        self._insert_failure({"trial": trial, "rung": rung, "annealed": False, "seed": None, "reason": reason})
        result = RungResult(trial=trial, rung=rung, loss=None, segment="", tokens=0, seconds=0.0)
        self.add_result(result)
        return result

    def fail_run(self, job: AnnealJob, reason: str) -> None:
        """Record that an annealed run can't be trained; it counts as one that diverged."""
        self._insert_failure(
            {"trial": job.trial, "rung": job.rung, "annealed": True, "seed": job.seed, "reason": reason}
        )

    def has_failed(self, job: AnnealJob) -> bool:
        """Whether an annealed run is recorded as failed."""
        return (job.trial, job.rung, job.seed) in self.failed_runs

    def go_on(self, trial: int, until: int, path: ConfigHistory | None = None, donor: int | None = None) -> None:
        """Record the decision to continue a trial from its last rung, in a population possibly on another path."""
        rung, path = self.last_rung(trial), path or self.paths[trial]
        self._ledger.insert(
            decisions, sweep=self.sweep, trial=trial, rung=rung, until=until, path=history_to_json(path), donor=donor
        )
        self._gone_on(trial, rung, until, path, donor)

    def last_rung(self, trial: int) -> int:
        """The rung at which a trial arrived last, −1 before the first."""
        return self._last.get(trial, -1)

    def path_towards(self, trial: int, rung: int) -> ConfigHistory:
        """The path on which a trial trained towards a rung."""
        return next(path for first, path in reversed(self._segments[trial]) if first <= rung)

    def config_at(self, trial: int, rung: int) -> Config:
        """The configuration under which a trial trained towards a rung."""
        return self.path_towards(trial, rung)[-1][1]

    def loss(self, trial: int, rung: int) -> float:
        """The loss at a rung where the trial arrived, infinite after a divergence."""
        loss = self.results[trial, rung].loss
        return math.inf if loss is None else loss

    def diverged(self, trial: int) -> bool:
        """Whether the trial's last result is a divergence."""
        last = self.last_rung(trial)
        return last >= 0 and self.results[trial, last].loss is None

    def failure(self, trial: int) -> str | None:
        """Why the trial's last result is a failure; None where it is none."""
        return self.failed.get((trial, self.last_rung(trial))) if self.diverged(trial) else None

    def ranking(self, rung: int) -> list[tuple[float, int]]:
        """(loss, trial) of all that arrived at a rung, best first; divergences last."""
        return self._rung(rung).ranking

    def waiting(self, rung: int) -> list[tuple[float, int]]:
        """(loss, trial) of a rung's trials that have a loss, were not cancelled and have not advanced from the rung."""
        return self._rung(rung).waiting

    def changes(self, rung: int) -> list[float]:
        """Changes of log loss from a rung to the next of those that arrived at both with a loss, the least first."""
        found = self._rung(rung)
        if found.changes is None:
            arrived = [trial for _, trial in self.ranking(rung + 1)]
            found.changes = sorted(self._change(trial, rung) for trial in arrived if self._changed(trial, rung))
        return found.changes

    def place(self, trial: int, rung: int) -> int:
        """Number of trials before a trial in a rung's ranking, without cancelled ones."""
        here = (self.loss(trial, rung), trial)
        gone = sum((self.loss(c, rung), c) < here for c in self.cancelled if (c, rung) in self.results)
        return bisect_left(self.ranking(rung), here) - gone

    def losses(self, trial: int, rung: int) -> list[float]:
        """The losses of a trial at the rungs up to this one where it arrived."""
        return [self.loss(trial, r) for r in range(rung + 1) if (trial, r) in self.results]

    def cost(self, trial: int) -> tuple[int, float]:
        """Tokens and seconds of a trial's stem, in a population of all its generations."""
        results = [self.results[trial, rung] for rung in range(self.last_rung(trial) + 1)]
        return sum(result.tokens for result in results), sum(result.seconds for result in results)

    def status(self, trial: int, top: int) -> str:
        """`running`, `diverged`, `failed`, `completed`, `cancelled`, or `stopped` where no scheduler continued it."""
        if trial in self.open:
            return "running"
        if self.failure(trial) is not None:
            return "failed"
        if self.diverged(trial) or self.last_rung(trial) == top:
            return "diverged" if self.diverged(trial) else "completed"
        return "cancelled" if trial in self.cancelled else "stopped"

    @staticmethod
    def _round(row: dict[str, Any]) -> Round:
        space = Space.from_dict(row["space"])
        return Round(first_trial=row["first_trial"], searcher=row["searcher"], space=space, narrowed=row["narrowed"])

    def _started(self, number: int, config: dict[str, Any], until: int) -> None:
        self.configs[number] = config
        self.paths[number] = history_of(config)
        self._segments[number] = [(0, history_of(config))]
        self.open[number] = until
        self.events.append(SweepEvent(trial=number, config=config, rung=-1))

    def _insert_failure(self, failure: dict[str, Any]) -> None:
        key = " ".join(str(failure[name]) for name in ("trial", "rung", "annealed", "seed"))
        self._ledger.record_result(ResultKind.FAILURE, f"{self.sweep} {key}", {"sweep": self.sweep, **failure})
        self._note_failure(failure)

    def _note_failure(self, failure: dict[str, Any]) -> None:
        trial, rung, reason = failure["trial"], failure["rung"], failure["reason"]
        if failure["annealed"]:
            self.failed_runs[trial, rung, failure["seed"]] = reason
        else:
            self.failed[trial, rung] = reason

    def _add_result(self, result: RungResult) -> None:
        trial, rung = result.trial, result.rung
        self.events.append(SweepEvent(trial=trial, config=self.config_at(trial, rung), rung=rung, result=result))
        self.results[trial, rung] = result
        self.tokens += result.tokens
        self.seconds += result.seconds
        self._last[trial] = max(rung, self.last_rung(trial))
        loss = self.loss(trial, rung)
        insort(self.ranking(rung), (loss, trial))
        if math.isfinite(loss) and trial not in self.cancelled and (trial, rung) not in self.advanced:
            insort(self.waiting(rung), (loss, trial))
        if (changes := self._rung(rung - 1).changes) is not None and self._changed(trial, rung - 1):
            insort(changes, self._change(trial, rung - 1))
        if self._segments[trial][-1][0] < rung:
            self._advance(trial, rung - 1)  # again, if it was cancelled on the way
        if trial in self.open:
            if result.loss is None or rung >= self.open[trial]:
                del self.open[trial]
            else:
                self._advance(trial, rung)

    def _gone_on(self, trial: int, rung: int, until: int, path: ConfigHistory, donor: int | None) -> None:
        self._advance(trial, rung)
        self.paths[trial] = path
        self._segments[trial].append((rung + 1, path))
        self.open[trial] = until
        if donor is not None:
            self.donors[trial, rung] = donor
        self.events.append(SweepEvent(trial=trial, config=path[-1][1], rung=rung))

    def _advance(self, trial: int, rung: int) -> None:
        if (trial, rung) not in self.advanced:
            self.advanced.add((trial, rung))
            self.n_advanced[rung] += 1
        self._waits_no_more(trial, rung)

    def _changed(self, trial: int, rung: int) -> bool:
        """Whether a trial has a loss at this rung and the next: a member that diverged may continue as another member's copy."""
        both = ((trial, rung), (trial, rung + 1))
        return all(at in self.results and math.isfinite(self.loss(*at)) for at in both)

    def _change(self, trial: int, rung: int) -> float:
        return math.log(self.loss(trial, rung + 1) / self.loss(trial, rung))

    def _waits_no_more(self, trial: int, rung: int) -> None:
        if (trial, rung) in self.results:
            waiting, entry = self.waiting(rung), (self.loss(trial, rung), trial)
            if (at := bisect_left(waiting, entry)) < len(waiting) and waiting[at] == entry:
                del waiting[at]

    def _rung(self, rung: int) -> _Rung:
        return self._rungs.setdefault(rung, _Rung())
