"""The report's sections on the search and on the transfer of its results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from muscale.pages.sections import Section, as_table, drawn
from scaling import Verdict

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from muscale.search.search_so_far import SearchSoFar
    from muscale.search.sweep_result import SweepResult

SEARCH, TRANSFER = "The search", "Transfer"
FINALISTS = "Confidence in the winner"
_of_search = partial(Section, command="sweep", group=SEARCH)
_of_transfer = partial(Section, command="transfer", group=TRANSFER)


def search_sections(sweep: SweepResult | None) -> list[Section]:
    """Return the finished search, with a section for each figure that has data."""
    about = "Trials at the base shape, compared at rungs; trials that advanced and the best of each rung were annealed."
    if sweep is None:
        return [_of_search(title="What was searched", about=about)]
    whole = _of_search(
        title="What was searched",
        about=about,
        result=sweep.about,
        drawings=drawn(sweep.plot_survivors(), "loss of each trial from rung to rung"),
        table=as_table(_trials(sweep)),
    )
    parts = [
        _of_search(
            title=title,
            about=about,
            result=sweep.finalists.about if sweep.finalists and title == FINALISTS else None,
            drawings=drawn(figure, title.lower()),
            table=as_table(table),
        )
        for title, about, figure, table in _figures(sweep)
    ]
    if isinstance(reason := sweep.importance_or_reason, str):
        parts.append(
            _of_search(
                title="Which hyperparameters matter",
                about="Shares of the variance of log loss.",
                missing=f"Importance can't be estimated: {reason}.",
            )
        )
    return [whole, *parts]


def _trials(result: SweepResult) -> pd.DataFrame:
    """Return the trials without their costs, under names that can wrap, so that the table fits the page."""
    costs = [name for name in result.trials if name.startswith("cost_")]
    table = result.trials.drop(columns=["expected_loss", "on_front", *costs])
    table["n_tokens"] = [tokens or None for tokens in table["n_tokens"].tolist()]
    at_rungs = {
        name: f"loss at {int(name.removeprefix('loss_at_')):,}" for name in table if name.startswith("loss_at_")
    }
    table = table.rename(columns=at_rungs | {"annealed_loss": "annealed loss", "n_tokens": "annealed at"})
    return table if table["round"].any() else table.drop(columns="round")


def _figures(result: SweepResult) -> Iterator[tuple[str, str, go.Figure, pd.DataFrame | None]]:
    """Generate (title, description, figure, table) of every further figure that a sweep has data for."""
    if "learning_rate" in result.fitted.box.bounds:
        about = "Dots: annealed runs; lines: the fitted surface, with the other hyperparameters at their optimum; stars: its optima."
        yield "Loss against learning rate in the search", about, result.plot_rate(), result.optima
    if result.is_population:
        about = "Which member continued from which member's state; the thick path leads to the winner."
        yield "The population's lineage", about, result.plot_lineage(), result.copies
    if result.finalists:
        about = "The finalists under new seeds, with 90 % intervals."
        yield FINALISTS, about, result.plot_finalists(), result.finalists.trials.reset_index()
    if result.space.searched:
        about = "One line per trial; drag along an axis to select trials."
        yield "Every trial across its hyperparameters", about, result.plot_parallel(), None
    if not isinstance(result.importance_or_reason, str):
        about = "Shares of the variance of log loss; grey shares are indistinguishable from noise."
        table = result.importance().table.reset_index()
        yield "Which hyperparameters matter", about, result.plot_importance(), table
    yield (
        "Best loss against the cost of the search",
        "Steps: the best so far at each rung.",
        result.plot_history(),
        None,
    )
    about = "Annealed runs; the steps are the Pareto front of loss against compute."
    yield "Loss against compute in the search", about, result.plot_front(), None


def running_section(so_far: SearchSoFar | None, sweep: SweepResult | None, loss_unit: str) -> list[Section]:
    """Return the search in progress, until its trials are annealed."""
    if so_far is None or (sweep is not None and not so_far.running):
        return []
    return [
        _of_search(
            title="Search in progress",
            about="Every started trial with its loss at the last rung it reached; nothing is annealed yet.",
            result=str(so_far),
            drawings=drawn(so_far.plot(loss_unit), "loss of each trial so far, from rung to rung"),
            table=as_table(so_far.trials),
        )
    ]


def transfer_sections(verdict: Verdict | None) -> list[Section]:
    """Return the verdict with its drifts, a section for each scale and hyperparameter, and the laws across tokens."""
    about = "Under muP the best rate should not change with width; the verdict is a condition of the gate."
    horizon, batch, missing = (verdict.horizon, verdict.batch, verdict.missing) if verdict else (None, None, {})
    laws = [
        _of_transfer(
            title="Best rate against training tokens",
            about="muP does not cover longer training; this law scales the rate with the tokens.",
            result=str(horizon) if horizon else missing.get("horizon law"),
            drawings=drawn(horizon and horizon.plot(), "best learning rate against training tokens"),
        )
    ]
    if batch or "batch law" in missing:
        laws.append(
            _of_transfer(
                title="Best batch against training tokens",
                about="Loss at equal tokens, with the rate tuned for each batch; the best batch depends on tokens, not on size.",
                result=str(batch) if batch else missing.get("batch law"),
                drawings=drawn(batch and batch.plot(), "best batch against training tokens"),
                table=as_table(batch.cells if batch else None),
            )
        )
    if verdict is None:
        title = "Loss against learning rate, per width"
        return [_of_transfer(title=title, about=about), *laws]
    if verdict.axis_verdicts:
        about += " Axes of experts are a condition only if the full run or a run of the ladder differs from [model] along them."
    several = len(verdict.transfers) > 1
    panels = [
        _of_transfer(
            title=f"Loss against {'learning rate' if found.over == 'rate' else found.over}, per {found.along}",
            about="Dotted: the runs, with the range over seeds; solid: the parabola; stars: the optima.",
            result=found.about,
            drawings=drawn(found.plot(), f"loss against {found.over} for each {found.along}"),
            table=as_table(found.table().reset_index()),
        )
        for found in verdict.transfers
    ]
    summary = _of_transfer(
        title="Does it transfer?",
        about=about,
        result=verdict.about,
        drawings=drawn(verdict.plot_drifts() if several else None, "drift of each optimum with its interval"),
        table=as_table(verdict.table()),
    )
    return [summary, *panels, *laws]
