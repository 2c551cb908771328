"""Budget and cost of a sweep. The sweep stops before the first segment that would exceed the budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from muscale.search.record import Record


@dataclass(frozen=True, kw_only=True)
class SweepBudget:
    """Limits of a sweep; None means no limit.

    Attributes:
        trials: Maximum number of suggestions in the whole sweep.
        max_tokens, max_flops, max_device_hours: Limits on all training of the sweep; branches and repetitions count as soon as
            they are due. Device hours are those of a worker's GPUs, or of its CPUs if it has no GPU, at the speed so far.
        rung_tokens: Stable tokens of each rung, [R].
        branch_tokens: Further tokens that anneal a trial from each rung, [R].
        top_k: Trials of each rung that are annealed in addition to the trials that advance.
        n_finalists: Trials that are repeated over seeds at the end; tokens are reserved for them.
        repeat_tokens: Tokens of all repetitions of one finalist.
        repeated_tokens: Tokens already spent on repetitions; a longer search may find other finalists, and repeat those too.
        n_params: N of the model that is searched.
        devices: Devices of a worker, over all ranks of a trial.
        all_to_the_end: Whether every trial is trained to the last rung, as the members of a population are.
    """

    trials: int
    rung_tokens: tuple[int, ...]
    branch_tokens: tuple[int, ...]
    top_k: int
    n_finalists: int
    repeat_tokens: int
    n_params: int
    devices: float
    repeated_tokens: int = 0
    max_tokens: int | None = None
    max_flops: float | None = None
    max_device_hours: float | None = None
    all_to_the_end: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether anything but the number of trials limits the sweep."""
        return any(limit is not None for limit in (self.max_tokens, self.max_flops, self.max_device_hours))

    def for_population(self) -> SweepBudget:
        """Return the budget of a population: no more members than can all be trained to the end.

        The device hours limit the members only once the first member has reached a rung (`allows`), since that measures the speed.
        """
        members = self.trials
        while members and self._tokens_of(members) > self.most_tokens:
            members -= 1
        return replace(self, trials=members, all_to_the_end=True)

    @property
    def most_tokens(self) -> int:
        """Upper bound of the sweep's tokens: every trial trained to its end and annealed at every rung, and the repetitions."""
        tokens = self._tokens_of(self.trials)
        by_flops = tokens if self.max_flops is None else int(self.max_flops / (6.0 * self.n_params))
        return min(tokens, by_flops, tokens if self.max_tokens is None else self.max_tokens)

    def allows(self, record: Record, rung: int, until: int, training: Collection[int] = ()) -> bool:
        """Whether a segment from one rung (−1: the start) to another stays within every limit.

        Until a trial has a loss at the last rung, enough must be left to bring the most advanced trial there. With a limit of
        device hours, the first trial trains alone to its first rung, since that measures the speed; a new member of a
        population then needs the hours of all members to the end.

        Args:
            training: Trials that train; cancelled trials still train to their next rung.
        """
        if not self.is_limited:
            return True
        if self.max_device_hours is not None and not record.tokens and training:
            return False
        if rung < 0 and self.all_to_the_end and self.max_device_hours is not None:
            members = self._tokens_of(len(record.configs) + 1) + self.repeated_tokens
            if self._hours(record, members) > self.max_device_hours:
                return False
        ending = [trial for trial in training if trial in record.cancelled]
        tokens = self.spent(record) + self._in_flight(record, ending) + self._step(record, rung, until)
        tokens += (
            self._reserve(record, rung, until) + self._kept(len(record.configs) + (rung < 0)) + self.repeated_tokens
        )
        flops = 6.0 * self.n_params * tokens
        return (
            (self.max_tokens is None or tokens <= self.max_tokens)
            and (self.max_flops is None or flops <= self.max_flops)
            and (self.max_device_hours is None or self._hours(record, tokens) <= self.max_device_hours)
        )

    def spent(self, record: Record) -> int:
        """Tokens of all results at rungs, and of the branches due from them."""
        return record.tokens + sum(self._owed(record, rung) for rung in range(len(self.rung_tokens)))

    def _tokens_of(self, trials: int) -> int:
        """Tokens of `trials` trials to their end, annealed at every rung, and of the repetitions."""
        return trials * (self.rung_tokens[-1] + sum(self.branch_tokens)) + self._kept(trials)

    def _kept(self, trials: int) -> int:
        """Tokens reserved for the repetitions of the finalists among so many trials."""
        return min(self.n_finalists, trials) * self.repeat_tokens

    def _hours(self, record: Record, tokens: float) -> float:
        """Device hours of so many tokens at the speed of the results so far; 0 before the first result."""
        return record.seconds / max(record.tokens, 1) * tokens / 3600 * self.devices

    def _owed(self, record: Record, rung: int, *, more: int = 0) -> int:
        """Tokens of the branches due from a rung: of the trials that advanced, with `more` further ones, and of the best trials."""
        if rung < 0:
            return 0
        arrived, gone = len(record.ranking(rung)), record.n_advanced[rung] + more
        return min(arrived, gone + self.top_k) * self.branch_tokens[rung]

    def _in_flight(self, record: Record, ending: Iterable[int]) -> int:
        """Tokens of the segments without a result yet, and of their branches."""
        top = len(self.rung_tokens) - 1
        segments = [(record.last_rung(trial), until) for trial, until in record.open.items()]
        segments += [(rung, rung + 1) for rung in map(record.last_rung, ending) if rung < top]
        return sum(self._segment(rung, until) for rung, until in segments)

    def _step(self, record: Record, rung: int, until: int) -> int:
        """Tokens of a further segment, and of the branch that becomes due at its first rung."""
        return self._segment(rung, until) + self._owed(record, rung, more=1) - self._owed(record, rung)

    def _reserve(self, record: Record, rung: int, until: int) -> int:
        """Tokens that bring the most advanced trial from its target rung to the last; a further trial is about to run to `until`.

        The most advanced trial itself continues without: what it could not spend, no other trial could.
        """
        top = len(self.rung_tokens) - 1
        if any(math.isfinite(loss) and trial not in record.cancelled for loss, trial in record.ranking(top)):
            return 0
        if rung >= 0 and not record.open and not any(record.waiting(above) for above in range(rung + 1, top)):
            return 0
        going = max([until, *record.open.values()])  # the segment includes the branch at its target rung
        waiting = next((rung for rung in reversed(range(going + 1, top)) if record.waiting(rung)), None)
        return self._segment(going, top) if waiting is None else self._step(record, waiting, top)

    def _segment(self, rung: int, until: int) -> int:
        """Tokens of a segment from one rung (−1: the start) to another, and of the branches that may become due on the way."""
        stable = self.rung_tokens[rung] if rung >= 0 else 0
        return self.rung_tokens[until] - stable + sum(self.branch_tokens[rung + 1 : until + 1])
