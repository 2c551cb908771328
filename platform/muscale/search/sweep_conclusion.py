"""Conclusion of a sweep's record: the winner, its certainty over seeds, and warnings about the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from muscale.errors import StageError
from muscale.search.record import Record
from muscale.search.sweep_result import SweepResult
from muscale.search.sweep_tables import annealed_table, copies_table, known_noise, rungs_table, trials_table
from muscale.search.trial import TrialPlan
from muscale.settings.config import StudyConfig
from scaling import Finalists, ScalingError, compare_finalists


def make_result(
    config: StudyConfig,
    plan: TrialPlan,
    record: Record,
    annealed: pd.DataFrame,
    repeated: pd.DataFrame,
    runs: pd.DataFrame | None = None,
    notes: Sequence[str] = (),
) -> SweepResult:
    """The result of what was recorded.

    Args:
        annealed: Runs under the search's own seed: trial, rung, n_tokens, loss.
        repeated: Runs of the finalists under other seeds: trial, seed, loss.
        runs: The ledger's, in which others may tell how far seeds differ.
        notes: Messages about the search that the record does not hold.

    Raises:
        StageError: If no trial came to an annealed end.
    """
    finished = annealed_table(plan, record, annealed)
    table = trials_table(plan, record, finished, repeated)
    if table.empty or table["annealed_loss"].isna().all():
        raise StageError(f"sweep: no trial has a loss after its learning rate was annealed; {_without_loss(record)}")
    noise = None if runs is None else known_noise(runs, plan, config.sweep.space)
    finalists = _finalists(repeated, noise)
    winner = _winner(config.sweep.cost_weight, record, table, finalists)
    rung = int(annealed.dropna().query("trial == @winner")["rung"].max())
    short = list(_shorter(plan, record, rung))
    if finalists and short and record.ranking(plan.top):
        finalists = replace(
            finalists, trials=finalists.trials.assign(p_best=math.nan), reasons=(*finalists.reasons, *short)
        )
    return SweepResult(
        trials=table,
        rungs=rungs_table(plan, record),
        annealed=finished,
        best=replace(plan.given(record.path_towards(winner, rung), rung), schedule=config.hyperparameters.schedule),
        winner=winner,
        finalists=finalists,
        copies=copies_table(record),
        space=config.sweep.space,
        is_population=config.sweep.is_population,
        seed=config.sweep.seed,
        loss_unit=config.model.loss_unit,
        narrowings=tuple(
            {"first_trial": each.first_trial, **each.narrowed} for each in record.rounds if each.narrowed is not None
        ),
        notes=(
            *short,
            *_notes(config, plan, record, finalists, comparable=finalists is not None or repeated.empty),
            *notes,
        ),
    )


def _without_loss(record: Record) -> str:
    """How many trials diverged and how many trainings failed, with the reason of the first failure or else what to change."""
    failures = [reason for trial in record.configs if (reason := record.failure(trial)) is not None]
    n_diverged = sum(map(record.diverged, record.configs)) - len(failures)
    failures += record.failed_runs.values()
    found = f"{n_diverged} of {len(record.configs)} trials diverged"
    if failures:
        return f"{found}, {len(failures)} trainings failed, the first for this reason: {failures[0]}"
    return f"{found}; lower the upper bound of sweep.space.learning_rate or raise sweep.trials"


def _finalists(repeated: pd.DataFrame, noise: tuple[float, float] | None) -> Finalists | None:
    """Comparison of the finalists; noise known from later stages may change its certainty, not the winner that they follow."""
    if not repeated["loss"].notna().any():
        return None
    try:
        alone = compare_finalists(repeated)
    except ScalingError:  # divergences left them without seeds in common; `_notes` says so
        return None
    informed = compare_finalists(repeated, noise=noise) if noise else alone
    return informed if informed.winner == alone.winner else alone


def _winner(cost_weight: float, record: Record, table: pd.DataFrame, finalists: Finalists | None) -> int:
    """The trial with the least log loss + cost_weight · log seconds, of the finalists that can be best, else of the longest."""
    if finalists and not cost_weight:
        return int(finalists.winner)
    longest = table[table["n_tokens"] == table["n_tokens"].max()].set_index("trial")["annealed_loss"].dropna()
    losses = finalists.trials.loc[finalists.trials["p_best"] != 0, "loss"] if finalists else longest  # NaN: not known
    seconds = np.array([max(record.cost(int(trial))[1], 1e-9) for trial in losses.index])
    return int((np.log(losses) + cost_weight * np.log(seconds)).idxmin())


def _shorter(plan: TrialPlan, record: Record, rung: int) -> Iterator[str]:
    """Warning that the winner is of a shorter length than the search's, with the number of trials that diverged at that one."""
    if rung < plan.top:
        yield (
            f"the winner has {plan.run_tokens(rung):,} tokens, not {plan.run_tokens(plan.top):,}: no trial has a loss there, "
            f"and {len(record.ranking(plan.top))} diverged before they reached it"
        )


