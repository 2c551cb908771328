"""Progress of a sweep while it runs, and the prior runs that its searcher starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from muscale.importers.imported_space import place_of
from muscale.importers.results import describe_results, is_outside, record_results
from muscale.search.prior_runs import describe_prior_runs
from muscale.search.record import RungResult
from muscale.search.sweep import Sweep


class SweepProgress:
    """Progress bar of a sweep: started trials out of all trials, then its annealed runs and repetitions.

    In a population all members start in the first generation, so each generation of each member counts.
    """

    def __init__(self, sweep: Sweep, update: Callable[[float, float, str], None]) -> None:
        record = sweep.record()
        settings = sweep.config.sweep
        self._update, self._generations = update, settings.rungs if settings.is_population else 1
        self._round = settings.trials
        self._seen = {self._step(trial, rung) for trial, rung in record.results}
        self._best = min((one.loss for one in record.results.values() if one.loss is not None), default=math.inf)
        self._wanted = self._round + (record.rounds[-1].first_trial if record.rounds else 0)
        self._begun: set[str] = set()

    def begin(self) -> None:
        """Show how many trials began earlier; workers start now, and the first result may take long."""
        wanted = self._wanted * self._generations
        if len(self._seen) < wanted:
            self._update(len(self._seen), wanted, "trials; waiting for workers")

    def on_result(self, result: RungResult) -> None:
        """Show that a trial reached a rung."""
        self._seen.add(self._step(result.trial, result.rung))
        self._best = min(self._best, math.inf if result.loss is None else result.loss)
        if result.trial >= self._wanted:  # a new round began
            self._wanted += self._round
        best = f", best {self._best:.4f}" if self._best < math.inf else ""
        note = f"trials; last trial {result.trial} at rung {result.rung}{best}"
        self._update(len(self._seen), self._wanted * self._generations, note)

    def _step(self, trial: int, rung: int) -> tuple[int, int]:
        """Unit of progress: a trial, or in a population a generation of a member."""
        return trial, min(rung, self._generations - 1)

    def on_run(self, done: int, wanted: int, kind: str) -> None:
        """Show progress of annealed runs or repetitions; skip runs done earlier, and an end that was already shown."""
        if done < wanted:
            self._begun.add(kind)
        elif kind in self._begun:
            self._begun.remove(kind)
        else:
            return
        self._update(done, wanted, kind)


def describe_sources(sweep: Sweep) -> Iterator[str]:
    """Record imported results, and report the runs that the searcher uses from each source.

    All sources are read when a sweep begins, and sources named with the command are always read. Once the sweep has begun,
    a source of the study file may be missing.
    """
    begins = not sweep.ledger.rounds(sweep.key)
    for source in sweep.sources():
        asked = begins or str(source) in sweep.learn_from
        if is_outside(source):
            if asked or Path(place_of(str(source))[0]).exists():
                results = sweep.results_from(source)
                record_results(sweep.ledger, sweep.key, source, results)
                yield describe_results(source, results)
        elif asked:
            yield describe_prior_runs(source, sweep.plan.defaults, sweep.config.sweep.space, sweep.numerics)
