"""Search with Ray Tune: start, continue or narrow a sweep under its lease, until its budget is used up."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from muscale.actors.cluster import staying_cluster
from muscale.actors.corpus_hashes import require_unchanged
from muscale.actors.tune_run import run_with_tune
from muscale.errors import StageError, refusing
from muscale.layout import CORPUS
from muscale.search.engine import Engine
from muscale.search.own_methods import is_noted_as_finished, note_methods
from muscale.search.record import Record
from muscale.search.record_view import RecordView
from muscale.search.sweep import OnResult, OnRun, Sweep
from muscale.search.sweep_result import SweepResult
from muscale.search.sweep_steps import SweepSteps
from muscale.store.lease import expired_leases, held_leases, lease, sweep_lease
from muscale.store.retention import prune
from search_spaces import SpaceError, narrow


def run_sweep(sweep: Sweep, on_result: OnResult, on_run: OnRun, *, narrower: bool = False) -> SweepResult:
    """Start or resume the search, up to the budget; then anneal, then repeat the finalists.

    If another process runs the same sweep, wait for it.

    Args:
        on_run: Called with the numbers of annealed runs of a kind that are done and wanted, and the kind.
        narrower: Once nothing is left to do, begin another round of as many trials in the space around the best region.

    Raises:
        KeyboardInterrupt: If the user interrupted the search; finished work is recorded.
        StageError: If no trial has a loss after annealing, a job failed for another reason than divergence, or the budget does
            not allow a trial; if a custom searcher or scheduler broke a rule, or the sweep needs a custom method that was not passed.
        LeaseLostError: If this process was suspended for so long that another one continues the sweep.
    """
    with lease(sweep.ledger, name := sweep_lease(sweep.key)) as token, staying_cluster():
        record = Record(sweep.ledger.under(name, token), sweep.key)
        if sweep.own_methods and not (sweep.searcher or sweep.scheduler):
            return _finished_before(sweep, record, narrower=narrower)
        _note_methods(sweep)
        engine = sweep.engine(record, on_result, on_run)
        if narrower and engine.is_finished:
            to_come = replace(record.rounds[-1], first_trial=len(record.configs))
            engine = sweep.engine(record, on_result, on_run, to_come)
            if engine.is_finished:
                raise StageError(
                    "sweep: its budget is used up, so no narrower space can be searched: raise sweep.max_tokens, "
                    "max_flops or max_device_hours"
                )
            # otherwise it was narrowed before, and had no budget
            if record.rounds[-1].first_trial < len(record.configs):
                _narrow(sweep, record)
            engine = sweep.engine(record, on_result, on_run)
        if not engine.is_finished:
            _search(sweep, engine)
            _prune(sweep)
        elif not record.configs:
            least = replace(engine.budget, trials=1, max_tokens=None, max_flops=None).most_tokens
            raise StageError(
                f"sweep: the budget does not allow a single trial, which takes up to {least:,} tokens, "
                f"{6.0 * engine.budget.n_params * least:.3g} FLOPs, with its annealed runs and the repetitions of the finalists: "
                "raise sweep.max_tokens or max_flops, or lower sweep.n_seeds"
            )
        _note_methods(sweep, record)
        return sweep.result(record)


def _note_methods(sweep: Sweep, record: Record | None = None) -> None:
    """Record the custom methods of a sweep that begins, or, if its record is passed, of a finished one."""
    if sweep.own_methods:
        finished = sweep.how_much(record) if record else None
        of = replace(sweep, own_methods={}).key
        note_methods(sweep.ledger, of, sweep.key, sweep.own_methods, finished)


def _finished_before(sweep: Sweep, record: Record, *, narrower: bool) -> SweepResult:
    """Return the result of a finished sweep whose custom methods were not passed."""
    if narrower or not is_noted_as_finished(sweep.ledger, sweep.key, sweep.how_much(record)):
        given = ", ".join(f"{role}={identity['name']}(…)" for role, identity in sweep.own_methods.items())
        raise StageError(
            f"sweep: this study's sweep was started by study.sweep({given}) and continues only with the same arguments; another value "
            "of a key of [sweep] starts another sweep"
        )
    return sweep.result(record)


def _prune(sweep: Sweep) -> None:
    """Remove the states that nothing resumes from, unless another process works on this study."""
    expired = expired_leases(sweep.ledger)
    if set(held_leases(sweep.ledger, expired)) <= {sweep_lease(sweep.key)}:
        prune(sweep.ledger, top_k=sweep.config.sweep.top_k, expired=expired, finished=sweep.key)


def _narrow(sweep: Sweep, record: Record) -> None:
    """Begin a round in the space around the best region."""
    search_round = record.rounds[-1]
    seen = RecordView(record, sweep.plan.top).observations
    results = pd.DataFrame([{**dict.fromkeys(search_round.space), **one.config, "loss": one.loss} for one in seen])
    with refusing("sweep: can't be narrowed", SpaceError):
        narrowed = narrow(search_round.space, results)
    record.begin_round(search_round.searcher, narrowed.space, narrowed.to_dict())


def _search(sweep: Sweep, engine: Engine) -> None:
    """Run the engine's jobs with Tune."""
    require_unchanged(sweep.ledger.directory / CORPUS)
    steps = SweepSteps(plan=sweep.plan, rank_by=sweep.config.sweep.rank_by)
    run_with_tune(engine, steps, sweep.ledger, sweep.config.resources, sweep.callbacks)