def _notes(
    config: StudyConfig, plan: TrialPlan, record: Record, finalists: Finalists | None, *, comparable: bool
) -> Iterator[str]:
    yield from _budget_notes(config, plan, record)
    for (trial, rung), reason in record.failed.items():
        if (result := record.results.get((trial, rung))) and result.loss is None:
            yield f"trial {trial} failed before rung {rung} and counts as diverged: {reason}"
    for (trial, rung, seed), reason in record.failed_runs.items():
        run = f"annealed run of trial {trial} from rung {rung}" + ("" if seed is None else f", seed {seed},")
        yield f"the {run} failed and counts as diverged: {reason}"
    searched, wanted = plan.defaults.schedule, config.hyperparameters.schedule
    if searched != wanted:
        yield (
            f"searched under schedule {searched}, but the full run follows {wanted}: rankings under one don't carry over "
            "to the other"
        )
    if record.rounds[-1].searcher == "grid":
        points = len(config.sweep.space.grid(config.sweep.grid_points))
        if points > config.sweep.trials:
            yield f"the grid has {points} points, of which sweep.trials = {config.sweep.trials} were searched, in order"
    repeats = config.sweep.n_seeds
    done = {} if finalists is None else {int(trial): int(row["n_runs"]) for trial, row in finalists.trials.iterrows()}
    if not comparable:
        yield (
            "the finalists can't be compared, because too many of their repetitions diverged: lower the rate's upper bound or raise "
            "sweep.n_seeds"
        )
    elif not done:
        yield (
            "the winner was run with one seed only; "
            + (f"sweep.n_seeds asks for {repeats} more" if repeats else "set sweep.n_seeds")
        )
    for trial, n_runs in done.items():
        if n_runs < repeats:
            yield f"trial {trial} was repeated over {n_runs} of the {repeats} seeds that sweep.n_seeds asks for"


def _budget_notes(config: StudyConfig, plan: TrialPlan, record: Record) -> Iterator[str]:
    """Warning that fewer trials were started than asked for, with the limits that may be why."""
    settings, last_round = config.sweep, record.rounds[-1]
    named = {name: getattr(settings, name) for name in ("max_tokens", "max_flops", "max_device_hours")}
    limits = [f"sweep.{name} = {value:g}" for name, value in named.items() if value is not None]
    wanted = len(last_round.space.grid(settings.grid_points)) if last_round.searcher == "grid" else settings.trials
    begun, wanted = len(record.configs) - last_round.first_trial, min(wanted, settings.trials)
    if limits and begun < wanted:
        n_finalists = min(settings.n_finalists, len(record.configs))
        kept = n_finalists * settings.n_seeds * plan.run_tokens(plan.top)
        why = f"; {kept:,} tokens are kept for {settings.n_seeds} seeds of {n_finalists} finalists" if kept else ""
        yield f"{begun} of {wanted} trials were started within {' and '.join(limits)}{why}"
