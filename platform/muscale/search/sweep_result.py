"""Result of a sweep: its trials as a table, the winner with its uncertainty, the fitted optimum, and the cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from muscale.errors import StageError
from muscale.search.across_scales import box_of, coordinates
from muscale.search.rung_optima import RungOptima, edge_messages
from muscale.search.sweep_tables import COST, config_of, format_narrowing, format_values
from proxy_models.architecture.member import NATS
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import Finalists, Importance, ScalingError, hyperparameter_importance, pareto_front
from scaling.presentation import Result
from scaling.serialization import converter
from search_spaces import Space

if TYPE_CHECKING:
    import plotly.graph_objects as go

MIN_VALUES = 3
"""Different values from which a hyperparameter has a slope and a bend; with two it is compared as a choice is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResult(Result):
    """Result of a sweep.

    Attributes:
        trials: One row per trial, the best annealed loss under the search's own seed first: trial, round (0, plus one for each
            narrowing), status, configuration, the loss that ranked it at each rung reached, expected_loss (at the last rung; for
            a stopped trial, extrapolated to it), the loss and tokens of its longest annealed run (NaN and 0 without one),
            seeds (of that run, including the search's own), on_front (whether one of its annealed runs is on the front of loss
            against FLOPs), and the cost of its stem: tokens, FLOPs (6·N·D), seconds. Losses in `loss_unit`.
        rungs: A row for each result at a rung; see `sweep_tables.rungs_table`.
        annealed: A row for each annealed run under the search's own seed; see `sweep_tables.annealed_table`.
        best: Hyperparameters of the winner.
        winner: Trial of the winner.
        finalists: Comparison of the finalists over seeds that the search did not see; None without repetitions.
        copies: In a population, a row for each copy: trial, rung, donor and the new values.
        is_population: Whether trials changed their values during the run.
        narrowings: The cuts of each narrowing and their reasons, in the order of the rounds that followed: first_trial, and the
            values of `search_spaces.Narrowed.to_dict`.
        notes: Warnings about the search.
    """

    trials: pd.DataFrame = field(repr=False)
    rungs: pd.DataFrame = field(repr=False)
    annealed: pd.DataFrame = field(repr=False)
    best: Hyperparameters
    winner: int
    finalists: Finalists | None
    copies: pd.DataFrame = field(repr=False)
    space: Space
    is_population: bool
    seed: int
    narrowings: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    loss_unit: str = NATS

    @cached_property
    def fitted(self) -> RungOptima:
        """The surface through the annealed runs; those of a population changed their values on the way, and have none."""
        return RungOptima(runs=self.annealed.iloc[:0] if self.is_population else self.annealed, space=self.space)

    @property
    def optima(self) -> pd.DataFrame:
        """The fitted optimum of every searched hyperparameter at each length, with intervals; see `RungOptima.table`.

        Empty in a population, and where the annealed runs are too few.
        """
        return self.fitted.table

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the search's bounds, the winner, and how it was searched."""
        return (*self.notes, *self._near_ties(), *edge_messages(self.fitted.longest(), self.space), *self._misses())

    def importance(self) -> Importance:
        """Importance of each hyperparameter for the loss at the last rung, from every trial, stopped ones corrected to that rung.

        A hyperparameter that is inactive in a trial is placed in the middle, so its importance comes from the trials that have it.

        Raises:
            StageError: If the trials are too few, or none of their values differ.
        """
        found = self.importance_or_reason
        if isinstance(found, str):
            raise StageError(f"sweep: no importance of hyperparameters: {found}")
        return found

    def front(self) -> pd.DataFrame:
        """The annealed runs of which none is both cheaper in FLOPs and better, the cheapest first."""
        return pareto_front(self.annealed, COST)

    def plot_survivors(self) -> go.Figure:
        """Each trial's loss from rung to rung; those that advanced stand out."""
        from muscale.search.sweep_figures import draw_survivors, survivors_data

        return draw_survivors(survivors_data(self.rungs, self.winner), self.loss_unit)

    def plot_history(self) -> go.Figure:
        """The best loss so far at each rung, against what the search had cost."""
        from muscale.search.sweep_figures import draw_history, history_data

        return draw_history(history_data(self.rungs), self.loss_unit)

    def plot_parallel(self) -> go.Figure:
        """Every trial across its hyperparameters, coloured by its loss at the last rung."""
        from muscale.search.sweep_figures import draw_parallel, parallel_data

        return draw_parallel(parallel_data(self.rungs, self.trials, self.space), self.space)

    def plot_importance(self) -> go.Figure:
        """Shares of the variance of log loss.

        Raises:
            StageError: As `importance`.
        """
        return self.importance().plot()

    def plot_front(self) -> go.Figure:
        """Annealed loss against compute, with the front as steps."""
        from scaling.search.search_figures import draw_pareto, pareto_data

        return draw_pareto(pareto_data(self.annealed, self.front(), COST), "compute_flops")

    def plot_finalists(self) -> go.Figure:
        """The finalists with intervals.

        Raises:
            StageError: If none was repeated.
        """
        if self.finalists is None:
            raise StageError("sweep: no trial was repeated over seeds: set sweep.n_seeds")
        return self.finalists.plot()

    def plot_rate(self, name: str = "learning_rate") -> go.Figure:
        """Annealed loss against a numeric hyperparameter at each length, with the fitted optimum.

        Raises:
            ValueError: If it is not a searched number.
        """
        from muscale.search.sweep_figures import draw_response, response_data

        return draw_response(
            response_data(self.annealed, self.fitted, self.space, name), name, self.space, self.loss_unit
        )

    def plot_lineage(self) -> go.Figure:
        """Lineage of a population: copies between members; the winner's path stands out.

        Raises:
            StageError: If it was no population.
        """
        from muscale.search.sweep_figures import coloured_by, draw_lineage, lineage_data

        if not self.is_population:
            raise StageError(
                "sweep: only a population has a lineage (sweep.scheduler pbt, tune:PopulationBasedTraining or tune:PB2)"
            )
        name = coloured_by(self.space)
        return draw_lineage(lineage_data(self.rungs, self.winner, name), name)

    @property
    def about(self) -> str:
        """The trials, the winner, their cost, the narrowings and the warnings."""
        seeds = [f"over seeds  {self.finalists.sentence}"] if self.finalists else []
        return "\n".join([*self._totals(), *seeds, *self._notes()])

    def _totals(self) -> list[str]:
        best, status = self.trials.set_index("trial").loc[self.winner], self.trials["status"]
        failed = int((status == "failed").sum())
        return [
            f"sweep       {len(self.trials)} trials, {int((status == 'stopped').sum())} stopped early, "
            f"{int((status == 'diverged').sum())} diverged" + (f", {failed} failed" if failed else ""),
            f"winner      trial {self.winner}, best annealed loss {best['annealed_loss']:.4f}",
            f"values      {format_values(best, self.space, self.best)}",
            f"cost        {self.trials['cost_tokens'].sum():,} tokens, {self.trials[COST].sum():.3g} FLOPs and "
            f"{self.trials['cost_seconds'].sum() / 3600:.3g} worker hours, without annealing and repetitions",
        ]

    def _notes(self) -> list[str]:
        narrowings = [format_narrowing(number, one) for number, one in enumerate(self.narrowings, start=1)]
        return [*narrowings, *(f"warning: {warning}" for warning in self.warnings)]

    def __str__(self) -> str:
        """The sentences about the sweep around its finalists and its fitted optimum."""
        parts = [*self._totals(), *([str(self.finalists)] if self.finalists else [])]
        if len(longest := self.fitted.longest()):
            table = longest.drop(columns="n_tokens").to_string(index=False, na_rep="–", float_format="{:.4g}".format)
            parts.append(f"fitted optimum at {longest['n_tokens'].iloc[0]:,} tokens\n{table}")
        return "\n".join([*parts, *self._notes()])

    def _repr_html_(self) -> str:
        found = self.importance_or_reason
        importance = found if isinstance(found, str) else str(found)
        parts = [
            f"<pre>{escape(str(self))}</pre>",
            f"<b>importance</b><pre>{escape(importance)}</pre>",
            self.trials.head().to_html(index=False),
        ]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: null for what is not known."""
        found = self.importance_or_reason
        return {
            "best": self.best.to_dict(),
            "winner": self.winner,
            "finalists": self.finalists.to_dict() if self.finalists else None,
            "warnings": list(self.warnings),
            "optima": converter.unstructure(self.optima),
            "importance": {"missing": found} if isinstance(found, str) else found.to_dict(),
            "front": converter.unstructure(self.front()),
            **{name: converter.unstructure(getattr(self, name)) for name in ("trials", "rungs", "annealed", "copies")},
            "narrowings": list(self.narrowings),
        }

    @cached_property
    def importance_or_reason(self) -> Importance | str:
        """The importance, or why there is none."""
        if self.is_population:
            return "members of a population change their values during the run"
        expected = self.trials.set_index("trial")["expected_loss"]
        last = self.rungs.drop_duplicates("trial", keep="last")
        try:
            return importance_of(last.assign(loss=last["trial"].map(expected)), self.space, self.seed)
        except ScalingError as error:
            return str(error)

    def _near_ties(self) -> Iterator[str]:
        if self.finalists is None or self.finalists.verdict != "near-tie":
            return
        # By sweep.cost_weight the winner may be another than the comparison's.
        tied = (self.finalists.winner, *self.finalists.near_tie)
        if self.winner in tied:
            others = ", ".join(str(trial) for trial in tied if trial != self.winner)
            yield (
                f"a near-tie: trial {self.winner} is indistinguishable from trial {others} over {self.finalists.n_seeds} seeds; "
                "raise sweep.n_seeds to tell them apart"
            )

    def _misses(self) -> Iterator[str]:
        row = self.trials.set_index("trial").loc[self.winner].to_dict()
        for miss in self.fitted.misses(config_of(row, self.space), int(row["n_tokens"])):
            yield f"the winner, trial {self.winner}, is not the fitted optimum: {miss}"


def importance_of(trials: pd.DataFrame, space: Space, seed: int) -> Importance:
    """Shares of the variance of log loss, each hyperparameter on the scale on which it was searched, an ordinal by its rank.

    What a condition left out of a trial lies in the middle there (of a choice: at its first), so only the trials that have it
    determine its share.

    Args:
        trials: A row each: the searched values (missing where a condition left one out) and `loss`, nats per token, all of
            one length (NaN: diverged).

    Raises:
        ScalingError: If the trials are too few, or none of their values differ.
    """
    box = box_of(space)
    table = pd.DataFrame([coordinates(space, config_of(row, space)) for row in trials.to_dict("records")])
    table = table.assign(loss=trials["loss"].to_numpy())
    n_values = table[table["loss"].notna()].drop(columns="loss").nunique()
    numeric = [name for name in box.bounds if n_values[name] >= MIN_VALUES]
    others = [str(name) for name, n in n_values.items() if n > 1 and name not in numeric]
    if not numeric and not others:
        raise ScalingError(f"no hyperparameter takes two values in {int(table['loss'].notna().sum())} finished trials")
    bounds = {name: box.bounds[name] for name in numeric}
    for name, ends in bounds.items():
        table[name] = np.clip(table[name], *ends)
    return hyperparameter_importance(table, numeric, others, box=bounds, seed=seed)
